/* Managed memory (cudaMallocManaged): host memory that kernels may use as well.
 *
 * On a GPU its pages move between host and device as they are used or prefetched, and a full device evicts them (CUDA
 * Programming Guide, "Unified Memory"): the card's memory is no limit, and PyTorch's allocator does not see them. So they
 * are charged to no device, and counted separately. They are real memory, which costs nothing until it is written:
 * programs read and write it on the host. No page moves: prefetches and advice are only checked. */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ATTACH_GLOBAL = 1, ATTACH_HOST = 2 }; /* flags of cudaMallocManaged */
enum { SET_READ_MOSTLY = 1, SET_PREFERRED = 3, UNSET_PREFERRED = 4, UNSET_ACCESSED_BY = 6 };   /* cudaMemoryAdvise */
enum { ON_HOST = -1, NOWHERE = -2 };                                  /* cudaCpuDeviceId, cudaInvalidDeviceId */
enum { NO_LOCATION = 0, LOCATION_DEVICE = 1, LOCATION_HOST = 2 };     /* cudaMemLocationType */

static gm_ranges ranges; /* tag: the current device at allocation */
static gm_managed totals;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int gm_managed_malloc(void **address, size_t size, unsigned flags) {
    if (!gm_visible()) return GM_NO_DEVICE;
    if (!address || !size || (flags != ATTACH_GLOBAL && flags != ATTACH_HOST)) return GM_INVALID_VALUE;
    *address = NULL;
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uintptr_t start = (uintptr_t)map;
    bool ok = map != MAP_FAILED && gm_addresses_add(start, size, GM_MANAGED, GM_FROM_MANAGED);
    if (ok) {
        pthread_mutex_lock(&lock);
        ok = gm_ranges_add(&ranges, (gm_range){start, start + size, gm_current_device(), 0});
        if (ok) {
            totals.bytes += size;
            if (totals.bytes > totals.peak_bytes) totals.peak_bytes = totals.bytes;
        }
        pthread_mutex_unlock(&lock);
        if (!ok) gm_addresses_remove(start, GM_FROM_MANAGED);
    }
    if (!ok) {
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
    gm_ranges_remove(&ranges, gm_ranges_find(&ranges, (uintptr_t)address));
    totals.bytes -= size;
    pthread_mutex_unlock(&lock);
    munmap(address, size);
    return GM_SUCCESS;
}

/* Returns the device of the allocation that contains `size` bytes from the address on; -1: none. */
static int device_of(const void *address, size_t size) {
    uintptr_t start = (uintptr_t)address;
    pthread_mutex_lock(&lock);
    const gm_range *range = gm_ranges_find(&ranges, start);
    int device = range && size && size <= range->end - start ? (int)range->tag : -1;
    pthread_mutex_unlock(&lock);
    return device;
}

static bool is_place(int device) { return device == ON_HOST || (device >= 0 && device < gm_device_total()); }

int gm_managed_prefetch(const void *address, size_t size, int device) {
    if (!is_place(device)) return GM_INVALID_DEVICE;
    return device_of(address, size) < 0 ? GM_INVALID_VALUE : GM_SUCCESS;
}

int gm_managed_advise(const void *address, size_t size, int advice, int device) {
    if (advice >= SET_PREFERRED && advice != UNSET_PREFERRED && !is_place(device)) return GM_INVALID_DEVICE;
    bool is_known = advice >= SET_READ_MOSTLY && advice <= UNSET_ACCESSED_BY;
    return is_known && device_of(address, size) >= 0 ? GM_SUCCESS : GM_INVALID_VALUE;
}

int gm_managed_device(const void *address) {
    int device = device_of(address, 1);
    return device < 0 ? 0 : device;
}

/* Returns the device of a cudaMemLocation {type, id}, which is passed in one register. */
int gm_location_device(uint64_t location) {
    int type = (int)(uint32_t)location, id = (int)(uint32_t)(location >> 32);
    return type == LOCATION_DEVICE ? id : type == NO_LOCATION ? NOWHERE : ON_HOST;
}

/* Functions of CUDA 12 that end in _v2 take a location; in CUDA 13 they have the name without _v2. */
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
