/* cudaMallocAsync: each device's default memory pool.
 *
 * CUDA's driver maps physical memory to a pool's addresses on demand (CUDA Programming Guide, "Stream Ordered Memory
 * Allocator"), so a pool need not fragment: here it has the memory in use, rounded up, and keeps freed memory up to its
 * release threshold. How the driver rounds is not documented: here sizes are rounded up to 512 bytes, the alignment of
 * addresses, and a pool grows by 32 MiB while the device has that much. The report says that this is estimated. */
#include "runtime/runtime.h"

#include <pthread.h>
#include <stdatomic.h>

#ifdef REGION_SHIFT
#define POOL_SHIFT REGION_SHIFT
#else
#define POOL_SHIFT 40 /* 1 TiB of addresses per device */
#endif
#define ALIGNMENT ((uint64_t)512)
#define PAGE_SIZE ((uint64_t)2 << 20)
#define GROWTH ((uint64_t)32 << 20)

typedef struct {
    _Atomic uintptr_t base; /* 0: no addresses reserved yet; never changed once set */
    gm_pages blocks;        /* in units of the alignment */
    uint64_t used, used_high, reserved, reserved_high, threshold;
    bool not_reused[4]; /* cudaMemPoolReuse... 1 to 3: stored, but without effect as streams are always idle */
} pool;

static pool pools[GM_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t round_up(uint64_t size, uint64_t unit) { return (size + unit - 1) / unit * unit; }

static pool *pool_of(uintptr_t address) {
    for (int device = 0; device < GM_MAX_DEVICES; device++) {
        uintptr_t base = atomic_load_explicit(&pools[device].base, memory_order_relaxed);
        if (base && address >= base && address - base < (uintptr_t)1 << POOL_SHIFT) return &pools[device];
    }
    return NULL;
}

static bool pool_open(pool *p) {
    if (p->base) return true;
    void *map = gm_space_open((uint64_t)1 << POOL_SHIFT);
    if (!map) {
        gm_unsupported("cudaMallocAsync without 1 TiB of address space (see ulimit -v)", GM_OUT_OF_MEMORY);
        return false;
    }
    if (!gm_pages_open(&p->blocks, ((uint64_t)1 << POOL_SHIFT) / ALIGNMENT) ||
        !gm_addresses_add((uintptr_t)map, (uint64_t)1 << POOL_SHIFT, (int)(p - pools), GM_FROM_POOL)) {
        gm_space_close(map, (uint64_t)1 << POOL_SHIFT);
        return false;
    }
    p->base = (uintptr_t)map;
    return true;
}

/* Reserves memory for `used` bytes on the device. */
static int pool_hold(pool *p, uint64_t used) {
    int device = (int)(p - pools);
    uint64_t target = round_up(used, GROWTH);
    if (round_up(used, PAGE_SIZE) <= p->reserved) return GM_SUCCESS;
    if (target - p->reserved > gm_free_memory(device)) target = round_up(used, PAGE_SIZE);
    int status = gm_charge(device, target - p->reserved);
    if (status) return status;
    p->reserved = target;
    if (p->reserved > p->reserved_high) p->reserved_high = p->reserved;
    return GM_SUCCESS;
}

static void pool_trim(pool *p, uint64_t keep) {
    uint64_t least = round_up(p->used, PAGE_SIZE), target = keep > least ? round_up(keep, PAGE_SIZE) : least;
    if (target >= p->reserved) return;
    gm_discharge((int)(p - pools), p->reserved - target);
    p->reserved = target;
}

static int pool_malloc(pool *p, void **address, size_t size) {
    uint64_t rounded = round_up(size, ALIGNMENT);
    if (rounded > (uint64_t)1 << POOL_SHIFT) return GM_OUT_OF_MEMORY;
    if (!pool_open(p) || pool_hold(p, p->used + rounded)) return GM_OUT_OF_MEMORY;
    int64_t first = gm_pages_take(&p->blocks, rounded / ALIGNMENT);
    if (first < 0) return GM_OUT_OF_MEMORY;
    p->used += rounded;
    if (p->used > p->used_high) p->used_high = p->used;
    *address = (void *)(p->base + (uint64_t)first * ALIGNMENT);
    return GM_SUCCESS;
}

static int free_pooled(void *address) {
    pool *p = pool_of((uintptr_t)address);
    int status = GM_INVALID_VALUE;
    if (!p) return status;
    pthread_mutex_lock(&lock);
    uint64_t offset = (uintptr_t)address - p->base;
    gm_interval block = gm_pages_of(&p->blocks, offset / ALIGNMENT);
    if (block.end && offset == block.start * ALIGNMENT) {
        uint64_t size = (block.end - block.start) * ALIGNMENT;
        p->used -= size;
        gm_space_release(address, size);
        gm_pages_give(&p->blocks, block.start);
        if (p->reserved > p->threshold) pool_trim(p, p->threshold);
        status = GM_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

GM_API int cudaMallocAsync(void **address, size_t size, void *stream) {
    int capturing = 0;
    if (!address) return gm_error(GM_INVALID_VALUE);
    *address = NULL;
    if (!gm_visible()) return gm_error(GM_NO_DEVICE);
    if (gm_current_device() >= gm_visible_devices()) return gm_error(GM_INVALID_DEVICE);
    gm_use_device(gm_current_device());
    cudaStreamIsCapturing(stream, &capturing);
    if (capturing) return gm_error(gm_unsupported("cudaMallocAsync (while a graph is captured)", GM_NOT_SUPPORTED));
    if (size == 0) return GM_SUCCESS;
    gm_note_sizes(GM_POOL);
    pthread_mutex_lock(&lock);
    int status = pool_malloc(&pools[gm_current_device()], address, size);
    pthread_mutex_unlock(&lock);
    return gm_error(status);
}

/* ---- pools: a pool's handle is its address in `pools` ---- */

static pool *valid(void *handle) {
    pool *p = handle;
    return p >= pools && p < pools + GM_MAX_DEVICES ? p : NULL;
}

GM_API int cudaDeviceGetDefaultMemPool(void **out, int device) {
    if (device < 0 || device >= gm_device_total()) return gm_error(GM_INVALID_DEVICE);
    *out = &pools[device];
    return GM_SUCCESS;
}

/* cudaMemPoolAttr: 1 to 3 how freed memory is reused (int); 4 the threshold, 5 and 6 bytes reserved now and at peak, 7
 * and 8 bytes used now and at peak (uint64_t). */
enum { REUSE_LAST = 3, THRESHOLD = 4, RESERVED = 5, RESERVED_HIGH = 6, USED = 7, USED_HIGH = 8 };

static int get(pool *p, int attribute, void *value) {
    switch (attribute) {
    case 1: case 2: case REUSE_LAST: *(int *)value = !p->not_reused[attribute]; return GM_SUCCESS;
    case THRESHOLD: *(uint64_t *)value = p->threshold; return GM_SUCCESS;
    case RESERVED: *(uint64_t *)value = p->reserved; return GM_SUCCESS;
    case RESERVED_HIGH: *(uint64_t *)value = p->reserved_high; return GM_SUCCESS;
    case USED: *(uint64_t *)value = p->used; return GM_SUCCESS;
    case USED_HIGH: *(uint64_t *)value = p->used_high; return GM_SUCCESS;
    default: return gm_unsupported("cudaMemPoolGetAttribute (an attribute it does not know)", GM_INVALID_VALUE);
    }
}

static int set(pool *p, int attribute, void *value) {
    switch (attribute) {
    case 1: case 2: case REUSE_LAST: p->not_reused[attribute] = !*(const int *)value; return GM_SUCCESS;
    case THRESHOLD: p->threshold = *(const uint64_t *)value; return GM_SUCCESS;
    case RESERVED_HIGH: /* only zero may be set: it resets the peak to the current value */
        if (*(const uint64_t *)value) return GM_INVALID_VALUE;
        p->reserved_high = p->reserved;
        return GM_SUCCESS;
    case USED_HIGH:
        if (*(const uint64_t *)value) return GM_INVALID_VALUE;
        p->used_high = p->used;
        return GM_SUCCESS;
    default: return gm_unsupported("cudaMemPoolSetAttribute (an attribute it cannot set)", GM_INVALID_VALUE);
    }
}

static int with_attribute(int (*act)(pool *, int, void *), void *handle, int attribute, void *value) {
    pool *p = valid(handle);
    if (!p || !value) return gm_error(GM_INVALID_VALUE);
    pthread_mutex_lock(&lock);
    int status = act(p, attribute, value);
    pthread_mutex_unlock(&lock);
    return gm_error(status);
}

GM_API int cudaMemPoolGetAttribute(void *p, int what, void *value) { return with_attribute(get, p, what, value); }
GM_API int cudaMemPoolSetAttribute(void *p, int what, void *value) { return with_attribute(set, p, what, value); }

GM_API int cudaMemPoolTrimTo(void *handle, size_t keep) {
    pool *p = valid(handle);
    if (!p) return gm_error(GM_INVALID_VALUE);
    pthread_mutex_lock(&lock);
    pool_trim(p, keep);
    pthread_mutex_unlock(&lock);
    return GM_SUCCESS;
}

/* Every device can read every other device's memory here. */
GM_API int cudaMemPoolSetAccess(void *handle, const void *list, size_t count) {
    return gm_error(valid(handle) ? GM_SUCCESS : GM_INVALID_VALUE);
}

/* Memory that running graphs allocate: none, as a graph with allocations cannot be captured. */
GM_API int cudaDeviceGetGraphMemAttribute(int device, int attribute, uint64_t *value) {
    if (device < 0 || device >= gm_device_total()) return gm_error(GM_INVALID_DEVICE);
    *value = 0;
    return GM_SUCCESS;
}

GM_API int cudaDeviceSetGraphMemAttribute(int device, int attribute, void *value) {
    return gm_error(device < 0 || device >= gm_device_total() ? GM_INVALID_DEVICE : GM_SUCCESS);
}

/* ---- freeing: cudaFree and cudaFreeAsync both accept memory of cudaMalloc and cudaMallocAsync, cudaFree also managed
 * memory ---- */

static int free_of_device(void *address) {
    if (!address) return GM_SUCCESS;
    int status = gm_free_region(address);
    return status == GM_SUCCESS ? status : free_pooled(address);
}

int gm_free_any(void *address) { return gm_owner(address) == GM_MANAGED ? gm_managed_free(address) : free_of_device(address); }

GM_API int cudaFree(void *address) { return gm_error(gm_free_any(address)); }

GM_API int cudaFreeAsync(void *address, void *stream) {
    /* streams are always idle */
    return gm_error(free_of_device(address));
}
