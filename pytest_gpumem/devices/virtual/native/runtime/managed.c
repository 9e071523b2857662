/* Managed memory (cudaMallocManaged): memory of the host that kernels may use as well.
 *
 * On a GPU its pages move between host and device as they are used or prefetched, and a device that is full sends
 * them back (CUDA Programming Guide, "Unified Memory"): the card's memory is no limit, and PyTorch's allocator does
 * not see them. So they are charged to no device, and counted by themselves. They are real memory, which costs
 * nothing until it is written: programs read and write it on the host. Advice is stored by allocation, not by page.
 */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ATTACH_GLOBAL = 1, ATTACH_HOST = 2 }; /* flags of cudaMallocManaged */
enum { SET_READ_MOSTLY = 1, UNSET_READ_MOSTLY, SET_PREFERRED, UNSET_PREFERRED, SET_ACCESSED_BY, UNSET_ACCESSED_BY };
enum { ON_HOST = -1, NOWHERE = -2 };                                  /* cudaCpuDeviceId, cudaInvalidDeviceId */
enum { NO_LOCATION = 0, LOCATION_DEVICE = 1, LOCATION_HOST = 2 };     /* cudaMemLocationType */

typedef struct {
    size_t size;
    int device; /* the current one when it was allocated */
    int preferred, prefetched;
    bool read_mostly;
    unsigned accessed_by; /* bit i: device i */
} allocation;

static gm_ranges ranges; /* tag: the allocation */
static gm_managed totals;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int gm_managed_malloc(void **address, size_t size, unsigned flags) {
    if (!gm_visible()) return GM_NO_DEVICE;
    if (!address || !size || (flags != ATTACH_GLOBAL && flags != ATTACH_HOST)) return GM_INVALID_VALUE;
    *address = NULL;
    allocation *block = malloc(sizeof *block);
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uintptr_t start = (uintptr_t)map;
    bool ok = block && map != MAP_FAILED && gm_addresses_add(start, size, GM_MANAGED, GM_FROM_MANAGED);
    if (ok) {
        *block = (allocation){size, gm_current_device(), NOWHERE, NOWHERE, false, 0};
        pthread_mutex_lock(&lock);
        ok = gm_ranges_add(&ranges, (gm_range){start, start + size, (intptr_t)block, 0});
        if (ok) {
            totals.bytes += size;
            if (totals.bytes > totals.peak_bytes) totals.peak_bytes = totals.bytes;
        }
        pthread_mutex_unlock(&lock);
        if (!ok) gm_addresses_remove(start, GM_FROM_MANAGED);
    }
    if (!ok) {
        free(block);
        if (map != MAP_FAILED) munmap(map, size);
        return GM_OUT_OF_MEMORY;
    }
    *address = map;
    return GM_SUCCESS;
}

int gm_managed_free(void *address) {
    uint64_t size = gm_addresses_remove((uintptr_t)address, GM_FROM_MANAGED);
    if (!size) return GM_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    gm_range *range = gm_ranges_find(&ranges, (uintptr_t)address);
    free((void *)range->tag);
    gm_ranges_remove(&ranges, range);
    totals.bytes -= size;
    pthread_mutex_unlock(&lock);
    munmap(address, size);
    return GM_SUCCESS;
}

/* The allocation that holds `size` bytes from the address on, or NULL. The lock is held. */
static allocation *allocation_of(const void *address, size_t size) {
    uintptr_t start = (uintptr_t)address;
    const gm_range *range = gm_ranges_find(&ranges, start);
    return range && size && size <= range->end - start ? (allocation *)range->tag : NULL;
}

static bool is_place(int device) { return device == ON_HOST || (device >= 0 && device < gm_device_total()); }

int gm_managed_prefetch(const void *address, size_t size, int device) {
    if (!is_place(device)) return GM_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    allocation *a = allocation_of(address, size);
    if (a) a->prefetched = device;
    pthread_mutex_unlock(&lock);
    return a ? GM_SUCCESS : GM_INVALID_VALUE;
}

int gm_managed_advise(const void *address, size_t size, int advice, int device) {
    int status = GM_SUCCESS;
    if (advice >= SET_PREFERRED && advice != UNSET_PREFERRED && !is_place(device)) return GM_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    allocation *a = allocation_of(address, size);
    unsigned bit = device >= 0 ? 1u << device : 0;
    if (!a) status = GM_INVALID_VALUE;
    else if (advice == SET_READ_MOSTLY || advice == UNSET_READ_MOSTLY) a->read_mostly = advice == SET_READ_MOSTLY;
    else if (advice == SET_PREFERRED || advice == UNSET_PREFERRED)
        a->preferred = advice == SET_PREFERRED ? device : NOWHERE;
    else if (advice == SET_ACCESSED_BY) a->accessed_by |= bit;
    else if (advice == UNSET_ACCESSED_BY) a->accessed_by &= ~bit;
    else status = GM_INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return status;
}

static int location_type(int device) {
    return device == NOWHERE ? NO_LOCATION : device == ON_HOST ? LOCATION_HOST : LOCATION_DEVICE;
}

/* cudaMemRangeAttribute: 1 read mostly, 2 preferred location, 3 accessed by (a list), 4 last prefetch; 5 to 8 the type
 * and the ordinal of these two locations. */
int gm_managed_attribute(int *out, size_t room, int attribute, const void *address, size_t size) {
    int status = GM_SUCCESS;
    size_t count = room / sizeof *out;
    if (!out || !count || room % sizeof *out || (attribute != 3 && count != 1)) return GM_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    const allocation *a = allocation_of(address, size);
    if (!a) status = GM_INVALID_VALUE;
    for (size_t i = 0; a && attribute == 3 && i < count; i++) out[i] = NOWHERE;
    size_t used = 0;
    for (int device = 0; a && attribute == 3 && device < GM_MAX_DEVICES && used < count; device++)
        if (a->accessed_by >> device & 1u) out[used++] = device;
    if (a && attribute != 3) {
        switch (attribute) {
        case 1: *out = a->read_mostly; break;
        case 2: case 6: *out = a->preferred; break;
        case 4: case 8: *out = a->prefetched; break;
        case 5: *out = location_type(a->preferred); break;
        case 7: *out = location_type(a->prefetched); break;
        default: status = GM_INVALID_VALUE;
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int gm_managed_device(const void *address) {
    pthread_mutex_lock(&lock);
    const allocation *a = allocation_of(address, 1);
    int device = a ? a->device : 0;
    pthread_mutex_unlock(&lock);
    return device;
}

/* The device of a cudaMemLocation {type, id}, which is passed in one register. */
int gm_location_device(uint64_t location) {
    int type = (int)(uint32_t)location, id = (int)(uint32_t)(location >> 32);
    return type == LOCATION_DEVICE ? id : type == NO_LOCATION ? NOWHERE : ON_HOST;
}

/* In CUDA 13 the functions of CUDA 12 that end in _v2, which take a location, have the plain name. */
static int device_argument(uint64_t argument) {
    return gm_cuda_version() >= 13000 ? gm_location_device(argument) : (int)(uint32_t)argument;
}

GM_API int cudaMallocManaged(void **address, size_t size, unsigned flags) {
    return gm_error(gm_managed_malloc(address, size, flags));
}

GM_API int cudaMemPrefetchAsync(const void *address, size_t size, uint64_t to, ...) {
    return gm_error(gm_managed_prefetch(address, size, device_argument(to)));
}

GM_API int cudaMemPrefetchAsync_v2(const void *address, size_t size, uint64_t to, ...) {
    return gm_error(gm_managed_prefetch(address, size, gm_location_device(to)));
}

GM_API int cudaMemAdvise(const void *address, size_t size, int advice, uint64_t place) {
    return gm_error(gm_managed_advise(address, size, advice, device_argument(place)));
}

GM_API int cudaMemAdvise_v2(const void *address, size_t size, int advice, uint64_t place) {
    return gm_error(gm_managed_advise(address, size, advice, gm_location_device(place)));
}

GM_API int cudaMemRangeGetAttribute(void *out, size_t room, int attribute, const void *address, size_t size) {
    return gm_error(gm_managed_attribute(out, room, attribute, address, size));
}

GM_API int cudaMemRangeGetAttributes(void **out, size_t *rooms, const int *attributes, size_t count,
                                     const void *address, size_t size) {
    for (size_t i = 0; i < count; i++) {
        int status = gm_managed_attribute(out[i], rooms[i], attributes[i], address, size);
        if (status) return gm_error(status);
    }
    return GM_SUCCESS;
}

GM_API int cudaStreamAttachMemAsync(void *stream, void *address, size_t size, unsigned flags) {
    /* streams are always idle */
    return gm_error(gm_owner(address) == GM_MANAGED ? GM_SUCCESS : GM_INVALID_VALUE);
}

/* ---- functions that Python calls ---- */

GM_API void gpumem_managed(gm_managed *out) {
    pthread_mutex_lock(&lock);
    *out = totals;
    pthread_mutex_unlock(&lock);
}

GM_API void gpumem_forget_managed_peak(void) {
    pthread_mutex_lock(&lock);
    totals.peak_bytes = totals.bytes;
    pthread_mutex_unlock(&lock);
}
