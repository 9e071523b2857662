/* Shared by the files of the CUDA runtime, and with the folders above them. */
#ifndef GPUMEM_RUNTIME_H
#define GPUMEM_RUNTIME_H

#include "base/base.h"

/* device.c */
void gm_use_device(int device); /* it has a primary context from now on */
bool gm_device_used(int device);

/* kernels.c */
GM_API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                         size_t shared);

/* launches.c */
void gm_count_launch(void);
typedef struct {
    unsigned x, y, z;
} gm_dim3;
int gm_launch_status(gm_dim3 grid, gm_dim3 block, size_t shared);
uint64_t gm_launches(void);
typedef struct {
    uint64_t graph, workspace; /* graph is 0 if no plan is selected by timing */
    uint64_t number;           /* of the plan among those that ran on this thread */
} gm_plan;
void gm_count_plan(uint64_t graph, uint64_t workspace); /* of cuDNN: plans launch kernels of their own */
gm_plan gm_last_plan(void); /* on this thread */

/* streams.c */
GM_API int cudaEventCreateWithFlags(void **out, unsigned flags);
GM_API int cudaEventRecord(void *handle, void *on);
GM_API int cudaStreamIsCapturing(void *stream, int *status);
void gm_await_stream(void *stream); /* the host waits for it */
/* Return an error, and invalidate captures, if a stream is being captured. */
int gm_status_of_device_end(int device);
int gm_status_of_unseen_call(void); /* of a call such as cudaMalloc */
void gm_add_work(void *stream); /* adds a node to the graph under capture, or counts queued work */

/* memory.c */
int gm_malloc(void **address, size_t size);
int gm_free_region(void *address);
bool gm_range_of(const void *address, void **base, size_t *size);

/* pools.c */
int gm_free_any(void *address); /* managed memory too */

/* graphs.c */
void *gm_graph_new(void); /* NULL: no memory */
/* Adds a node to a graph, after others, with a type of cudaGraphNodeType: 0 is a kernel; NULL: no memory. It lives as
 * long as the graph. */
void *gm_graph_add(void *graph, void *const *dependencies, size_t count, int type);
GM_API int cudaGraphDestroy(void *graph);

/* host_memory.c */
int gm_host_alloc(void **address, size_t size);
int gm_host_free(void *address);

/* managed.c: a device is an ordinal, or -1 for the host */
int gm_managed_malloc(void **address, size_t size, unsigned flags);
int gm_managed_free(void *address);
int gm_managed_prefetch(const void *address, size_t size, int device);
int gm_managed_advise(const void *address, size_t size, int advice, int device);
int gm_managed_device(const void *address);
int gm_location_device(uint64_t location);

/* copies.c */
GM_API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, int kind, void *on);
int gm_note_readback(size_t size); /* returns an error in a loop that would not end */
int gm_copy_any(void *to, const void *from, size_t size, void *stream); /* between any two kinds of memory */
void gm_set_elements(void *address, unsigned value, unsigned width, size_t count, void *stream);

#endif
