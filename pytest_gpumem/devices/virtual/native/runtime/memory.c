/* cudaMalloc: reserves address space (values.c), and charges sizes against the card's capacity.
 *
 * Each device has one region of address space, allocated in pages of 2 MiB, the unit in which cudaMalloc takes memory
 * from the device: single pages from its lower end upwards, runs of pages from its upper end downwards (pages.c says
 * why). The same requests get the same addresses: the figures of a step that starts with an empty device repeat exactly. */
#include "runtime/runtime.h"

#include <pthread.h>

#define PAGE_SHIFT 21
#ifndef REGION_SHIFT
#define REGION_SHIFT 40 /* 1 TiB of addresses per device: more than any card has */
#endif
#define PAGE_SIZE ((uint64_t)1 << PAGE_SHIFT)

typedef struct {
    _Atomic uintptr_t base; /* 0: not reserved yet; read without the lock, never changed once set */
    gm_pages pages;
} region;

/* Returns the library's capacities, and the bytes of two structs, which Python compares with its own when it loads the
 * library. */
GM_API void gpumem_capacities(uint64_t out[5]) {
    out[0] = GM_MAX_DEVICES;
    out[1] = (uint64_t)1 << REGION_SHIFT;
    out[2] = GM_MAX_DEFERRED;
    out[3] = sizeof(gm_card);
    out[4] = sizeof(gm_account);
}

static region regions[GM_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool region_open(region *r) {
    if (r->base) return true;
    size_t size = (size_t)1 << REGION_SHIFT;
    void *map = gm_space_open(size + PAGE_SIZE);
    if (!map) {
        gm_unsupported("cudaMalloc without 1 TiB of address space (see ulimit -v)", GM_OUT_OF_MEMORY);
        return false;
    }
    uintptr_t base = ((uintptr_t)map + PAGE_SIZE - 1) & ~(PAGE_SIZE - 1);
    if (!gm_pages_open(&r->pages, size >> PAGE_SHIFT) ||
        !gm_addresses_add(base, size, (int)(r - regions), GM_FROM_MALLOC)) {
        gm_space_close(map, size + PAGE_SIZE);
        return false;
    }
    r->base = base;
    return true;
}

int gm_malloc(void **address, size_t size) {
    int device = gm_current_device(), status = GM_OUT_OF_MEMORY;
    if (!gm_visible()) return GM_NO_DEVICE;
    if (device >= gm_visible_devices()) return GM_INVALID_DEVICE;
    if (!address) return GM_INVALID_VALUE;
    gm_use_device(device);
    *address = NULL;
    if (size == 0) return GM_SUCCESS;
    if (size > (uint64_t)1 << REGION_SHIFT) return GM_OUT_OF_MEMORY;
    uint64_t pages = (size + PAGE_SIZE - 1) >> PAGE_SHIFT;
    region *r = &regions[device];
    pthread_mutex_lock(&lock);
    if (region_open(r) && gm_charge(device, pages << PAGE_SHIFT) == GM_SUCCESS) {
        int64_t first = gm_pages_take(&r->pages, pages);
        if (first >= 0) {
            *address = (void *)(r->base + ((uintptr_t)first << PAGE_SHIFT));
            status = GM_SUCCESS;
        } else {
            gm_discharge(device, pages << PAGE_SHIFT);
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* Returns the device whose region contains the address, or -1. */
static int region_of(uintptr_t address) {
    for (int device = 0; device < GM_MAX_DEVICES; device++) {
        uintptr_t base = regions[device].base;
        if (base && address >= base && address - base < (uintptr_t)1 << REGION_SHIFT) return device;
    }
    return -1;
}

int gm_free_region(void *address) {
    int device = region_of((uintptr_t)address), status = GM_INVALID_VALUE;
    if (device < 0) return status;
    region *r = &regions[device];
    uintptr_t offset = (uintptr_t)address - r->base;
    pthread_mutex_lock(&lock);
    gm_interval pages = gm_pages_of(&r->pages, offset >> PAGE_SHIFT);
    if (pages.end && offset == pages.start << PAGE_SHIFT) {
        uint64_t size = (pages.end - pages.start) << PAGE_SHIFT;
        gm_discharge(device, size);
        gm_pages_give(&r->pages, pages.start);
        gm_space_release(address, size);
        status = GM_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* Makes the next allocations lie in the same order as on an empty device, next to the existing ones. */
GM_API void gpumem_begin_apart(int device) {
    pthread_mutex_lock(&lock);
    gm_pages_begin_apart(&regions[device].pages);
    pthread_mutex_unlock(&lock);
}

/* Finds the cudaMalloc allocation that contains an address. */
bool gm_range_of(const void *pointer, void **base, size_t *size) {
    int device = region_of((uintptr_t)pointer);
    if (device < 0) return false;
    region *r = &regions[device];
    pthread_mutex_lock(&lock);
    gm_interval pages = gm_pages_of(&r->pages, ((uintptr_t)pointer - r->base) >> PAGE_SHIFT);
    pthread_mutex_unlock(&lock);
    *base = (void *)(r->base + (pages.start << PAGE_SHIFT));
    *size = (pages.end - pages.start) << PAGE_SHIFT;
    return pages.end > 0;
}

GM_API int cudaMalloc(void **address, size_t size) {
    int status = gm_status_of_unseen_call();
    return gm_error(status ? status : gm_malloc(address, size));
}

GM_API int cudaMemGetInfo(size_t *free_memory, size_t *total) {
    if (!gm_visible()) return gm_error(GM_NO_DEVICE);
    gm_use_device(gm_current_device());
    *free_memory = gm_free_memory(gm_current_device());
    *total = gm_total_for(gm_current_device(), __builtin_return_address(0));
    return GM_SUCCESS;
}
