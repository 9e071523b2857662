/* Device memory: address space is reserved, never backed; sizes are charged against the card's capacity.
 *
 * Each device has one region of address space, handed out in pages of 2 MiB, the unit in which cudaMalloc takes
 * memory from the device, from its upper end downwards (pages.c says why). The same requests get the same
 * addresses: the figures of a step that starts with an empty device repeat exactly.
 */
#define _GNU_SOURCE
#include "gpumem.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE_SHIFT 21
#ifndef REGION_SHIFT
#define REGION_SHIFT 40 /* 1 TiB of addresses a device */
#endif
#define LEVELS (REGION_SHIFT - PAGE_SHIFT)
#define PAGE_SIZE ((uint64_t)1 << PAGE_SHIFT)

typedef struct {
    _Atomic uintptr_t base; /* 0: not reserved yet; read without the lock, never changed once set */
    gm_pages pages;
    gm_account account;
    uint64_t extra;       /* capacity beyond the card's: what others held when a step began */
} region;

static region regions[GM_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static gm_ranges host_ranges; /* pinned host memory; extra: 1 when it is the caller's own, registered */
static pthread_mutex_t host_lock = PTHREAD_MUTEX_INITIALIZER;

static bool region_open(region *r) {
    if (r->base) return true;
    size_t size = (size_t)1 << REGION_SHIFT;
    void *map = mmap(NULL, size + PAGE_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        gm_unsupported("cudaMalloc without 1 TiB of address space (see ulimit -v)", GM_OUT_OF_MEMORY);
        return false;
    }
    if (!gm_pages_open(&r->pages, LEVELS)) {
        munmap(map, size + PAGE_SIZE);
        return false;
    }
    r->base = ((uintptr_t)map + PAGE_SIZE - 1) & ~(PAGE_SIZE - 1);
    return true;
}

static uint64_t capacity(const region *r) {
    uint64_t own = gm_profile.total_memory > gm_profile.context_memory
                       ? gm_profile.total_memory - gm_profile.context_memory
                       : 0;
    return own + r->extra;
}

static bool charge(region *r, uint64_t size) {
    gm_account *account = &r->account;
    if (size > capacity(r) || account->charged > capacity(r) - size) {
        account->failures++;
        return false;
    }
    account->charged += size;
    if (account->charged > account->peak_charged) account->peak_charged = account->charged;
    account->mallocs++;
    return true;
}

int gm_charge(int device, uint64_t size) {
    pthread_mutex_lock(&lock);
    bool ok = charge(&regions[device], size);
    pthread_mutex_unlock(&lock);
    return ok ? GM_SUCCESS : GM_OUT_OF_MEMORY;
}

void gm_discharge(int device, uint64_t size) {
    pthread_mutex_lock(&lock);
    regions[device].account.charged -= size;
    regions[device].account.frees++;
    pthread_mutex_unlock(&lock);
}

uint64_t gm_free_memory(int device) {
    pthread_mutex_lock(&lock);
    uint64_t charged = regions[device].account.charged, room = capacity(&regions[device]);
    pthread_mutex_unlock(&lock);
    return room > charged ? room - charged : 0;
}

int gm_malloc_on(int device, void **address, size_t size) {
    if (!address) return GM_INVALID_VALUE;
    *address = NULL;
    if (size == 0) return GM_SUCCESS;
    if (size > (uint64_t)1 << REGION_SHIFT) return GM_OUT_OF_MEMORY;
    uint64_t pages = (size + PAGE_SIZE - 1) >> PAGE_SHIFT;
    int status = GM_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    region *r = &regions[device];
    if (region_open(r) && charge(r, pages << PAGE_SHIFT)) {
        int64_t first = gm_pages_take(&r->pages, pages);
        if (first >= 0) {
            *address = (void *)(r->base + ((uintptr_t)first << PAGE_SHIFT));
            status = GM_SUCCESS;
        } else {
            r->account.charged -= pages << PAGE_SHIFT;
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int gm_malloc(void **address, size_t size) {
    if (!gm_visible()) return GM_NO_DEVICE;
    if (gm_current_device() >= gm_visible_devices()) return GM_INVALID_DEVICE;
    return gm_malloc_on(gm_current_device(), address, size);
}

/* The device whose region holds the address, or -1. */
static int region_of(uintptr_t address) {
    for (int device = 0; device < GM_MAX_DEVICES; device++) {
        uintptr_t base = regions[device].base;
        if (base && address >= base && address - base < (uintptr_t)1 << REGION_SHIFT) return device;
    }
    return -1;
}

int gm_free(void *address) {
    if (!address) return GM_SUCCESS;
    int device = region_of((uintptr_t)address), status = GM_INVALID_VALUE;
    uint64_t size = 0;
    if (device < 0) return gm_pool_free(address);
    pthread_mutex_lock(&lock);
    region *r = &regions[device];
    uintptr_t offset = (uintptr_t)address - r->base;
    size_t first = offset >> PAGE_SHIFT;
    if ((offset & (PAGE_SIZE - 1)) == 0 && gm_pages_owner(&r->pages, first) == (int64_t)first) {
        size = gm_pages_of(&r->pages, first) << PAGE_SHIFT;
        r->account.charged -= size;
        r->account.frees++;
        gm_pages_give(&r->pages, first);
        gm_forget(address, size);
        status = GM_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int gm_owner(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer;
    int device = region_of(address);
    if (device >= 0) return device;
    device = gm_reserved_owner(address);
    if (device < 0) device = gm_pool_owner(address);
    if (device < 0) device = gm_ipc_owner(address);
    if (device >= 0) return device;
    pthread_mutex_lock(&host_lock);
    bool pinned = gm_ranges_find(&host_ranges, address) != NULL;
    pthread_mutex_unlock(&host_lock);
    return pinned ? GM_PINNED : GM_PAGEABLE;
}

/* The allocation of cudaMalloc that an address lies in. */
bool gm_range_of(const void *pointer, void **base, size_t *size) {
    int device = region_of((uintptr_t)pointer);
    bool found = false;
    if (device < 0) return false;
    pthread_mutex_lock(&lock);
    region *r = &regions[device];
    size_t page = ((uintptr_t)pointer - r->base) >> PAGE_SHIFT;
    int64_t first = gm_pages_owner(&r->pages, page);
    if (first >= 0) {
        *base = (void *)(r->base + ((uintptr_t)first << PAGE_SHIFT));
        *size = gm_pages_of(&r->pages, (size_t)first) << PAGE_SHIFT;
        found = true;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* ---- pinned host memory: real, since copies to it really write ---- */

static int host_alloc(void **address, size_t size) {
    if (!address) return GM_INVALID_VALUE;
    *address = NULL;
    if (size == 0) return GM_SUCCESS;
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, size) != 0) return GM_OUT_OF_MEMORY;
    pthread_mutex_lock(&host_lock);
    bool ok = gm_ranges_add(&host_ranges, (gm_range){(uintptr_t)memory, (uintptr_t)memory + size, 0, 0});
    pthread_mutex_unlock(&host_lock);
    if (!ok) {
        free(memory);
        return GM_OUT_OF_MEMORY;
    }
    *address = memory;
    return GM_SUCCESS;
}

static int host_release(void *address, uint64_t registered) {
    if (!address) return GM_SUCCESS;
    int status = registered ? GM_HOST_NOT_REGISTERED : GM_INVALID_VALUE;
    pthread_mutex_lock(&host_lock);
    gm_range *found = gm_ranges_find(&host_ranges, (uintptr_t)address);
    if (found && found->start == (uintptr_t)address && found->extra == registered) {
        gm_ranges_remove(&host_ranges, found);
        status = GM_SUCCESS;
    }
    pthread_mutex_unlock(&host_lock);
    if (status == GM_SUCCESS && !registered) free(address);
    return status;
}

GM_API int cudaMalloc(void **address, size_t size) { return gm_error(gm_malloc(address, size)); }

GM_API int cudaFree(void *address) { return gm_error(gm_free(address)); }

GM_API int cudaHostAlloc(void **address, size_t size, unsigned flags) {
    (void)flags;
    return gm_error(host_alloc(address, size));
}

GM_API int cudaMallocHost(void **address, size_t size) { return gm_error(host_alloc(address, size)); }

GM_API int cudaFreeHost(void *address) { return gm_error(host_release(address, 0)); }

GM_API int cudaHostRegister(void *address, size_t size, unsigned flags) {
    (void)flags;
    if (!address || !size) return gm_error(GM_INVALID_VALUE);
    pthread_mutex_lock(&host_lock);
    bool ok = gm_ranges_add(&host_ranges, (gm_range){(uintptr_t)address, (uintptr_t)address + size, 0, 1});
    pthread_mutex_unlock(&host_lock);
    return gm_error(ok ? GM_SUCCESS : GM_OUT_OF_MEMORY);
}

GM_API int cudaHostUnregister(void *address) { return gm_error(host_release(address, 1)); }

GM_API int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    (void)flags;
    *device = host;
    return GM_SUCCESS;
}

GM_API int cudaMemGetInfo(size_t *free_memory, size_t *total) {
    if (!gm_visible()) return gm_error(GM_NO_DEVICE);
    *free_memory = gm_free_memory(gm_current_device());
    *total = gm_profile.total_memory + regions[gm_current_device()].extra;
    return GM_SUCCESS;
}

/* ---- what Python calls ---- */

GM_API void gpumem_account(int device, gm_account *out) {
    pthread_mutex_lock(&lock);
    *out = regions[device].account;
    pthread_mutex_unlock(&lock);
}

GM_API void gpumem_forget_peak(int device) {
    pthread_mutex_lock(&lock);
    regions[device].account.peak_charged = regions[device].account.charged;
    pthread_mutex_unlock(&lock);
}

GM_API void gpumem_make_room(int device, uint64_t size) {
    pthread_mutex_lock(&lock);
    regions[device].extra = size;
    pthread_mutex_unlock(&lock);
}
