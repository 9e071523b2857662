/* Freeing device memory: cudaFree and cudaFreeAsync each take memory of cudaMalloc and of cudaMallocAsync,
 * and cudaFree managed memory as well. */
#include "runtime/runtime.h"

int gm_free(void *address) {
    if (!address) return GM_SUCCESS;
    int status = gm_free_region(address);
    return status == GM_SUCCESS ? status : gm_free_pooled(address);
}

int gm_free_any(void *address) { return gm_owner(address) == GM_MANAGED ? gm_managed_free(address) : gm_free(address); }

GM_API int cudaFree(void *address) { return gm_error(gm_free_any(address)); }

GM_API int cudaFreeAsync(void *address, void *stream) {
    /* streams are always idle */
    return gm_error(gm_free(address));
}
