/* NVML: how many devices there are and how full. */
#define _GNU_SOURCE
#include "gpumem.h"

#include <stdio.h>

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

GM_API int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = gm_cuda_version();
    return GM_SUCCESS;
}

GM_API int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    snprintf(out, length, "virtual");
    return GM_SUCCESS;
}

/* There is no NVLink and no fabric here; PyTorch asks and copes. */
GM_API int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NVML_NOT_SUPPORTED; }
GM_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NVML_NOT_SUPPORTED; }
GM_API int nvmlDeviceGetGpuFabricInfoV(void) { return NVML_NOT_SUPPORTED; }
