/* The CUDA driver API: device and pinned memory, copies and memsets, under the driver's names. */
#include "runtime/runtime.h"

GM_API int cuMemAlloc_v2(uintptr_t *address, size_t size) {
    if (!size) return GM_INVALID_VALUE;
    int status = gm_status_of_unseen_call();
    return status ? status : gm_malloc((void **)address, size);
}

GM_API int cuMemFree_v2(uintptr_t address) { return gm_free_any((void *)address); }
GM_API int cuMemAllocHost_v2(void **address, size_t size) { return gm_host_alloc(address, size); }
GM_API int cuMemHostAlloc(void **address, size_t size, unsigned flags) { return gm_host_alloc(address, size); }
GM_API int cuMemFreeHost(void *address) { return gm_host_free(address); }

/* ---- copies: between any kinds of memory ---- */

GM_API int cuMemcpy(uintptr_t to, uintptr_t from, size_t size) {
    return gm_copy_any((void *)to, (const void *)from, size, NULL);
}

GM_API int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t size, void *stream) {
    return gm_copy_any((void *)to, (const void *)from, size, stream);
}

#define COPY(name, to_type, from_type)                                                                \
    GM_API int name##_v2(to_type to, from_type from, size_t size) {                                   \
        return gm_copy_any((void *)to, (const void *)from, size, NULL);                               \
    }                                                                                                 \
    GM_API int name##Async_v2(to_type to, from_type from, size_t size, void *stream) {                \
        return gm_copy_any((void *)to, (const void *)from, size, stream);                             \
    }
COPY(cuMemcpyHtoD, uintptr_t, const void *)
COPY(cuMemcpyDtoH, void *, uintptr_t)
COPY(cuMemcpyDtoD, uintptr_t, uintptr_t)

/* ---- memsets ---- */

#define SET(bits)                                                                                     \
    GM_API int cuMemsetD##bits##_v2(uintptr_t address, unsigned value, size_t count) {                \
        gm_set_elements((void *)address, value, bits / 8, count, NULL);                               \
        return GM_SUCCESS;                                                                            \
    }                                                                                                 \
    GM_API int cuMemsetD##bits##Async(uintptr_t address, unsigned value, size_t count, void *stream) {\
        gm_set_elements((void *)address, value, bits / 8, count, stream);                             \
        return GM_SUCCESS;                                                                            \
    }
SET(8)
SET(16)
SET(32)
