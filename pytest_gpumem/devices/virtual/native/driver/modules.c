/* The CUDA driver API: modules and kernels, which are loaded by name only and never run, and writes to their memory. */
#include "runtime/runtime.h"

#include <string.h>

static char module_token, function_token;

static int token(void **out, char *value) {
    if (!gm_visible()) return GM_NO_DEVICE;
    *out = value;
    return GM_SUCCESS;
}

GM_API int cuModuleLoadData(void **module, const void *image) { return token(module, &module_token); }

GM_API int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void **values) {
    return token(module, &module_token);
}

GM_API int cuModuleLoad(void **module, const char *path) { return token(module, &module_token); }

GM_API int cuModuleGetFunction(void **function, void *module, const char *name) {
    return token(function, &function_token);
}

/* CUfunction_attribute: 0 maximum threads per block, 4 registers per thread, 8 maximum dynamic shared memory. */
GM_API int cuFuncGetAttribute(int *value, int attribute, void *function) {
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

/* The leading fields of CUlaunchConfig. */
typedef struct {
    gm_dim3 grid, block;
    unsigned shared;
    void *stream;
} launch_config;

static int launched(const launch_config *config) {
    int status = gm_launch_status(config->grid, config->block, config->shared);
    gm_work_next_on(config->stream);
    gm_count_launch();
    return status == GM_INVALID_CONFIGURATION ? GM_INVALID_VALUE : status;
}

GM_API int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **args,
                          void **extra) {
    return launched(&(launch_config){{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream});
}

GM_API int cuLaunchKernelEx(const launch_config *config, void *function, void **args, void **extra) {
    return config ? launched(config) : GM_INVALID_VALUE;
}

GM_API int cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                     void *stream, void **args) {
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, args, NULL);
}

GM_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int block_size, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared);
}

GM_API int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
    *clusters = gm_profile.sm_count;
    return GM_SUCCESS;
}

GM_API int cuTensorMapEncodeTiled(void *map, ...) {
    memset(map, 0, 128); /* an opaque descriptor of 128 bytes that only a kernel reads */
    return GM_SUCCESS;
}

GM_API int cuTensorMapEncodeIm2col(void *map, ...) { memset(map, 0, 128); return GM_SUCCESS; }

GM_API int cuStreamWriteValue32(void *stream, uintptr_t address, uint32_t value, unsigned flags) {
    int capturing = 0;
    cudaStreamIsCapturing(stream, &capturing);
    if (!capturing) gm_write((void *)address, &value, sizeof value);
    return GM_SUCCESS;
}

/* CUDA logs nothing here: registering a callback is all that is needed. */
GM_API int cuLogsRegisterCallback(void *callback, void *data, void **handle) {
    static char none;
    if (handle) *handle = &none;
    return GM_SUCCESS;
}
