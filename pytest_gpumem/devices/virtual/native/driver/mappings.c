/* The driver's virtual memory management: reserve addresses, create memory (charged to the device), map, unmap, release. */
#include "runtime/runtime.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct {
    int device;
    uint64_t size;
    int references; /* one for its creator, one per mapping */
} allocation;

/* The leading fields of CUmemAllocationProp. */
typedef struct {
    int type, handle_types, location_type, device;
} allocation_properties;

static gm_ranges mappings; /* tag: the allocation */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define GRANULARITY ((size_t)2 << 20)

GM_API int cuMemAddressReserve(uintptr_t *out, size_t size, size_t alignment, uintptr_t hint,
                               unsigned long long flags) {
    if (!gm_visible()) return GM_NO_DEVICE;
    if (!size || size % GRANULARITY) return GM_INVALID_VALUE;
    size_t room = size + GRANULARITY;
    void *map = gm_space_open(room);
    if (!map) return GM_OUT_OF_MEMORY;
    uintptr_t start = ((uintptr_t)map + GRANULARITY - 1) & ~(uintptr_t)(GRANULARITY - 1);
    if (start > (uintptr_t)map) gm_space_close(map, start - (uintptr_t)map);
    if ((uintptr_t)map + room > start + size) gm_space_close((void *)(start + size), (uintptr_t)map + room - start - size);
    if (!gm_addresses_add(start, size, gm_current_device(), GM_FROM_RESERVE)) {
        gm_space_close((void *)start, size);
        return GM_OUT_OF_MEMORY;
    }
    *out = start;
    return GM_SUCCESS;
}

GM_API int cuMemAddressFree(uintptr_t address, size_t size) {
    if (gm_addresses_end(address, GM_FROM_RESERVE) != address + size) return GM_INVALID_VALUE;
    if (gm_addresses_remove(address, GM_FROM_RESERVE) != size) return GM_INVALID_VALUE;
    gm_space_close((void *)address, size);
    return GM_SUCCESS;
}

GM_API int cuMemGetAllocationGranularity(size_t *out, const void *properties, int option) {
    *out = GRANULARITY;
    return GM_SUCCESS;
}

enum { FABRIC = 8 }; /* a CUmemAllocationHandleType; no device has a fabric (nvmlDeviceGetGpuFabricInfoV) */

GM_API int cuMemCreate(allocation **out, size_t size, const allocation_properties *properties,
                       unsigned long long flags) {
    if (!gm_visible()) return GM_NO_DEVICE;
    if (!size || size % GRANULARITY) return GM_INVALID_VALUE;
    if (properties->location_type != 1) return gm_unsupported("cuMemCreate (in host memory)", GM_NOT_SUPPORTED);
    if (properties->handle_types & FABRIC) return GM_NOT_SUPPORTED;
    if (properties->device < 0 || properties->device >= gm_visible_devices()) return GM_INVALID_DEVICE;
    allocation *memory = malloc(sizeof *memory);
    if (!memory) return GM_OUT_OF_MEMORY;
    int status = gm_charge(properties->device, size);
    if (status) {
        free(memory);
        return status;
    }
    *memory = (allocation){properties->device, size, 1};
    *out = memory;
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
    pthread_mutex_lock(&lock);
    bool ok = address + size <= gm_addresses_end(address, GM_FROM_RESERVE) &&
              !gm_ranges_overlap(&mappings, address, address + size) &&
              gm_ranges_add(&mappings, (gm_range){address, address + size, (intptr_t)memory, 0});
    if (ok) {
        memory->references++;
        gm_addresses_set_owner(address, memory->device); /* for the whole reservation: a segment is on one device */
    }
    pthread_mutex_unlock(&lock);
    return ok ? GM_SUCCESS : GM_INVALID_VALUE;
}

GM_API int cuMemUnmap(uintptr_t address, size_t size) {
    pthread_mutex_lock(&lock);
    for (uintptr_t at = address; at < address + size;) {
        gm_range *mapping = gm_ranges_find(&mappings, at);
        if (!mapping || mapping->start != at || mapping->end > address + size) {
            pthread_mutex_unlock(&lock);
            return GM_INVALID_VALUE;
        }
        allocation *memory = (allocation *)mapping->tag;
        at = mapping->end;
        gm_space_release((void *)mapping->start, mapping->end - mapping->start);
        gm_ranges_remove(&mappings, mapping);
        drop(memory);
    }
    pthread_mutex_unlock(&lock);
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

GM_SAME(cuMemGetAddressRange_v2, cuMemGetAddressRange);
