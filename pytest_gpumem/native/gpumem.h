/* The virtual GPU: what its parts share.
 *
 * The library answers for the CUDA runtime, the driver and NVIDIA's libraries so that PyTorch's own CUDA code
 * and caching allocator run on a machine without a GPU. No kernel is executed and no device memory is backed:
 * addresses are reserved, sizes are charged to the byte. All that is declared here follows the public
 * documentation of CUDA's API (CUDA Runtime API and Driver API reference manuals).
 */
#ifndef GPUMEM_H
#define GPUMEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GM_API __attribute__((visibility("default")))

enum {
    GM_MAX_DEVICES = 16,
    /* Status codes: CUDA Runtime API (cudaError_t) and Driver API (CUresult) share these numbers. */
    GM_SUCCESS = 0,
    GM_INVALID_VALUE = 1,
    GM_OUT_OF_MEMORY = 2,
    GM_NO_DEVICE = 100,
    GM_DEVICE_UNINITIALIZED = 201,
    GM_INVALID_DEVICE = 101,
    GM_CONTEXT_IS_CURRENT = 704, /* peer access already enabled */
    GM_PEER_NOT_ENABLED = 705,
    GM_HOST_NOT_REGISTERED = 713,
    GM_SYMBOL_NOT_FOUND = 500,
    GM_NOT_READY = 600,
    GM_NOT_SUPPORTED = 801,
    GM_STREAM_CAPTURE_UNSUPPORTED = 900,
    GM_CAPTURE_INVALIDATED = 901,
    GM_ILLEGAL_STATE = 401,
};

/* A card's profile as Python hands it over (pytest_gpumem/devices/native.py mirrors this layout). */
typedef struct {
    char name[256];
    uint64_t total_memory;   /* bytes, as cudaDeviceProp.totalGlobalMem */
    uint64_t context_memory; /* bytes that the CUDA context takes of it */
    uint64_t l2_cache_size;
    uint64_t shared_memory_per_block;
    uint64_t shared_memory_per_block_optin;
    uint64_t shared_memory_per_sm;
    uint64_t reserved_shared_memory_per_block;
    int32_t major, minor;
    int32_t sm_count;
    int32_t memory_bus_width;
    int32_t max_threads_per_sm;
    int32_t max_blocks_per_sm;
    int32_t registers_per_sm;
    int32_t clock_rate_khz;
} gm_card;

/* A device's accounts, in bytes. */
typedef struct {
    uint64_t charged;      /* held from the device now, in units of 2 MiB */
    uint64_t peak_charged; /* the most since the last reset */
    uint64_t mallocs;      /* successful allocations from the device */
    uint64_t frees;
    uint64_t failures;     /* allocations refused for want of memory */
} gm_account;

/* state.c */
extern gm_card gm_profile;
bool gm_visible(void);
int gm_device_total(void);
int gm_visible_devices(void);
int gm_current_device(void);
void gm_set_current_device(int device);
int gm_unsupported(const char *function, int status);
/* Libraries whose sizes are not documented and not asked of them: a report says which ones a step used. */
enum { GM_RNN, GM_CTC, GM_CUFFT, GM_CUSOLVER, GM_CUSPARSE, GM_POOL, GM_CUDNN_PLAN, GM_BATCH_NORM, GM_GUESSED };
void gm_note_sizes(int library);
int gm_error(int status); /* keeps it for cudaGetLastError and returns it */
int gm_last_error(bool clear);
int gm_cuda_version(void);  /* 13020 for CUDA 13.2 */
int gm_cudnn_version(void); /* 92000 for cuDNN 9.20.0 */

/* memory.c */
int gm_malloc(void **address, size_t size);
int gm_malloc_on(int device, void **address, size_t size);
int gm_free(void *address);
int gm_charge(int device, uint64_t size);
void gm_discharge(int device, uint64_t size);
/* Which device an address belongs to; -1: host memory that is not pinned, -2: pinned host memory. */
enum { GM_PAGEABLE = -1, GM_PINNED = -2 };
int gm_owner(const void *address);
bool gm_range_of(const void *address, void **base, size_t *size);
uint64_t gm_free_memory(int device);

/* ranges.c: a sorted set of address ranges; looking one up takes O(log n). */
typedef struct {
    uintptr_t start, end;
    intptr_t tag;
    uint64_t extra;
} gm_range;
typedef struct {
    gm_range *items;
    size_t count, room;
} gm_ranges;
bool gm_ranges_add(gm_ranges *set, gm_range item);
gm_range *gm_ranges_find(const gm_ranges *set, uintptr_t address);
bool gm_ranges_overlap(const gm_ranges *set, uintptr_t start, uintptr_t end);
uintptr_t gm_ranges_end_of_overlap(const gm_ranges *set, uintptr_t start, uintptr_t end); /* 0: there is none */
void gm_ranges_remove(gm_ranges *set, gm_range *item);

/* pages.c */
typedef struct {
    uint32_t low, high, longest; /* the node's size less the free run there: 0, all is free */
} gm_node;
typedef struct {
    gm_node *nodes;  /* of a complete binary tree; node 1 is the root */
    uint32_t *owner; /* of each page: 1 + the first page of what was taken with it, 0: free */
    size_t count;
} gm_pages;
bool gm_pages_open(gm_pages *set, unsigned levels); /* 2^levels pages, all free */
int64_t gm_pages_take(gm_pages *set, uint64_t pages); /* the first page, or -1 */
int64_t gm_pages_owner(const gm_pages *set, size_t page); /* the first page of what it was taken with, or -1 */
uint64_t gm_pages_of(const gm_pages *set, size_t first); /* how many were taken there */
void gm_pages_give(gm_pages *set, size_t first);

/* device.c */
enum { GM_UUID_SIZE = 16 };
void gm_uuid(unsigned char *out, int device);
void gm_use_device(int device); /* it has a primary context from now on */
bool gm_device_used(int device);

/* kernels.c */
GM_API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                         size_t shared);

/* rnn.c: a cuDNN tensor's size in a dimension; 0 where it has not as many */
int gm_dnn_tensor_size(const void *descriptor, int dimension);

/* vmm.c: the device whose memory is mapped where the address lies; -1 where it was not reserved */
int gm_reserved_owner(uintptr_t address);

/* pools.c, ipc.c: the device that an address belongs to; -1: none */
int gm_pool_owner(uintptr_t address);
int gm_pool_free(void *address);
int gm_ipc_owner(uintptr_t address);

/* streams.c */
GM_API int cudaEventCreateWithFlags(void **out, unsigned flags);
GM_API int cudaEventRecord(void *handle, void *on);
GM_API int cudaStreamIsCapturing(void *stream, int *status);

/* launches.c */
void gm_count_launch(void);
uint64_t gm_launches(void);

/* dnn_graph.c: how many of cuDNN's plans this thread ran */
uint64_t gm_plans_run(void);

/* kept.c: bytes of device memory that are known */
enum { GM_MOST_KEPT = 64 << 10 }; /* bytes: larger copies are not kept */
void gm_keep(const void *address, const void *bytes, uint64_t size); /* they are written there */
void gm_forget(const void *address, uint64_t size);                  /* what is written there is not known */
void gm_forget_all(void);                                            /* what is written, and where, is not known */
bool gm_recall(const void *address, void *out, uint64_t size); /* false, and `out` spoiled: not all are known */

/* copies.c */
GM_API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, int kind, void *on);
void gm_note_readback(size_t size);
void gm_move(void *to, const void *from, size_t size); /* from device to device: with what is known of it */

#endif
