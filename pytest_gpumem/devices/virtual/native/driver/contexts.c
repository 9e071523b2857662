/* The CUDA driver API: devices, contexts, and the device that an address belongs to. A context is a token, one per
 * device. */
#include "runtime/runtime.h"
#include "runtime/stream_order.h"

#include <stdio.h>

static char contexts[GM_MAX_DEVICES];
static _Thread_local void *context_stack[16];
static _Thread_local int context_depth;

GM_API int cuInit(unsigned flags) {
    if (!gm_visible()) return GM_NO_DEVICE;
    gm_initialize();
    return GM_SUCCESS;
}

GM_API int cuDriverGetVersion(int *version) { *version = gm_cuda_version(); return GM_SUCCESS; }

/* Returns the status of a driver query: none succeeds before cuInit (CUDA Driver API, "Initialization"). */
static int ready(void) {
    if (!gm_visible()) return GM_NO_DEVICE;
    return gm_initialized() ? GM_SUCCESS : GM_NOT_INITIALIZED;
}

GM_API int cuDeviceGetCount(int *count) {
    int status = ready();
    if (status != GM_NOT_INITIALIZED) *count = gm_visible_devices();
    return status;
}

GM_API int cuDeviceGet(int *device, int ordinal) {
    int status = ready();
    if (status) return status;
    if (ordinal < 0 || ordinal >= gm_visible_devices()) return GM_INVALID_DEVICE;
    *device = ordinal;
    return GM_SUCCESS;
}

GM_API int cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, (size_t)length, "%s", gm_profile.name);
    return GM_SUCCESS;
}

GM_API int cuDeviceTotalMem_v2(size_t *size, int device) { *size = gm_profile.total_memory; return GM_SUCCESS; }

GM_API int cuDeviceComputeCapability(int *major, int *minor, int device) {
    *major = gm_profile.major;
    *minor = gm_profile.minor;
    return GM_SUCCESS;
}

GM_API int cuMemGetInfo_v2(size_t *free_memory, size_t *total) {
    if (!gm_visible()) return GM_NO_DEVICE;
    *free_memory = gm_free_memory(gm_current_device());
    *total = gm_total_memory(gm_current_device());
    return GM_SUCCESS;
}

GM_API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (gm_visible() && !gm_initialized()) return GM_NOT_INITIALIZED;
    if (device < 0 || device >= GM_MAX_DEVICES) return GM_INVALID_DEVICE;
    if (flags) *flags = 0;
    *active = gm_visible() && gm_device_used(device);
    return GM_SUCCESS;
}

GM_API int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (!gm_visible()) return GM_NO_DEVICE;
    if (device < 0 || device >= GM_MAX_DEVICES) return GM_INVALID_DEVICE;
    gm_use_device(device);
    *context = &contexts[device];
    return GM_SUCCESS;
}

GM_API int cuCtxGetCurrent(void **context) {
    *context = gm_visible() && gm_device_used(gm_current_device()) ? &contexts[gm_current_device()] : NULL;
    return GM_SUCCESS;
}

GM_API int cuCtxSetCurrent(void *context) {
    char *at = context;
    if (!at) return GM_SUCCESS;
    if (at < contexts || at >= contexts + GM_MAX_DEVICES) return GM_INVALID_VALUE;
    gm_set_current_device((int)(at - contexts));
    return GM_SUCCESS;
}

GM_API int cuCtxPushCurrent_v2(void *context) {
    if (context_depth == 16) return GM_INVALID_VALUE;
    cuCtxGetCurrent(&context_stack[context_depth++]);
    return cuCtxSetCurrent(context);
}

GM_API int cuCtxPopCurrent_v2(void **context) {
    if (context_depth == 0) return GM_INVALID_VALUE;
    if (context) cuCtxGetCurrent(context);
    return cuCtxSetCurrent(context_stack[--context_depth]);
}

GM_SAME(cuCtxPushCurrent, cuCtxPushCurrent_v2);
GM_SAME(cuCtxPopCurrent, cuCtxPopCurrent_v2);
GM_API int cuCtxGetDevice(int *device) { *device = gm_current_device(); return GM_SUCCESS; }

GM_API int cuCtxSynchronize(void) {
    int status = gm_status_of_device_end(gm_current_device());
    if (status) return status;
    gm_order_host_waits_for_device(gm_current_device());
    return GM_SUCCESS;
}

/* Limits of kernel resources (stack, printf buffer): no kernel runs. */
GM_API int cuCtxGetLimit(size_t *value, int limit) { *value = 1024; return GM_SUCCESS; }
GM_API int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }

/* CUpointer_attribute: 1 context, 2 memory type, 3 device pointer, 8 is managed, 9 device ordinal, 11 the start of the
 * allocation, 12 its size. */
GM_API int cuPointerGetAttribute(void *out, int attribute, uintptr_t address) {
    int owner = gm_owner((void *)address);
    bool managed = owner == GM_MANAGED;
    void *start;
    size_t size;
    if (owner == GM_PAGEABLE) return GM_INVALID_VALUE;
    if ((attribute == 11 || attribute == 12) && gm_range_of((void *)address, &start, &size)) {
        if (attribute == 11) *(void **)out = start;
        else *(size_t *)out = size;
        return GM_SUCCESS;
    }
    if (managed) owner = gm_managed_device((void *)address);
    switch (attribute) {
    case 1: *(void **)out = &contexts[owner >= 0 ? owner : gm_current_device()]; return GM_SUCCESS;
    case 2: *(unsigned *)out = owner >= 0 ? 2 : 1; return GM_SUCCESS;
    case 3: *(uintptr_t *)out = address; return GM_SUCCESS;
    case 8: *(int *)out = managed; return GM_SUCCESS;
    case 9: *(int *)out = owner >= 0 ? owner : gm_current_device(); return GM_SUCCESS;
    default: return gm_unsupported("cuPointerGetAttribute (an attribute it does not know)", GM_NOT_SUPPORTED);
    }
}

GM_API int cuPointerGetAttributes(unsigned count, int *attributes, void **out, uintptr_t address) {
    for (unsigned i = 0; i < count; i++) {
        int status = cuPointerGetAttribute(out[i], attributes[i], address);
        if (status) return status;
    }
    return GM_SUCCESS;
}
