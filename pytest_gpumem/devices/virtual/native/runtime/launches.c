/* Kernel launches, counted and not done, and the functions that nvcc's output calls around them. */
#include "runtime/runtime.h"

#include <stdatomic.h>

typedef struct {
    unsigned x, y, z;
} dim3;

static atomic_ullong launches;

static _Thread_local uint64_t plans_run;

void gm_count_plan(void) { plans_run++; }

uint64_t gm_plans_run(void) { return plans_run; }

void gm_count_launch(void) {
    atomic_fetch_add_explicit(&launches, 1, memory_order_relaxed);
    gm_forget_all();
}

static int launched(void) {
    gm_count_launch();
    return gm_visible() ? GM_SUCCESS : gm_error(GM_NO_DEVICE);
}

GM_API int cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, void *on) {
    (void)function, (void)grid, (void)block, (void)args, (void)shared, (void)on;
    return launched();
}

GM_API int __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, void *on) {
    (void)kernel, (void)grid, (void)block, (void)args, (void)shared, (void)on;
    return launched();
}

GM_API int cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared,
                                       void *on) {
    (void)function, (void)grid, (void)block, (void)args, (void)shared, (void)on;
    return launched();
}

GM_API int cudaLaunchKernelExC(const void *config, const void *function, void **args) {
    (void)config, (void)function, (void)args;
    return launched();
}

GM_API int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return GM_SUCCESS;
}

GM_API int cudaFuncSetCacheConfig(const void *function, int config) {
    (void)function, (void)config;
    return GM_SUCCESS;
}

GM_API int cudaLaunchHostFunc(void *on, void (*function)(void *), void *data) {
    (void)on;
    function(data);
    return GM_SUCCESS;
}

GM_API int cudaStreamAddCallback(void *on, void (*callback)(void *, int, void *), void *data, unsigned flags) {
    (void)flags;
    callback(on, GM_SUCCESS, data);
    return GM_SUCCESS;
}

/* Functions that nvcc's output calls when a library with kernels is loaded and when it launches one. */
static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *on;
} configurations[16];
static _Thread_local int configuration_count;

GM_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *on) {
    if (configuration_count == 16) return 1;
    configurations[configuration_count].grid = grid;
    configurations[configuration_count].block = block;
    configurations[configuration_count].shared = shared;
    configurations[configuration_count++].on = on;
    return 0;
}

GM_API int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *on) {
    if (configuration_count == 0) return GM_ILLEGAL_STATE;
    configuration_count--;
    *grid = configurations[configuration_count].grid;
    *block = configurations[configuration_count].block;
    *shared = configurations[configuration_count].shared;
    *(void **)on = configurations[configuration_count].on;
    return GM_SUCCESS;
}

GM_API int __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return GM_SUCCESS;
}

GM_API void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}

GM_API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }

GM_API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

GM_API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *tid, void *bid, void *block, void *grid, int *warp) {
    (void)handle, (void)host, (void)device, (void)name, (void)limit;
    (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
}

GM_API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                              int constant, int global) {
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}

GM_API char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

GM_API int cudaProfilerStart(void) { return GM_SUCCESS; }

GM_API int cudaProfilerStop(void) { return GM_SUCCESS; }

/* ---- functions that Python calls ---- */

uint64_t gm_launches(void) { return atomic_load(&launches); }

GM_API uint64_t gpumem_launches(void) { return gm_launches(); }
