/* Pinned host memory: real memory, since copies write to it. A device tensor may be over its addresses, which kernels and
 * the program itself write to. What it holds counts as unknown. Only a copy of unknown bytes returns pages of it to the host
 * (copies.c), and not its last one, which may also hold other memory of the program. */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <stdlib.h>

enum { HOST_PAGE = 4096 };

int gm_host_alloc(void **address, size_t size) {
    if (!address) return GM_INVALID_VALUE;
    *address = NULL;
    if (gm_visible()) gm_use_device(gm_current_device());
    if (size == 0) return GM_SUCCESS;
    void *memory = NULL;
    if (posix_memalign(&memory, HOST_PAGE, size) != 0) return GM_OUT_OF_MEMORY;
    if (!gm_addresses_add((uintptr_t)memory, size, GM_PINNED, GM_FROM_HOST_ALLOC)) {
        free(memory);
        return GM_OUT_OF_MEMORY;
    }
    gm_space_share(memory, size);
    *address = memory;
    return GM_SUCCESS;
}

GM_API int cudaHostAlloc(void **address, size_t size, unsigned flags) { return gm_error(gm_host_alloc(address, size)); }
GM_API int cudaMallocHost(void **address, size_t size) { return gm_error(gm_host_alloc(address, size)); }

int gm_host_free(void *address) {
    if (!address) return GM_SUCCESS;
    uint64_t size = gm_addresses_remove((uintptr_t)address, GM_FROM_HOST_ALLOC);
    if (!size) return GM_INVALID_VALUE;
    gm_space_release(address, size);
    free(address);
    return GM_SUCCESS;
}

GM_API int cudaFreeHost(void *address) { return gm_error(gm_host_free(address)); }

GM_API int cudaHostRegister(void *address, size_t size, unsigned flags) {
    if (!address || !size) return gm_error(GM_INVALID_VALUE);
    bool ok = gm_addresses_add((uintptr_t)address, size, GM_PINNED, GM_FROM_HOST_REGISTER);
    if (ok) gm_space_share(address, size);
    return gm_error(ok ? GM_SUCCESS : GM_HOST_ALREADY_REGISTERED);
}

GM_API int cudaHostUnregister(void *address) {
    if (!address) return GM_SUCCESS;
    uint64_t size = gm_addresses_remove((uintptr_t)address, GM_FROM_HOST_REGISTER);
    if (size) gm_space_release(address, size);
    return gm_error(size ? GM_SUCCESS : GM_HOST_NOT_REGISTERED);
}

GM_API int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    *device = host;
    return GM_SUCCESS;
}
