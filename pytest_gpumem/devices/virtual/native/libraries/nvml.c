/* NVML: the number of devices, and their memory in use. */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <stdio.h>
#include <string.h>

enum { NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_NOT_LOADED = 9 };

GM_API int nvmlInit_v2(void) { return gm_machine_devices() ? GM_SUCCESS : NVML_NOT_LOADED; }
GM_SAME(nvmlInit, nvmlInit_v2);
GM_API int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }

GM_API const char *nvmlErrorString(int status) {
    return status == GM_SUCCESS        ? "success"
           : status == NVML_NOT_LOADED ? "no driver: the virtual GPU is visible inside marked tests only"
                                       : "not supported by the virtual GPU";
}

GM_API int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)gm_machine_devices();
    return GM_SUCCESS;
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, unused, used;
};

struct temperature {
    unsigned version;
    int sensor, celsius;
};

static char nvml_devices[GM_MAX_DEVICES];

GM_API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if ((int)index >= gm_machine_devices()) return NVML_INVALID;
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
    char uuid_text[GM_UUID_TEXT];
    gm_uuid_text(uuid_text, (int)((char *)device - nvml_devices));
    snprintf(out, length, "%s", uuid_text);
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    char uuid_text[GM_UUID_TEXT];
    for (int index = 0; index < gm_machine_devices(); index++) {
        nvmlDeviceGetUUID(&nvml_devices[index], uuid_text, sizeof uuid_text);
        if (strcmp(uuid_text, uuid) == 0) return nvmlDeviceGetHandleByIndex_v2((unsigned)index, device);
    }
    return NVML_NOT_FOUND;
}

GM_API int nvmlDeviceGetName(void *device, char *out, unsigned length) {
    snprintf(out, length, "%s", gm_profile.name);
    return GM_SUCCESS;
}

/* On a device that CUDA does not show, this process uses no memory. */
static void memory_of(void *device, unsigned long long *total, unsigned long long *unused) {
    int ordinal = gm_ordinal_of((int)((char *)device - nvml_devices));
    *total = ordinal < 0 ? gm_profile.total_memory : gm_total_memory(ordinal);
    *unused = ordinal < 0 ? *total : gm_free_memory(ordinal);
}

GM_API int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *out) {
    memory_of(device, &out[0], &out[1]);
    out[2] = out[0] - out[1];
    return GM_SUCCESS;
}

/* nvmlMemory_v2_t: a version, three sizes, and the reserved bytes between them. */
GM_API int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *out) {
    memory_of(device, &out->total, &out->unused);
    out->reserved = 0;
    out->used = out->total - out->unused;
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = gm_profile.major;
    *minor = gm_profile.minor;
    return GM_SUCCESS;
}

/* Nothing runs: no utilisation, no power, no temperature. The clock is the profile's, as in cudaDeviceProp. */
GM_API int nvmlDeviceGetUtilizationRates(void *device, unsigned *out) {
    out[0] = out[1] = 0; /* percent of the time in which kernels ran, and memory was read or written */
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { *milliwatts = 0; return GM_SUCCESS; }

GM_API int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    *celsius = 0;
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetTemperatureV(void *device, struct temperature *out) {
    out->celsius = 0;
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetClockInfo(void *device, int type, unsigned *megahertz) {
    *megahertz = (unsigned)gm_profile.clock_rate_khz / 1000;
    return GM_SUCCESS;
}

GM_API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *infos) {
    *count = 0;
    return GM_SUCCESS;
}

GM_SAME(nvmlDeviceGetComputeRunningProcesses_v3, nvmlDeviceGetComputeRunningProcesses);

GM_API int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = gm_cuda_version(); return GM_SUCCESS; }

GM_API int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    snprintf(out, length, "virtual");
    return GM_SUCCESS;
}

/* nvmlGpuFabricInfo_v2_t and later versions; of the state 0 is "not supported". */
struct fabric_info {
    unsigned version; /* the version in the highest byte, the size in the others */
    unsigned char cluster_uuid[16];
    int status;
    unsigned clique;
    unsigned char state;
};
enum { LARGEST_FABRIC_INFO = 256 }; /* bytes; a caller that sets no version has any number there */

/* Such a device has no fabric. PyTorch 2.13 treats any other result as an error if segments are expandable. */
GM_API int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric_info *out) {
    size_t size = out->version & 0xffffff;
    if (size < sizeof *out || size > LARGEST_FABRIC_INFO) return NVML_INVALID;
    memset((char *)out + sizeof out->version, 0, size - sizeof out->version);
    return GM_SUCCESS;
}

/* nvmlGpuP2PCapsIndex_t: 0 reads, 1 writes, 2 NVLink, then atomics and others. As in cudaDeviceCanAccessPeer. */
GM_API int nvmlDeviceGetP2PStatus(void *device, void *peer, int capability, int *status) {
    enum { P2P_OK = 0, P2P_NOT_SUPPORTED = 5, LAST_ACCESS = 1 };
    *status = capability <= LAST_ACCESS ? P2P_OK : P2P_NOT_SUPPORTED;
    return GM_SUCCESS;
}

/* There is no NVLink here; PyTorch queries it and accepts that. */
GM_API int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NVML_NOT_SUPPORTED; }
GM_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NVML_NOT_SUPPORTED; }
