/* Kernel launches, which are counted but not run, and the functions that nvcc's output calls around them. */
#include "runtime/runtime.h"

#include <stdatomic.h>
#include <string.h>

typedef gm_dim3 dim3;

static atomic_ullong launches;

static _Thread_local gm_plan last_plan;

void gm_count_plan(uint64_t graph, uint64_t workspace) {
    last_plan = (gm_plan){graph, workspace, last_plan.number + 1};
}

gm_plan gm_last_plan(void) { return last_plan; }

void gm_count_launch(void) {
    atomic_fetch_add_explicit(&launches, 1, memory_order_relaxed);
    gm_forget_all();
}

/* Every card since compute capability 3.0 has these limits (CUDA Programming Guide, "Technical Specifications"). */
enum { MAX_THREADS = 1024, MAX_DEPTH = 64, MAX_ROWS = 65535 };
#define MAX_COLUMNS 2147483647u

/* Returns the status of a launch. A dimension of zero is accepted, although CUDA refuses it: here it may come from a size
 * that was read back from the device, which is zero because no kernel has computed it. */
int gm_launch_status(gm_dim3 grid, gm_dim3 block, size_t shared) {
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!gm_visible()) return GM_NO_DEVICE;
    if (grid.x > MAX_COLUMNS || grid.y > MAX_ROWS || grid.z > MAX_ROWS) return GM_INVALID_CONFIGURATION;
    if (block.x > MAX_THREADS || block.y > MAX_THREADS || block.z > MAX_DEPTH || threads > MAX_THREADS)
        return GM_INVALID_CONFIGURATION;
    return shared > gm_profile.shared_memory_per_block_optin ? GM_INVALID_VALUE : GM_SUCCESS;
}

/* Host functions that launch kernels with some names. */
typedef struct {
    int size;
    const void *_Atomic *hosts;
} kernels;

/* Host functions of torch.cuda._sleep, and of a flush of the instruction cache, which write nothing. */
static const void *_Atomic idle_hosts[16];
static const kernels idle = {sizeof idle_hosts / sizeof *idle_hosts, idle_hosts};

/* Host functions of PyTorch's fill, one for each type and layout (some 200 kernels). */
static const void *_Atomic fill_hosts[1024];
static const kernels fills = {sizeof fill_hosts / sizeof *fill_hosts, fill_hosts};

static const struct {
    const char *part; /* of a kernel's name */
    const kernels *of;
} named[] = {{"spin_kernel", &idle}, {"flush_icache_kernel", &idle}, {"NS0_11FillFunctorI", &fills}};

static void note_kernel(const void *host, const char *name) {
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        if (!name || !strstr(name, named[i].part)) continue;
        for (int place = 0; place < named[i].of->size; place++) {
            const void *none = NULL;
            if (atomic_compare_exchange_strong(&named[i].of->hosts[place], &none, host)) return;
        }
    }
}

static bool is_among(const kernels *some, const void *host) {
    for (int i = 0; i < some->size && some->hosts[i]; i++)
        if (some->hosts[i] == host) return true;
    return false;
}

/* Whether a kernel overwrites no known value. Under torch.use_deterministic_algorithms, torch.tensor and similar
 * functions fill the memory that they have just allocated; of all fills only these run outside of an operator that is
 * seen. */
static bool is_idle(const void *host) {
    return is_among(&idle, host) || (gm_between_operators() && is_among(&fills, host));
}

static int launched_idle(dim3 grid, dim3 block, size_t shared, void *on) {
    int status = gm_launch_status(grid, block, shared);
    if (gm_visible()) gm_use_device(gm_current_device());
    gm_work_next_on(on);
    gm_note_work();
    atomic_fetch_add_explicit(&launches, 1, memory_order_relaxed);
    return gm_error(status);
}

static int launched(dim3 grid, dim3 block, size_t shared, void *on) {
    gm_work_next_on(on);
    int status = gm_launch_status(grid, block, shared);
    if (gm_visible()) gm_use_device(gm_current_device());
    gm_count_launch();
    return gm_error(status);
}

GM_API int cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, void *on) {
    return is_idle(function) ? launched_idle(grid, block, shared, on) : launched(grid, block, shared, on);
}

GM_SAME(__cudaLaunchKernel, cudaLaunchKernel);

GM_API int cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared,
                                       void *on) {
    return launched(grid, block, shared, on);
}

/* The leading fields of cudaLaunchConfig_t. */
typedef struct {
    dim3 grid, block;
    size_t shared;
    void *on;
} launch_config;

GM_API int cudaLaunchKernelExC(const launch_config *config, const void *function, void **args) {
    if (!config) return gm_error(GM_INVALID_VALUE);
    return launched(config->grid, config->block, config->shared, config->on);
}

GM_API int cudaLaunchHostFunc(void *on, void (*function)(void *), void *data) {
    function(data);
    return GM_SUCCESS;
}

GM_API int cudaStreamAddCallback(void *on, void (*callback)(void *, int, void *), void *data, unsigned flags) {
    callback(on, GM_SUCCESS, data);
    return GM_SUCCESS;
}

/* State of the functions that nvcc's output calls when a library with kernels is loaded and when it launches one. */
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

GM_API int __cudaGetKernel(const void **kernel, const void *function) { *kernel = function; return GM_SUCCESS; }

GM_API void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

GM_API void __cudaRegisterFatBinaryEnd(void **handle) { }
GM_API void __cudaUnregisterFatBinary(void **handle) { }

GM_API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *tid, void *bid, void *block, void *grid, int *warp) {
    note_kernel(host, name);
}

GM_API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                              int constant, int global) {
}

GM_API char __cudaInitModule(void **handle) { return 1; }

/* ---- functions that Python calls ---- */

uint64_t gm_launches(void) { return atomic_load(&launches); }

GM_API uint64_t gpumem_launches(void) { return gm_launches(); }
