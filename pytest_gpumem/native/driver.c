/* The CUDA driver API (libcuda.so.1) as far as PyTorch, Triton and cuda.bindings ask it, and NVML. */
#define _GNU_SOURCE
#include "gpumem.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern void gm_use_device(int device);
extern bool gm_device_used(int device);

/* ---- virtual memory management: reserve addresses, create memory (charged), map, unmap, release ---- */

typedef struct {
    int device;
    uint64_t size;
    int references; /* one for its creator, one a mapping */
} allocation;

/* The leading fields of CUmemAllocationProp. */
typedef struct {
    int type, handle_types, location_type, device;
} allocation_properties;

static gm_ranges reservations; /* tag: the device of the last mapping in it */
static gm_ranges mappings;     /* tag: the allocation */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define GRANULARITY ((size_t)2 << 20)

int gm_reserved_owner(uintptr_t address) {
    pthread_mutex_lock(&lock);
    gm_range *found = gm_ranges_find(&reservations, address);
    int device = found ? (int)found->tag : -1;
    pthread_mutex_unlock(&lock);
    return device;
}

GM_API int cuMemAddressReserve(uintptr_t *out, size_t size, size_t alignment, uintptr_t wanted,
                               unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    if (!gm_visible()) return GM_NO_DEVICE;
    if (!size || size % GRANULARITY) return GM_INVALID_VALUE;
    size_t room = size + GRANULARITY;
    void *map = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return GM_OUT_OF_MEMORY;
    uintptr_t start = ((uintptr_t)map + GRANULARITY - 1) & ~(uintptr_t)(GRANULARITY - 1);
    if (start > (uintptr_t)map) munmap(map, start - (uintptr_t)map);
    if ((uintptr_t)map + room > start + size) munmap((void *)(start + size), (uintptr_t)map + room - start - size);
    pthread_mutex_lock(&lock);
    bool ok = gm_ranges_add(&reservations, (gm_range){start, start + size, gm_current_device(), 0});
    pthread_mutex_unlock(&lock);
    if (!ok) {
        munmap((void *)start, size);
        return GM_OUT_OF_MEMORY;
    }
    *out = start;
    return GM_SUCCESS;
}

GM_API int cuMemAddressFree(uintptr_t address, size_t size) {
    pthread_mutex_lock(&lock);
    gm_range *found = gm_ranges_find(&reservations, address);
    bool ok = found && found->start == address && found->end - address == size;
    if (ok) {
        gm_ranges_remove(&reservations, found);
        munmap((void *)address, size);
    }
    pthread_mutex_unlock(&lock);
    return ok ? GM_SUCCESS : GM_INVALID_VALUE;
}

GM_API int cuMemGetAllocationGranularity(size_t *out, const void *properties, int option) {
    (void)properties, (void)option;
    *out = GRANULARITY;
    return GM_SUCCESS;
}

GM_API int cuMemCreate(allocation **out, size_t size, const allocation_properties *properties,
                       unsigned long long flags) {
    (void)flags;
    if (!gm_visible()) return GM_NO_DEVICE;
    if (!size || size % GRANULARITY) return GM_INVALID_VALUE;
    if (properties->location_type != 1) return gm_unsupported("cuMemCreate (in host memory)", GM_NOT_SUPPORTED);
    if (properties->device < 0 || properties->device >= gm_visible_devices()) return GM_INVALID_DEVICE;
    allocation *made = malloc(sizeof *made);
    if (!made) return GM_OUT_OF_MEMORY;
    int status = gm_charge(properties->device, size);
    if (status) {
        free(made);
        return status;
    }
    *made = (allocation){properties->device, size, 1};
    *out = made;
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
    (void)offset, (void)flags;
    pthread_mutex_lock(&lock);
    gm_range *room = gm_ranges_find(&reservations, address);
    bool ok = room && address + size <= room->end && !gm_ranges_find(&mappings, address) &&
              gm_ranges_add(&mappings, (gm_range){address, address + size, (intptr_t)memory, 0});
    if (ok) {
        memory->references++;
        room->tag = memory->device;
    }
    pthread_mutex_unlock(&lock);
    return ok ? GM_SUCCESS : GM_INVALID_VALUE;
}

GM_API int cuMemUnmap(uintptr_t address, size_t size) {
    pthread_mutex_lock(&lock);
    for (uintptr_t at = address; at < address + size;) {
        gm_range *found = gm_ranges_find(&mappings, at);
        if (!found || found->start != at || found->end > address + size) {
            pthread_mutex_unlock(&lock);
            return GM_INVALID_VALUE;
        }
        allocation *memory = (allocation *)found->tag;
        at = found->end;
        gm_ranges_remove(&mappings, found);
        drop(memory);
    }
    pthread_mutex_unlock(&lock);
    return GM_SUCCESS;
}

GM_API int cuMemSetAccess(uintptr_t address, size_t size, const void *access, size_t count) {
    (void)address, (void)size, (void)access, (void)count;
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

GM_API int cuMemGetAddressRange_v2(uintptr_t *base, size_t *size, uintptr_t address) {
    return cuMemGetAddressRange(base, size, address);
}

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
    *context = gm_device_used(gm_current_device()) ? &contexts[gm_current_device()] : NULL;
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
    extern int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *, const void *, int, size_t);
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

GM_API int cuStreamWriteValue32(void *stream, uintptr_t address, uint32_t value, unsigned flags) {
    (void)stream, (void)address, (void)value, (void)flags;
    return GM_SUCCESS;
}

GM_API int cuMemsetD32Async(uintptr_t address, unsigned value, size_t count, void *stream) {
    (void)address, (void)value, (void)count, (void)stream;
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

/* ---- NVML: how many devices there are and how full ---- */

enum { NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_NOT_LOADED = 9 };

GM_API int nvmlInit_v2(void) { return gm_visible() ? GM_SUCCESS : NVML_NOT_LOADED; }

GM_API int nvmlInit(void) { return nvmlInit_v2(); }

GM_API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return nvmlInit_v2();
}

GM_API int nvmlShutdown(void) { return GM_SUCCESS; }

GM_API const char *nvmlErrorString(int status) {
    return status == GM_SUCCESS        ? "success"
           : status == NVML_NOT_LOADED ? "no driver: the virtual GPU is visible inside marked tests only"
                                       : "not supported by the virtual GPU";
}

GM_API int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)gm_visible_devices();
    return GM_SUCCESS;
}

static char nvml_devices[GM_MAX_DEVICES];

GM_API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if ((int)index >= gm_visible_devices()) return NVML_INVALID;
    *device = &nvml_devices[index];
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || bus < 1 || bus > GM_MAX_DEVICES) return NVML_NOT_FOUND;
    *device = &nvml_devices[bus - 1];
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetUUID(void *device, char *out, unsigned length) {
    snprintf(out, length, "GPU-00000000-0000-0000-0000-%012d", (int)((char *)device - nvml_devices));
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetName(void *device, char *out, unsigned length) {
    (void)device;
    snprintf(out, length, "%s", gm_profile.name);
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *out) {
    uint64_t unused = gm_free_memory((int)((char *)device - nvml_devices));
    out[0] = gm_profile.total_memory;
    out[1] = unused;
    out[2] = gm_profile.total_memory - unused;
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *infos) {
    (void)device, (void)infos;
    *count = 0;
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *infos) {
    return nvmlDeviceGetComputeRunningProcesses(device, count, infos);
}

GM_API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return cuDriverGetVersion(version); }

GM_API int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    snprintf(out, length, "virtual");
    return GM_SUCCESS;
}

/* There is no NVLink and no fabric here; PyTorch asks and copes. */
GM_API int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NVML_NOT_SUPPORTED; }
GM_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NVML_NOT_SUPPORTED; }
GM_API int nvmlDeviceGetGpuFabricInfoV(void) { return NVML_NOT_SUPPORTED; }
