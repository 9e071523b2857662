/* Copies: host memory receives the bytes that Python queued (copy_queue.c), or known bytes (values.c), or else zeros,
 * since nothing was computed; each copy of unknown bytes is counted and reported. */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MANY_ZEROS = 1 << 20 };

static atomic_ullong readbacks, readback_bytes;
static int (*_Atomic on_readback)(uint64_t size);
static int (*_Atomic on_known_read)(uint64_t address);

int gm_note_readback(size_t size) {
    atomic_fetch_add_explicit(&readbacks, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&readback_bytes, size, memory_order_relaxed);
    int (*callback)(uint64_t) = atomic_load_explicit(&on_readback, memory_order_relaxed);
    bool fails = callback && gm_visible() && callback(size);
    return fails ? GM_LAUNCH_TIMEOUT : GM_SUCCESS;
}

/* Whether a stream is being captured: a captured copy runs when its graph is launched, and then nothing is known any
 * more. */
static bool captured(void *on) {
    int status = 0;
    cudaStreamIsCapturing(on, &status);
    gm_add_work(on);
    return status != 0;
}

/* Whether known bytes belong to an earlier tensor: on a GPU, the running operator's own kernels have written there. */
static bool is_stale(const void *from, size_t size) {
    int (*callback)(uint64_t) = atomic_load_explicit(&on_known_read, memory_order_relaxed);
    return callback && !gm_reads_argument() && gm_is_known(from, size) && callback((uint64_t)(uintptr_t)from);
}

/* Writes zeros to host memory. Whole pages of memory that cudaHostAlloc returned are given back to the host instead, and
 * then read as zeros: offloaded activations of a large model would not fit. Registered memory may be a file's. */
static void write_zeros(char *to, size_t size) {
    char *end = to + size;
    if (size >= MANY_ZEROS && gm_addresses_end((uintptr_t)to, GM_FROM_HOST_ALLOC) >= (uintptr_t)end) {
        uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
        char *first = to + (page - (uintptr_t)to % page) % page, *last = end - (uintptr_t)end % page;
        if (madvise(first, (size_t)(last - first), MADV_DONTNEED) == 0) {
            memset(to, 0, (size_t)(first - to));
            memset(last, 0, (size_t)(end - last));
            return;
        }
    }
    memset(to, 0, size);
}

static int copy(void *to, const void *from, size_t size, bool later) {
    if (size == 0) return GM_SUCCESS;
    if (!to || !from) return GM_INVALID_VALUE;
    bool to_device = gm_owner(to) >= 0, from_device = gm_owner(from) >= 0;
    if (to_device) {
        if (later) return GM_SUCCESS;
        if (from_device) gm_copy(to, from, size);
        else gm_write(to, from, size);
    } else if (!from_device) {
        memmove(to, from, size);
    } else if (!later && gm_queue_take(to, size)) {
        return GM_SUCCESS; /* before the known bytes: a freed block that PyTorch reuses may contain old bytes */
    } else if (later || is_stale(from, size) || !gm_read(from, to, size)) {
        write_zeros(to, size);
        return gm_note_readback(size);
    }
    return GM_SUCCESS;
}

/* A memset of elements of 1, 2 or 4 bytes. */
void gm_set_elements(void *address, unsigned value, unsigned width, size_t count, void *on) {
    unsigned char bytes[4];
    memcpy(bytes, &value, sizeof bytes);
    bool same = width == 1 || (bytes[0] == bytes[1] && (width == 2 || (bytes[1] == bytes[2] && bytes[2] == bytes[3])));
    uint64_t size = (uint64_t)width * count;
    if (!size || captured(on)) return;
    if (gm_owner(address) >= 0) {
        if (same) gm_fill(address, bytes[0], size);
        if (same || !gm_open_for_writing(address, size)) return;
    }
    for (size_t i = 0; i < count; i++) memcpy((char *)address + i * width, bytes, width);
}

int gm_copy_any(void *to, const void *from, size_t size, void *on) { return copy(to, from, size, captured(on)); }

static int set(void *address, int value, size_t size, bool later) {
    if (!size) return GM_SUCCESS;
    if (gm_owner(address) < 0) {
        memset(address, value, size);
    } else if (!later) {
        gm_fill(address, value, size);
    }
    return GM_SUCCESS;
}

GM_API int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    gm_count_wait();
    gm_await_stream(NULL);
    return gm_error(copy(to, from, size, false));
}

GM_API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *on) {
    bool later = captured(on);
    if (!later && gm_owner(to) == GM_PAGEABLE) gm_await_stream(on); /* such a copy has completed when the call returns */
    return gm_error(copy(to, from, size, later));
}

GM_API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, int kind, void *on) {
    bool later = captured(on);
    for (size_t row = 0; row < height; row++) {
        int status = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, later);
        if (status) return gm_error(status);
    }
    return GM_SUCCESS;
}

GM_API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *on) {
    return gm_error(copy(to, from, size, captured(on)));
}

GM_API int cudaMemset(void *address, int value, size_t size) { return set(address, value, size, false); }

GM_API int cudaMemsetAsync(void *address, int value, size_t size, void *on) {
    return set(address, value, size, captured(on));
}

typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
} pointer_attributes; /* CUDA 13 has reserved words after these, CUDA 12 has not */

enum { MEMORY_UNREGISTERED = 0, MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_MANAGED = 3 };

GM_API int cudaPointerGetAttributes(pointer_attributes *out, const void *pointer) {
    int owner = gm_owner(pointer);
    out->type = owner >= 0            ? MEMORY_DEVICE
                : owner == GM_MANAGED ? MEMORY_MANAGED
                : owner == GM_PINNED  ? MEMORY_HOST
                                      : MEMORY_UNREGISTERED;
    out->device = owner >= 0            ? owner
                  : owner == GM_MANAGED ? gm_managed_device(pointer)
                  : owner == GM_PINNED  ? gm_current_device()
                                        : -2;
    out->device_pointer = owner == GM_PAGEABLE ? NULL : (void *)(uintptr_t)pointer;
    out->host_pointer = owner >= 0 ? NULL : (void *)(uintptr_t)pointer;
    return GM_SUCCESS;
}

/* ---- functions that Python calls ---- */

/* Sets the function that is called, with no lock held, on every copy of unknown bytes to the host, with its size. It
 * returns whether the copy must fail, because its loop would not end. */
GM_API void gpumem_on_readback(int (*callback)(uint64_t)) { atomic_store(&on_readback, callback); }

/* Sets the function that is called, with no lock held, on every copy of known bytes to the host, with their address. It
 * returns whether the bytes belong to an earlier tensor there, and are now unknown. */
GM_API void gpumem_on_known_read(int (*callback)(uint64_t)) { atomic_store(&on_known_read, callback); }

/* Returns the number of copies to the host so far, and their bytes. */
GM_API void gpumem_readbacks(uint64_t *out) {
    out[0] = atomic_load(&readbacks);
    out[1] = atomic_load(&readback_bytes);
}
