/* Streams, events, stream capture, copies and launches.
 *
 * Work is done the moment it is asked for, so every stream is always idle. What of streams matters to memory is
 * kept: which one a block belongs to (PyTorch's allocator does that), and which ones are being captured.
 */
#define _GNU_SOURCE
#include "gpumem.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct stream {
    int device, priority;
    unsigned flags;
    unsigned long long capture; /* 0: not being captured */
    struct graph *graph;
    bool origin; /* the capture began on this stream */
    struct stream *next, *previous;
} stream;

typedef struct graph {
    unsigned long long id;
} graph;

typedef struct {
    struct timespec time;
    bool recorded;
    unsigned long long capture;
    struct graph *graph;
} event;

typedef struct {
    unsigned x, y, z;
} dim3;

static stream null_streams[GM_MAX_DEVICES]; /* the default stream of each device */
static stream streams = {.next = &streams, .previous = &streams};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long long captures;

static atomic_ullong launches, readbacks, readback_bytes;

/* cudaStreamLegacy is 0x1 and cudaStreamPerThread 0x2. */
static stream *stream_of(void *handle) {
    if ((uintptr_t)handle <= 2) return &null_streams[gm_current_device()];
    return handle;
}

GM_API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    if (!gm_visible()) return gm_error(GM_NO_DEVICE);
    stream *s = calloc(1, sizeof *s);
    if (!s) return gm_error(GM_OUT_OF_MEMORY);
    s->device = gm_current_device();
    s->priority = priority;
    s->flags = flags;
    pthread_mutex_lock(&lock);
    s->next = streams.next;
    s->previous = &streams;
    streams.next->previous = s;
    streams.next = s;
    pthread_mutex_unlock(&lock);
    *out = s;
    return GM_SUCCESS;
}

GM_API int cudaStreamCreateWithFlags(void **out, unsigned flags) {
    return cudaStreamCreateWithPriority(out, flags, 0);
}

GM_API int cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }

GM_API int cudaStreamDestroy(void *handle) {
    if ((uintptr_t)handle <= 2) return gm_error(GM_INVALID_VALUE);
    stream *s = handle;
    pthread_mutex_lock(&lock);
    s->previous->next = s->next;
    s->next->previous = s->previous;
    pthread_mutex_unlock(&lock);
    free(s);
    return GM_SUCCESS;
}

GM_API int cudaStreamGetPriority(void *handle, int *priority) {
    *priority = stream_of(handle)->priority;
    return GM_SUCCESS;
}

GM_API int cudaStreamGetFlags(void *handle, unsigned *flags) {
    *flags = stream_of(handle)->flags;
    return GM_SUCCESS;
}

GM_API int cudaStreamQuery(void *handle) {
    return gm_error(stream_of(handle)->capture ? GM_STREAM_CAPTURE_UNSUPPORTED : GM_SUCCESS);
}

GM_API int cudaStreamSynchronize(void *handle) {
    return gm_error(stream_of(handle)->capture ? GM_STREAM_CAPTURE_UNSUPPORTED : GM_SUCCESS);
}

/* ---- events ---- */

GM_API int cudaEventCreateWithFlags(void **out, unsigned flags) {
    (void)flags;
    event *e = calloc(1, sizeof *e);
    if (!e) return gm_error(GM_OUT_OF_MEMORY);
    *out = e;
    return GM_SUCCESS;
}

GM_API int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }

GM_API int cudaEventDestroy(void *handle) {
    free(handle);
    return GM_SUCCESS;
}

GM_API int cudaEventRecordWithFlags(void *handle, void *on, unsigned flags) {
    (void)flags;
    event *e = handle;
    stream *s = stream_of(on);
    clock_gettime(CLOCK_MONOTONIC, &e->time);
    e->recorded = true;
    e->capture = s->capture;
    e->graph = s->graph;
    return GM_SUCCESS;
}

GM_API int cudaEventRecord(void *handle, void *on) { return cudaEventRecordWithFlags(handle, on, 0); }

GM_API int cudaEventQuery(void *handle) {
    return gm_error(((event *)handle)->capture ? GM_STREAM_CAPTURE_UNSUPPORTED : GM_SUCCESS);
}

GM_API int cudaEventSynchronize(void *handle) {
    return gm_error(((event *)handle)->capture ? GM_STREAM_CAPTURE_UNSUPPORTED : GM_SUCCESS);
}

GM_API int cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
    event *a = from, *b = to;
    if (!a->recorded || !b->recorded) return gm_error(GM_INVALID_VALUE);
    *milliseconds = (float)((double)(b->time.tv_sec - a->time.tv_sec) * 1e3 +
                            (double)(b->time.tv_nsec - a->time.tv_nsec) / 1e6);
    return GM_SUCCESS;
}

GM_API int cudaEventElapsedTime_v2(float *milliseconds, void *from, void *to) {
    return cudaEventElapsedTime(milliseconds, from, to);
}

/* A stream that waits for an event of a capturing stream joins its capture. */
GM_API int cudaStreamWaitEvent(void *handle, void *awaited, unsigned flags) {
    (void)flags;
    event *e = awaited;
    stream *s = stream_of(handle);
    if (e->capture && !s->capture) {
        s->capture = e->capture;
        s->graph = e->graph;
    }
    return GM_SUCCESS;
}

/* ---- stream capture ---- */

enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1 };

GM_API int cudaStreamBeginCapture(void *handle, int mode) {
    (void)mode;
    if ((uintptr_t)handle <= 1) return gm_error(GM_STREAM_CAPTURE_UNSUPPORTED); /* the legacy stream */
    stream *s = stream_of(handle);
    if (s->capture) return gm_error(GM_ILLEGAL_STATE);
    graph *g = calloc(1, sizeof *g);
    if (!g) return gm_error(GM_OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    g->id = s->capture = ++captures;
    pthread_mutex_unlock(&lock);
    s->graph = g;
    s->origin = true;
    return GM_SUCCESS;
}

static void leave_capture(stream *s, unsigned long long id) {
    if (s->capture != id) return;
    s->capture = 0;
    s->graph = NULL;
    s->origin = false;
}

GM_API int cudaStreamEndCapture(void *handle, void **out) {
    stream *s = stream_of(handle);
    if (!s->capture || !s->origin) return gm_error(GM_ILLEGAL_STATE);
    unsigned long long id = s->capture;
    *out = s->graph;
    pthread_mutex_lock(&lock);
    for (stream *other = streams.next; other != &streams; other = other->next) leave_capture(other, id);
    for (int i = 0; i < GM_MAX_DEVICES; i++) leave_capture(&null_streams[i], id);
    pthread_mutex_unlock(&lock);
    return GM_SUCCESS;
}

GM_API int cudaStreamIsCapturing(void *handle, int *status) {
    *status = stream_of(handle)->capture ? CAPTURE_ACTIVE : CAPTURE_NONE;
    return GM_SUCCESS;
}

static void capture_info(void *handle, int *status, unsigned long long *id, void **graph_out,
                         const void **dependencies, size_t *count) {
    stream *s = stream_of(handle);
    *status = s->capture ? CAPTURE_ACTIVE : CAPTURE_NONE;
    if (id) *id = s->capture;
    if (graph_out) *graph_out = s->graph;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
}

/* CUDA 12 */
GM_API int cudaStreamGetCaptureInfo_v2(void *handle, int *status, unsigned long long *id, void **graph_out,
                                       const void **dependencies, size_t *count) {
    capture_info(handle, status, id, graph_out, dependencies, count);
    return GM_SUCCESS;
}

/* CUDA 13 */
GM_API int cudaStreamGetCaptureInfo(void *handle, int *status, unsigned long long *id, void **graph_out,
                                    const void **dependencies, const void **edges, size_t *count) {
    if (edges) *edges = NULL;
    capture_info(handle, status, id, graph_out, dependencies, count);
    return GM_SUCCESS;
}

GM_API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    static _Thread_local int current;
    int before = current;
    current = *mode;
    *mode = before;
    return GM_SUCCESS;
}

GM_API int cudaGraphInstantiate(void **out, void *source, unsigned long long flags) {
    (void)flags;
    graph *copy = malloc(sizeof *copy);
    if (!copy) return gm_error(GM_OUT_OF_MEMORY);
    *copy = *(graph *)source;
    *out = copy;
    return GM_SUCCESS;
}

GM_API int cudaGraphInstantiateWithFlags(void **out, void *source, unsigned long long flags) {
    return cudaGraphInstantiate(out, source, flags);
}

GM_API int cudaGraphDestroy(void *handle) {
    free(handle);
    return GM_SUCCESS;
}

GM_API int cudaGraphExecDestroy(void *handle) {
    free(handle);
    return GM_SUCCESS;
}

GM_API int cudaGraphLaunch(void *handle, void *on) {
    (void)handle;
    (void)on;
    gm_count_launch();
    return gm_error(gm_visible() ? GM_SUCCESS : GM_NO_DEVICE);
}

GM_API int cudaGraphGetNodes(void *handle, void **nodes, size_t *count) {
    (void)handle;
    (void)nodes;
    *count = 1; /* PyTorch warns of an empty graph; what a graph does is not recorded here */
    return GM_SUCCESS;
}

/* ---- copies: into host memory come zeros, since nothing was computed ---- */

void gm_note_readback(size_t size) {
    atomic_fetch_add_explicit(&readbacks, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&readback_bytes, size, memory_order_relaxed);
}

static int copy(void *to, const void *from, size_t size) {
    if (size == 0) return GM_SUCCESS;
    if (!to || !from) return GM_INVALID_VALUE;
    if (gm_owner(to) >= 0) return GM_SUCCESS;
    if (gm_owner(from) >= 0) {
        memset(to, 0, size);
        gm_note_readback(size);
    } else {
        memmove(to, from, size);
    }
    return GM_SUCCESS;
}

GM_API int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    (void)kind;
    return gm_error(copy(to, from, size));
}

GM_API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *on) {
    (void)kind;
    (void)on;
    return gm_error(copy(to, from, size));
}

GM_API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, int kind, void *on) {
    (void)kind;
    (void)on;
    for (size_t row = 0; row < height; row++) {
        int status = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
        if (status) return gm_error(status);
    }
    return GM_SUCCESS;
}

GM_API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *on) {
    (void)to_device;
    (void)from_device;
    (void)on;
    return gm_error(copy(to, from, size));
}

GM_API int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) {
    (void)symbol;
    (void)from;
    (void)size;
    (void)offset;
    (void)kind;
    return GM_SUCCESS;
}

GM_API int cudaMemset(void *address, int value, size_t size) {
    if (size && gm_owner(address) < 0) memset(address, value, size);
    return GM_SUCCESS;
}

GM_API int cudaMemsetAsync(void *address, int value, size_t size, void *on) {
    (void)on;
    return cudaMemset(address, value, size);
}

typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
} pointer_attributes; /* CUDA 13 has reserved words behind these, CUDA 12 has not */

enum { MEMORY_UNREGISTERED = 0, MEMORY_HOST = 1, MEMORY_DEVICE = 2 };

GM_API int cudaPointerGetAttributes(pointer_attributes *out, const void *pointer) {
    int owner = gm_owner(pointer);
    out->type = owner >= 0 ? MEMORY_DEVICE : owner == GM_PINNED ? MEMORY_HOST : MEMORY_UNREGISTERED;
    out->device = owner >= 0 ? owner : owner == GM_PINNED ? gm_current_device() : -2;
    out->device_pointer = owner == GM_PAGEABLE ? NULL : (void *)(uintptr_t)pointer;
    out->host_pointer = owner >= 0 ? NULL : (void *)(uintptr_t)pointer;
    return GM_SUCCESS;
}

/* ---- launches ---- */

void gm_count_launch(void) { atomic_fetch_add_explicit(&launches, 1, memory_order_relaxed); }

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

/* What nvcc's output calls when a library with kernels is loaded and when it launches one. */
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

/* ---- what Python calls ---- */

GM_API void gpumem_counters(uint64_t *out) {
    out[0] = atomic_load(&launches);
    out[1] = atomic_load(&readbacks);
    out[2] = atomic_load(&readback_bytes);
}
