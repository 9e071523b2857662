/* The driver's virtual memory management: reserve addresses, create memory (charged), map, unmap, release. */
#define _GNU_SOURCE
#include "gpumem.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef struct {
    int device;
    uint64_t size;
    int references; /* one for its creator, one a mapping */
} allocation;

/* The leading fields of CUmemAllocationProp. */
typedef struct {
    int type, handle_types, location_type, device;
} allocation_properties;

static gm_ranges reservations; /* tag: the device of the last mapping in it */
static gm_ranges mappings;     /* tag: the allocation */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define GRANULARITY ((size_t)2 << 20)

int gm_reserved_owner(uintptr_t address) {
    pthread_mutex_lock(&lock);
    gm_range *found = gm_ranges_find(&reservations, address);
    int device = found ? (int)found->tag : -1;
    pthread_mutex_unlock(&lock);
    return device;
}

GM_API int cuMemAddressReserve(uintptr_t *out, size_t size, size_t alignment, uintptr_t wanted,
                               unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    if (!gm_visible()) return GM_NO_DEVICE;
    if (!size || size % GRANULARITY) return GM_INVALID_VALUE;
    size_t room = size + GRANULARITY;
    void *map = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return GM_OUT_OF_MEMORY;
    uintptr_t start = ((uintptr_t)map + GRANULARITY - 1) & ~(uintptr_t)(GRANULARITY - 1);
    if (start > (uintptr_t)map) munmap(map, start - (uintptr_t)map);
    if ((uintptr_t)map + room > start + size) munmap((void *)(start + size), (uintptr_t)map + room - start - size);
    pthread_mutex_lock(&lock);
    bool ok = gm_ranges_add(&reservations, (gm_range){start, start + size, gm_current_device(), 0});
    pthread_mutex_unlock(&lock);
    if (!ok) {
        munmap((void *)start, size);
        return GM_OUT_OF_MEMORY;
    }
    *out = start;
    return GM_SUCCESS;
}

GM_API int cuMemAddressFree(uintptr_t address, size_t size) {
    pthread_mutex_lock(&lock);
    gm_range *found = gm_ranges_find(&reservations, address);
    bool ok = found && found->start == address && found->end - address == size;
    if (ok) {
        gm_ranges_remove(&reservations, found);
        munmap((void *)address, size);
    }
    pthread_mutex_unlock(&lock);
    return ok ? GM_SUCCESS : GM_INVALID_VALUE;
}

GM_API int cuMemGetAllocationGranularity(size_t *out, const void *properties, int option) {
    (void)properties, (void)option;
    *out = GRANULARITY;
    return GM_SUCCESS;
}

GM_API int cuMemCreate(allocation **out, size_t size, const allocation_properties *properties,
                       unsigned long long flags) {
    (void)flags;
    if (!gm_visible()) return GM_NO_DEVICE;
    if (!size || size % GRANULARITY) return GM_INVALID_VALUE;
    if (properties->location_type != 1) return gm_unsupported("cuMemCreate (in host memory)", GM_NOT_SUPPORTED);
    if (properties->device < 0 || properties->device >= gm_visible_devices()) return GM_INVALID_DEVICE;
    allocation *made = malloc(sizeof *made);
    if (!made) return GM_OUT_OF_MEMORY;
    int status = gm_charge(properties->device, size);
    if (status) {
        free(made);
        return status;
    }
    *made = (allocation){properties->device, size, 1};
    *out = made;
    return GM_SUCCESS;
}

static void drop(allocation *memory) {
    if (--memory->references) return;
    gm_discharge(memory->device, memory->size);
    free(memory);
}

GM_API int cuMemRelease(allocation *memory) {
    pthread_mutex_lock(&lock);
    drop(memory);
    pthread_mutex_unlock(&lock);
    return GM_SUCCESS;
}

GM_API int cuMemMap(uintptr_t address, size_t size, size_t offset, allocation *memory, unsigned long long flags) {
    (void)offset, (void)flags;
    pthread_mutex_lock(&lock);
    gm_range *room = gm_ranges_find(&reservations, address);
    bool ok = room && address + size <= room->end && !gm_ranges_overlap(&mappings, address, address + size) &&
              gm_ranges_add(&mappings, (gm_range){address, address + size, (intptr_t)memory, 0});
    if (ok) {
        memory->references++;
        room->tag = memory->device;
    }
    pthread_mutex_unlock(&lock);
    return ok ? GM_SUCCESS : GM_INVALID_VALUE;
}

GM_API int cuMemUnmap(uintptr_t address, size_t size) {
    pthread_mutex_lock(&lock);
    for (uintptr_t at = address; at < address + size;) {
        gm_range *found = gm_ranges_find(&mappings, at);
        if (!found || found->start != at || found->end > address + size) {
            pthread_mutex_unlock(&lock);
            return GM_INVALID_VALUE;
        }
        allocation *memory = (allocation *)found->tag;
        at = found->end;
        gm_forget((void *)found->start, found->end - found->start);
        gm_ranges_remove(&mappings, found);
        drop(memory);
    }
    pthread_mutex_unlock(&lock);
    return GM_SUCCESS;
}

GM_API int cuMemSetAccess(uintptr_t address, size_t size, const void *access, size_t count) {
    (void)address, (void)size, (void)access, (void)count;
    return GM_SUCCESS;
}

GM_API int cuMemGetAddressRange(uintptr_t *base, size_t *size, uintptr_t address) {
    void *found_base;
    size_t found_size;
    if (!gm_range_of((void *)address, &found_base, &found_size)) return GM_INVALID_VALUE;
    if (base) *base = (uintptr_t)found_base;
    if (size) *size = found_size;
    return GM_SUCCESS;
}

GM_API int cuMemGetAddressRange_v2(uintptr_t *base, size_t *size, uintptr_t address) {
    return cuMemGetAddressRange(base, size, address);
}
