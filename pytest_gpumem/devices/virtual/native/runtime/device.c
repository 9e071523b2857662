/* Device queries, answered from the card's profile. */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static atomic_uint used_devices; /* bit i: device i has a primary context */

/* cudaDeviceProp (CUDA Runtime API, "Device Management"): CUDA 13's layout, and CUDA 12's, with more fields, named
 * cudaGetDeviceProperties_v2. */
#define PROPERTIES(name_of_type, CUDA_12)                                                                             \
    typedef struct {                                                                                                  \
        char name[256];                                                                                               \
        char uuid[16];                                                                                                \
        char luid[8];                                                                                                 \
        unsigned luid_device_node_mask;                                                                               \
        size_t total_global_mem, shared_mem_per_block;                                                                \
        int regs_per_block, warp_size;                                                                                \
        size_t mem_pitch;                                                                                             \
        int max_threads_per_block, max_threads_dim[3], max_grid_size[3];                                              \
        CUDA_12(clock_rate)                                                                                           \
        size_t total_const_mem;                                                                                       \
        int major, minor;                                                                                             \
        size_t texture_alignment, texture_pitch_alignment;                                                            \
        CUDA_12(device_overlap)                                                                                       \
        int multi_processor_count;                                                                                    \
        CUDA_12(kernel_exec_timeout)                                                                                  \
        int integrated, can_map_host_memory;                                                                          \
        CUDA_12(compute_mode)                                                                                         \
        int textures[23];                                                                                             \
        CUDA_12(one_texture_more)                                                                                     \
        int surfaces[15];                                                                                             \
        size_t surface_alignment;                                                                                     \
        int concurrent_kernels, ecc_enabled, pci_bus_id, pci_device_id, pci_domain_id, tcc_driver;                    \
        int async_engine_count, unified_addressing;                                                                   \
        CUDA_12(memory_clock_rate)                                                                                    \
        int memory_bus_width, l2_cache_size, persisting_l2_cache_max_size;                                            \
        int max_threads_per_multi_processor, stream_priorities_supported, global_l1_cache, local_l1_cache;            \
        size_t shared_mem_per_multiprocessor;                                                                         \
        int regs_per_multiprocessor, managed_memory, is_multi_gpu_board, multi_gpu_board_group_id;                    \
        int host_native_atomic_supported;                                                                             \
        CUDA_12(single_to_double_ratio)                                                                               \
        int pageable_memory_access, concurrent_managed_access;                                                        \
        int compute_preemption_supported, can_use_host_pointer, cooperative_launch;                                   \
        CUDA_12(cooperative_multi_device_launch)                                                                      \
        size_t shared_mem_per_block_optin;                                                                            \
        int pageable_uses_host_page_tables, direct_managed_mem_access_from_host, max_blocks_per_multi_processor;      \
        int access_policy_max_window_size;                                                                            \
        size_t reserved_shared_mem_per_block;                                                                         \
        int host_register_supported, sparse_cuda_array_supported, host_register_read_only_supported;                  \
        int timeline_semaphore_interop_supported, memory_pools_supported, gpu_direct_rdma_supported;                  \
        unsigned gpu_direct_rdma_flush_writes_options;                                                                \
        int gpu_direct_rdma_writes_ordering;                                                                          \
        unsigned memory_pool_supported_handle_types;                                                                  \
        int deferred_mapping, ipc_event_supported, cluster_launch, unified_function_pointers;                         \
        int newest[63];                                                                                               \
    } name_of_type;
#define LEFT_OUT(field)
#define INT(field) int field;
PROPERTIES(prop13, LEFT_OUT)
PROPERTIES(prop12, INT)

_Static_assert(sizeof(prop13) == 1008, "cudaDeviceProp of CUDA 13 has 1008 bytes");
_Static_assert(sizeof(prop12) == 1032, "cudaDeviceProp of CUDA 12 has 1032 bytes");

#define FILL(p, device)                                                                     \
    do {                                                                                    \
        memset((p), 0, sizeof *(p));                                                        \
        memcpy((p)->name, gm_profile.name, sizeof (p)->name);                               \
        gm_uuid((unsigned char *)(p)->uuid, gm_machine_device(device));                     \
        (p)->total_global_mem = gm_profile.total_memory;                                    \
        (p)->shared_mem_per_block = gm_profile.shared_memory_per_block;                     \
        (p)->regs_per_block = 65536;                                                        \
        (p)->warp_size = 32;                                                                \
        (p)->mem_pitch = 2147483647;                                                        \
        (p)->max_threads_per_block = 1024;                                                  \
        (p)->max_threads_dim[0] = (p)->max_threads_dim[1] = 1024;                           \
        (p)->max_threads_dim[2] = 64;                                                       \
        (p)->max_grid_size[0] = 2147483647;                                                 \
        (p)->max_grid_size[1] = (p)->max_grid_size[2] = 65535;                              \
        (p)->total_const_mem = 65536;                                                       \
        (p)->major = gm_profile.major;                                                      \
        (p)->minor = gm_profile.minor;                                                      \
        (p)->texture_alignment = (p)->surface_alignment = 512;                              \
        (p)->texture_pitch_alignment = 32;                                                  \
        (p)->multi_processor_count = gm_profile.sm_count;                                   \
        (p)->can_map_host_memory = (p)->concurrent_kernels = 1;                             \
        (p)->ecc_enabled = 1;                                                               \
        (p)->pci_bus_id = 1 + gm_machine_device(device);                                    \
        (p)->async_engine_count = 3;                                                        \
        (p)->unified_addressing = 1;                                                        \
        (p)->memory_bus_width = gm_profile.memory_bus_width;                                \
        (p)->l2_cache_size = (int)gm_profile.l2_cache_size;                                 \
        (p)->max_threads_per_multi_processor = gm_profile.max_threads_per_sm;               \
        (p)->stream_priorities_supported = (p)->global_l1_cache = (p)->local_l1_cache = 1;  \
        (p)->shared_mem_per_multiprocessor = gm_profile.shared_memory_per_sm;               \
        (p)->regs_per_multiprocessor = gm_profile.registers_per_sm;                         \
        (p)->managed_memory = (p)->concurrent_managed_access = 1;                           \
        (p)->compute_preemption_supported = (p)->can_use_host_pointer = 1;                  \
        (p)->cooperative_launch = 1;                                                        \
        (p)->shared_mem_per_block_optin = gm_profile.shared_memory_per_block_optin;         \
        (p)->max_blocks_per_multi_processor = gm_profile.max_blocks_per_sm;                 \
        (p)->reserved_shared_mem_per_block = gm_profile.reserved_shared_memory_per_block;   \
        (p)->host_register_supported = (p)->memory_pools_supported = 1;                     \
        (p)->ipc_event_supported = 1;                                                       \
        (p)->cluster_launch = gm_profile.major >= 9;                                        \
    } while (0)

static bool no_such_device(int device) { return device < 0 || device >= gm_device_total(); }

static void fill13(prop13 *prop, int device) { FILL(prop, device); }

static void fill12(prop12 *prop, int device) {
    FILL(prop, device);
    prop->clock_rate = gm_profile.clock_rate_khz;
    prop->device_overlap = 1;
}

/* For PyTorch's queries before its allocator has read a total. */
static void show_total(size_t *total, int device, const void *caller) {
    uint64_t shown = gm_total_for(device, caller);
    if (shown != gm_total_memory(device)) *total = shown;
}

#define GET_PROPERTIES(name, major)                                               \
    GM_API int name(prop##major *prop, int device) {                              \
        if (!prop) return gm_error(GM_INVALID_VALUE);                             \
        if (no_such_device(device)) return gm_error(GM_INVALID_DEVICE);           \
        fill##major(prop, device);                                                \
        show_total(&prop->total_global_mem, device, __builtin_return_address(0)); \
        return GM_SUCCESS;                                                      \
    }

GET_PROPERTIES(cudaGetDeviceProperties, 13)
GET_PROPERTIES(cudaGetDeviceProperties_v2, 12)

/* Rewrites PyTorch's copy of a device's properties, in the layout of its CUDA version: a session's tests may each request
 * another card. */
GM_API void gpumem_fill_properties(void *prop, int device, int cuda_major) {
    if (cuda_major >= 13) fill13(prop, device);
    else fill12(prop, device);
}

#define FIELD(number, field) case number: *value = (int)p.field; break;

/* Attributes by their numbers in cudaDeviceAttr, which CUdevice_attribute shares. */
static int attribute(int *value, int number, int device) {
    prop12 p;
    if (!value) return GM_INVALID_VALUE;
    if (no_such_device(device)) return GM_INVALID_DEVICE;
    fill12(&p, device);
    switch (number) {
    case 17: case 18: case 20: case 34: case 35: case 50: case 84: case 85: case 86: case 88:
    case 96: case 100: case 101: case 103: case 107: case 108: case 109: case 110: case 112:
    case 113: case 114: case 116: case 117: case 118: case 119: case 121: case 124: case 128:
    case 129: case 130: case 132: case 133:
        *value = 0; /* features that it lacks, NUMA or PCI numbers, the default mode */
        break;
    case 41: case 78: case 79: case 80: case 90: case 91: case 95: case 99: case 102: case 125:
        *value = 1; /* unified addressing, priorities, L1 caches, preemption, registered host memory, mappings, IPC events */
        break;
    case 2: case 3: case 4: *value = p.max_threads_dim[number - 2]; break;
    case 5: case 6: case 7: *value = p.max_grid_size[number - 5]; break;
    FIELD(1, max_threads_per_block) FIELD(8, shared_mem_per_block) FIELD(9, total_const_mem) FIELD(10, warp_size)
    FIELD(11, mem_pitch) FIELD(12, regs_per_block) FIELD(13, clock_rate) FIELD(14, texture_alignment)
    FIELD(15, device_overlap) FIELD(16, multi_processor_count) FIELD(19, can_map_host_memory)
    FIELD(31, concurrent_kernels) FIELD(32, ecc_enabled) FIELD(33, pci_bus_id) FIELD(36, clock_rate)
    FIELD(37, memory_bus_width) FIELD(38, l2_cache_size) FIELD(39, max_threads_per_multi_processor)
    FIELD(40, async_engine_count) FIELD(75, major) FIELD(76, minor) FIELD(81, shared_mem_per_multiprocessor)
    FIELD(82, regs_per_multiprocessor) FIELD(83, managed_memory) FIELD(89, concurrent_managed_access)
    FIELD(97, shared_mem_per_block_optin) FIELD(106, max_blocks_per_multi_processor)
    FIELD(111, reserved_shared_mem_per_block) FIELD(115, memory_pools_supported) FIELD(120, cluster_launch)
    case 131: case 134: *value = -1; break; /* NUMA nodes: none */
    default: return gm_unsupported("cudaDeviceGetAttribute (an attribute it does not know)", GM_INVALID_VALUE);
    }
    return GM_SUCCESS;
}

GM_API int cudaDeviceGetAttribute(int *value, int number, int device) {
    return gm_error(attribute(value, number, device));
}

GM_API int cuDeviceGetAttribute(int *value, int number, int device) { return attribute(value, number, device); }

/* Returns the number of all devices, also while they are hidden: PyTorch counts its devices once per process. They are
 * hidden above (pytest_gpumem/devices/virtual/visibility.py) and below (the driver and NVML, which other frameworks
 * call). */
GM_API int cudaGetDeviceCount(int *count) {
    gm_initialize();
    *count = gm_device_total();
    return GM_SUCCESS;
}

/* The device count for a program that calls the runtime through cuda.bindings: visible devices only. */
GM_API int gpumem_visible_device_count(int *count) {
    gm_initialize();
    *count = gm_visible_devices();
    return gm_error(*count ? GM_SUCCESS : GM_NO_DEVICE);
}

void gm_use_device(int device) {
    if (gm_device_used(device)) return;
    gm_initialize();
    atomic_fetch_or(&used_devices, 1u << device);
}

/* Resets the contexts for a program that begins now: it has used no device. */
GM_API void gpumem_forget_contexts(void) { atomic_store(&used_devices, 0); }

bool gm_device_used(int device) { return atomic_load_explicit(&used_devices, memory_order_relaxed) >> device & 1u; }

GM_API int cudaSetDevice(int device) {
    if (no_such_device(device)) return gm_error(GM_INVALID_DEVICE);
    gm_set_current_device(device);
    if (gm_visible()) gm_use_device(device);
    return GM_SUCCESS;
}

GM_API int cudaGetDevice(int *device) { *device = gm_current_device(); return GM_SUCCESS; }

GM_API int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    if (no_such_device(device) || no_such_device(peer)) return gm_error(GM_INVALID_DEVICE);
    *can = device != peer;
    return GM_SUCCESS;
}

GM_API int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    static atomic_uint enabled[GM_MAX_DEVICES];
    if (no_such_device(peer) || peer == gm_current_device()) return gm_error(GM_INVALID_DEVICE);
    unsigned enabled_before = atomic_fetch_or(&enabled[gm_current_device()], 1u << peer);
    return gm_error(enabled_before >> peer & 1u ? GM_CONTEXT_IS_CURRENT : GM_SUCCESS);
}

GM_API int cudaDeviceGetPCIBusId(char *id, int length, int device) {
    if (no_such_device(device)) return gm_error(GM_INVALID_DEVICE);
    snprintf(id, (size_t)length, "0000:%02X:00.0", 1 + gm_machine_device(device));
    return GM_SUCCESS;
}

GM_API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return GM_SUCCESS;
}

GM_API int cudaDriverGetVersion(int *version) { *version = gm_cuda_version(); return GM_SUCCESS; }
GM_API int cudaRuntimeGetVersion(int *version) { *version = gm_cuda_version(); return GM_SUCCESS; }
