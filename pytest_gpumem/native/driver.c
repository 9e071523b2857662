/* The CUDA driver API (libcuda.so.1) as far as PyTorch, Triton and cuda.bindings ask it. */
#define _GNU_SOURCE
#include "gpumem.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* ---- devices and contexts: a context is a token, one a device ---- */

static char contexts[GM_MAX_DEVICES];
static _Thread_local void *context_stack[16];
static _Thread_local int context_depth;

GM_API int cuInit(unsigned flags) {
    (void)flags;
    return gm_visible() ? GM_SUCCESS : GM_NO_DEVICE;
}

GM_API int cuDriverGetVersion(int *version) {
    *version = gm_cuda_version();
    return GM_SUCCESS;
}

GM_API int cuDeviceGetCount(int *count) {
    *count = gm_visible_devices();
    return gm_visible() ? GM_SUCCESS : GM_NO_DEVICE;
}

GM_API int cuDeviceGet(int *device, int ordinal) {
    if (!gm_visible()) return GM_NO_DEVICE;
    if (ordinal < 0 || ordinal >= gm_visible_devices()) return GM_INVALID_DEVICE;
    *device = ordinal;
    return GM_SUCCESS;
}

GM_API int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "%s", gm_profile.name);
    return GM_SUCCESS;
}

GM_API int cuDeviceTotalMem_v2(size_t *size, int device) {
    (void)device;
    *size = gm_profile.total_memory;
    return GM_SUCCESS;
}

GM_API int cuDeviceComputeCapability(int *major, int *minor, int device) {
    (void)device;
    *major = gm_profile.major;
    *minor = gm_profile.minor;
    return GM_SUCCESS;
}

GM_API int cuMemGetInfo_v2(size_t *free_memory, size_t *total) {
    if (!gm_visible()) return GM_NO_DEVICE;
    *free_memory = gm_free_memory(gm_current_device());
    *total = gm_profile.total_memory;
    return GM_SUCCESS;
}

GM_API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
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

GM_API int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
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

GM_API int cuCtxPushCurrent(void *context) { return cuCtxPushCurrent_v2(context); }

GM_API int cuCtxPopCurrent(void **context) { return cuCtxPopCurrent_v2(context); }

GM_API int cuCtxGetDevice(int *device) {
    *device = gm_current_device();
    return GM_SUCCESS;
}

GM_API int cuCtxSynchronize(void) { return GM_SUCCESS; }

/* Limits of what kernels may use (stack, printf buffer): no kernel runs. */
GM_API int cuCtxSetLimit(int limit, size_t value) {
    (void)limit, (void)value;
    return GM_SUCCESS;
}

GM_API int cuCtxGetLimit(size_t *value, int limit) {
    (void)limit;
    *value = 1024;
    return GM_SUCCESS;
}

GM_API int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }

/* ---- modules and kernels: loaded by name only, never executed ---- */

static char module_token, function_token;

static int token(void **out, char *value) {
    if (!gm_visible()) return GM_NO_DEVICE;
    *out = value;
    return GM_SUCCESS;
}

GM_API int cuModuleLoadData(void **module, const void *image) {
    (void)image;
    return token(module, &module_token);
}

GM_API int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void **values) {
    (void)image, (void)count, (void)options, (void)values;
    return token(module, &module_token);
}

GM_API int cuModuleLoad(void **module, const char *path) {
    (void)path;
    return token(module, &module_token);
}

GM_API int cuModuleUnload(void *module) {
    (void)module;
    return GM_SUCCESS;
}

GM_API int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module, (void)name;
    return token(function, &function_token);
}

/* CUfunction_attribute: 0 most threads a block, 4 registers a thread, 8 most dynamic shared memory. */
GM_API int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    switch (attribute) {
    case 0: *value = 1024; break;
    case 1: case 2: case 3: *value = 0; break; /* static shared, constant and local (spilled) bytes */
    case 4: *value = 32; break;
    case 5: case 6: *value = gm_profile.major * 10 + gm_profile.minor; break;
    case 8: *value = (int)gm_profile.shared_memory_per_block; break;
    default: *value = 0; break;
    }
    return GM_SUCCESS;
}

GM_API int cuFuncSetAttribute(void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return GM_SUCCESS;
}

GM_API int cuFuncSetCacheConfig(void *function, int config) {
    (void)function, (void)config;
    return GM_SUCCESS;
}

static int launched(void) {
    gm_count_launch();
    return gm_visible() ? GM_SUCCESS : GM_NO_DEVICE;
}

GM_API int cuLaunchKernel(void *function, ...) {
    (void)function;
    return launched();
}

GM_API int cuLaunchKernelEx(const void *config, void *function, void **args, void **extra) {
    (void)config, (void)function, (void)args, (void)extra;
    return launched();
}

GM_API int cuLaunchCooperativeKernel(void *function, ...) {
    (void)function;
    return launched();
}

GM_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int block_size, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared);
}

GM_API int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
    (void)function, (void)config;
    *clusters = gm_profile.sm_count;
    return GM_SUCCESS;
}

GM_API int cuTensorMapEncodeTiled(void *map, ...) {
    memset(map, 0, 128); /* an opaque descriptor of 128 bytes that only a kernel reads */
    return GM_SUCCESS;
}

GM_API int cuTensorMapEncodeIm2col(void *map, ...) {
    memset(map, 0, 128);
    return GM_SUCCESS;
}

/* CUpointer_attribute: 1 context, 2 memory type, 3 device pointer, 9 device ordinal. */
GM_API int cuPointerGetAttribute(void *out, int attribute, uintptr_t address) {
    int owner = gm_owner((void *)address);
    if (owner == GM_PAGEABLE) return GM_INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)out = &contexts[owner >= 0 ? owner : gm_current_device()]; return GM_SUCCESS;
    case 2: *(unsigned *)out = owner >= 0 ? 2 : 1; return GM_SUCCESS;
    case 3: *(uintptr_t *)out = address; return GM_SUCCESS;
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

GM_API int cuStreamWriteValue32(void *stream, uintptr_t address, uint32_t value, unsigned flags) {
    (void)stream, (void)value, (void)flags;
    gm_forget((void *)address, sizeof value);
    return GM_SUCCESS;
}

GM_API int cuMemsetD32Async(uintptr_t address, unsigned value, size_t count, void *stream) {
    (void)value, (void)stream;
    gm_forget((void *)address, 4 * (uint64_t)count);
    return GM_SUCCESS;
}

/* CUDA logs nothing here, so registering a callback is all there is to do. */
GM_API int cuLogsRegisterCallback(void *callback, void *data, void **handle) {
    static char none;
    (void)callback, (void)data;
    if (handle) *handle = &none;
    return GM_SUCCESS;
}

GM_API int cuLogsUnregisterCallback(void *handle) {
    (void)handle;
    return GM_SUCCESS;
}

/* ---- looking the driver's functions up by name ---- */

/* CUdriverProcAddressQueryResult and cudaDriverEntryPointQueryResult: 0 found, 1 no such symbol. */
static int look_up(const char *symbol, void **function, int *result) {
    char versioned[128];
    static void *self;
    Dl_info here;
    if (!self && dladdr((void *)&look_up, &here)) self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *function = self ? dlsym(self, symbol) : NULL;
    if (!*function && self) {
        snprintf(versioned, sizeof versioned, "%s_v2", symbol);
        *function = dlsym(self, versioned);
    }
    if (result) *result = *function ? 0 : 1;
    return *function ? GM_SUCCESS : GM_SYMBOL_NOT_FOUND;
}

GM_API int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                            unsigned long long flags, int *result) {
    (void)version, (void)flags;
    return gm_error(look_up(symbol, function, result));
}

GM_API int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *result) {
    (void)flags;
    return gm_error(look_up(symbol, function, result));
}

GM_API int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *result) {
    (void)version, (void)flags;
    return look_up(symbol, function, result);
}

GM_API int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    (void)version, (void)flags;
    return look_up(symbol, function, NULL);
}
