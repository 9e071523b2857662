/* The CUDA driver API: managed memory, under the driver's names. */
#include "runtime/runtime.h"

GM_API int cuMemAllocManaged(uintptr_t *address, size_t size, unsigned flags) {
    return gm_managed_malloc((void **)address, size, flags);
}

GM_API int cuMemPrefetchAsync(uintptr_t address, size_t size, int device, void *stream) {
    return gm_managed_prefetch((void *)address, size, device);
}

GM_API int cuMemPrefetchAsync_v2(uintptr_t address, size_t size, uint64_t location, unsigned flags, void *stream) {
    return gm_managed_prefetch((void *)address, size, gm_location_device(location));
}

GM_API int cuMemAdvise(uintptr_t address, size_t size, int advice, int device) {
    return gm_managed_advise((void *)address, size, advice, device);
}

GM_API int cuMemAdvise_v2(uintptr_t address, size_t size, int advice, uint64_t location) {
    return gm_managed_advise((void *)address, size, advice, gm_location_device(location));
}

GM_API int cuStreamAttachMemAsync(void *stream, uintptr_t address, size_t size, unsigned flags) {
    return gm_owner((void *)address) == GM_MANAGED ? GM_SUCCESS : GM_INVALID_VALUE;
}
