/* Streams, events and stream capture.
 *
 * Work is done as soon as it is submitted, so every stream is always idle. Only the parts that affect memory are tracked:
 * the stream that a block belongs to (by PyTorch's allocator), the streams being captured, and how long a GPU may take
 * for their work (stream_order.c). */
#define _GNU_SOURCE
#include "runtime/runtime.h"
#include "runtime/stream_order.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The nodes of a graph under capture after which the next one is added. */
typedef struct {
    void **nodes;
    size_t count;
} node_list;

typedef struct stream {
    int device, priority;
    unsigned flags;
    /* atomic: ending a capture reads every thread's streams */
    atomic_ullong capture; /* 0: not being captured */
    void *_Atomic graph;
    node_list last; /* changed under the lock */
    atomic_bool origin;  /* the capture began on this stream */
    int mode;            /* of the capture that began here; changed under the lock, like `thread` */
    unsigned long long thread; /* the thread that began it */
    atomic_bool invalid; /* the capture has no result: an operation was submitted that a graph cannot contain */
    gm_stream_order order;
    struct stream *next, *previous;
} stream;

typedef struct {
    int device; /* the device on which it was created, and must be recorded */
    struct timespec time;
    bool recorded;
    unsigned long long capture;
    void *graph;
    node_list last;
    gm_plan plan;      /* the last plan until then, on this thread */
    uint64_t launches; /* launches until then */
    gm_event_order order;
} event;

static stream null_streams[GM_MAX_DEVICES]; /* the default stream of each device */
static stream streams = {.next = &streams, .previous = &streams};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long long captures;

static int device_of(const stream *s) {
    bool is_null = s >= null_streams && s < null_streams + GM_MAX_DEVICES;
    return is_null ? (int)(s - null_streams) : s->device;
}

/* cudaStreamLegacy is 0x1 and cudaStreamPerThread 0x2. */
static stream *stream_of(void *handle) {
    if ((uintptr_t)handle <= 2) return &null_streams[gm_current_device()];
    return handle;
}

/* ---- the nodes of captured graphs; the lock is held ---- */

static bool set_list(node_list *list, void *const *nodes, size_t count) {
    if (!count) {
        list->count = 0;
        return true;
    }
    void **copy = realloc(list->nodes, count * sizeof *copy);
    if (!copy) return false;
    if (nodes != copy) memmove(copy, nodes, count * sizeof *copy);
    *list = (node_list){copy, count};
    return true;
}

static bool add_to_list(node_list *list, void *node) {
    for (size_t i = 0; i < list->count; i++)
        if (list->nodes[i] == node) return true;
    void **nodes = realloc(list->nodes, (list->count + 1) * sizeof *nodes);
    if (!nodes) return false;
    nodes[list->count] = node;
    *list = (node_list){nodes, list->count + 1};
    return true;
}

/* A stream passed to a library earlier may have been destroyed since; the lock is held. */
static bool exists(const stream *s) {
    if (s >= null_streams && s < null_streams + GM_MAX_DEVICES) return true;
    for (const stream *member = streams.next; member != &streams; member = member->next)
        if (member == s) return true;
    return false;
}

enum { KERNEL_NODE = 0, WAIT_NODE = 6, RECORD_NODE = 7 }; /* cudaGraphNodeType */

/* Adds the stream's next node to the graph under capture; the lock is held. */
static bool append_node(stream *s, int type) {
    void *node = gm_graph_add(s->graph, s->last.nodes, s->last.count, type);
    return node && set_list(&s->last, &node, 1);
}

void gm_add_work(void *handle) {
    if (!gm_order_matters() && !gm_any_capture()) return; /* otherwise work costs nothing */
    stream *s = stream_of(handle);
    pthread_mutex_lock(&lock);
    bool is_there = exists(s);
    if (is_there && s->capture) append_node(s, KERNEL_NODE);
    else if (is_there) gm_order_queued(&s->order, device_of(s));
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void watch_work(void) { gm_on_work(gm_add_work); }

GM_API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    if (!gm_visible()) return gm_error(GM_NO_DEVICE);
    stream *s = calloc(1, sizeof *s);
    if (!s) return gm_error(GM_OUT_OF_MEMORY);
    s->device = gm_current_device();
    gm_use_device(s->device);
    s->priority = priority;
    s->flags = flags;
    gm_order_created(&s->order);
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
    free(s->last.nodes);
    free(s->order.over.events);
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

/* ---- calls that are prohibited during capture; they invalidate captures (CUDA Programming Guide, "Prohibited and
 * Unhandled Operations") ---- */

/* Returns the next of all streams, or NULL; the first one follows NULL. The lock is held. */
static stream *next_stream(stream *s) {
    bool is_null = !s || (s >= null_streams && s < null_streams + GM_MAX_DEVICES);
    stream *next = !s ? null_streams : is_null ? s + 1 : s->next;
    if (is_null && next == null_streams + GM_MAX_DEVICES) next = streams.next;
    return next == &streams ? NULL : next;
}

/* The lock is held. */
static bool any_invalid(unsigned long long id) {
    for (stream *member = next_stream(NULL); member; member = next_stream(member))
        if (member->capture == id && member->invalid) return true;
    return false;
}

/* The lock is held. */
static void invalidate(unsigned long long id) {
    for (stream *member = next_stream(NULL); member; member = next_stream(member))
        if (member->capture == id) member->invalid = true;
}

/* Returns the status of waiting for a stream: prohibited while it is captured. */
static int status_of_end(const stream *s) {
    unsigned long long id = s->capture;
    if (!id) return GM_SUCCESS;
    if (s->invalid) return GM_CAPTURE_INVALIDATED;
    pthread_mutex_lock(&lock);
    invalidate(id);
    pthread_mutex_unlock(&lock);
    return GM_STREAM_CAPTURE_UNSUPPORTED;
}

/* Returns the status of waiting for all streams of a device: prohibited in any mode while one is captured. */
int gm_status_of_device_end(int device) {
    int status = GM_SUCCESS;
    if (!gm_any_capture()) return status;
    pthread_mutex_lock(&lock);
    for (stream *s = next_stream(NULL); s; s = next_stream(s)) {
        if (!s->capture || device_of(s) != device) continue;
        if (!s->invalid) invalidate(s->capture);
        status = GM_STREAM_CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* Returns the status of querying or awaiting an event: prohibited once a capture has recorded it. */
static int status_of_event(const event *e) {
    if (!e->capture) return GM_SUCCESS;
    pthread_mutex_lock(&lock);
    invalidate(e->capture);
    pthread_mutex_unlock(&lock);
    return GM_CAPTURED_EVENT;
}

enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 }; /* cudaStreamCaptureMode */

static _Thread_local int thread_mode;

/* Returns this thread's number. */
static unsigned long long this_thread(void) {
    static atomic_ullong threads;
    static _Thread_local unsigned long long number;
    if (!number) number = atomic_fetch_add(&threads, 1) + 1;
    return number;
}

/* Returns the status of a call that a capture does not record, such as cudaMalloc (CUDA Runtime API,
 * "cudaThreadExchangeStreamCaptureMode"). */
int gm_status_of_unseen_call(void) {
    int status = GM_SUCCESS;
    if (!gm_any_capture() || thread_mode == MODE_RELAXED) return status;
    pthread_mutex_lock(&lock);
    for (stream *s = next_stream(NULL); s; s = next_stream(s)) {
        if (!s->capture || !s->origin || s->mode == MODE_RELAXED) continue;
        if (s->thread != this_thread() && (thread_mode != MODE_GLOBAL || s->mode != MODE_GLOBAL)) continue;
        invalidate(s->capture);
        status = GM_STREAM_CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

GM_API int cudaStreamQuery(void *handle) { return gm_error(status_of_end(stream_of(handle))); }

GM_API int cudaStreamSynchronize(void *handle) {
    gm_count_wait();
    gm_await_stream(handle);
    return gm_error(status_of_end(stream_of(handle)));
}

GM_API int cudaDeviceSynchronize(void) {
    int status = gm_status_of_device_end(gm_current_device());
    if (status) return gm_error(status);
    gm_count_wait();
    gm_order_host_waits_for_device(gm_current_device());
    if (gm_visible()) gm_use_device(gm_current_device());
    return GM_SUCCESS;
}

void gm_await_stream(void *handle) { gm_order_host_waits_for_stream(&stream_of(handle)->order); }

/* ---- events ---- */

GM_API int cudaEventCreateWithFlags(void **out, unsigned flags) {
    event *e = calloc(1, sizeof *e);
    if (!e) return gm_error(GM_OUT_OF_MEMORY);
    e->device = gm_current_device();
    if (gm_visible()) gm_use_device(e->device);
    *out = e;
    return GM_SUCCESS;
}

GM_API int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }

GM_API int cudaEventDestroy(void *handle) {
    event *e = handle;
    if (e) {
        free(e->last.nodes);
        free(e->order.over.events);
    }
    free(e);
    return GM_SUCCESS;
}

/* An external event is recorded at once, and adds a node to the graph under capture: launching the graph takes no time. */
static int record_event(event *e, stream *s, bool external, const void *caller) {
    clock_gettime(CLOCK_MONOTONIC, &e->time);
    e->recorded = true;
    e->plan = gm_last_plan();
    e->launches = gm_launches();
    e->capture = external ? 0 : s->capture;
    e->graph = s->graph;
    if (!e->capture) {
        gm_order_recorded(&e->order, &s->order, e->device, caller);
        return GM_SUCCESS;
    }
    pthread_mutex_lock(&lock);
    bool ok = set_list(&e->last, s->last.nodes, s->last.count);
    pthread_mutex_unlock(&lock);
    return ok ? GM_SUCCESS : GM_OUT_OF_MEMORY;
}

/* ---- events that are external to a graph ---- */

enum { EXTERNAL = 1 }; /* cudaEventRecordExternal, cudaEventWaitExternal */

static int add_external(stream *s, int type) {
    pthread_mutex_lock(&lock);
    bool ok = s->capture && append_node(s, type);
    pthread_mutex_unlock(&lock);
    return ok ? GM_SUCCESS : GM_INVALID_VALUE;
}

static int record_with(void *handle, void *on, unsigned flags, const void *caller) {
    event *e = handle;
    stream *s = stream_of(on);
    if (!gm_inside_cudnn() && e->device != device_of(s)) return gm_error(GM_INVALID_HANDLE);
    int status = !flags ? GM_SUCCESS : flags == EXTERNAL ? add_external(s, RECORD_NODE) : GM_INVALID_VALUE;
    return gm_error(status ? status : record_event(e, s, flags, caller));
}

GM_API int cudaEventRecordWithFlags(void *handle, void *on, unsigned flags) {
    return record_with(handle, on, flags, __builtin_return_address(0));
}

GM_API int cudaEventRecord(void *handle, void *on) { return record_with(handle, on, 0, __builtin_return_address(0)); }

GM_API int cudaEventQuery(void *handle) {
    gm_order_asked(&((event *)handle)->order, __builtin_return_address(0));
    return gm_error(status_of_event(handle));
}

GM_API int cudaEventSynchronize(void *handle) {
    gm_count_wait();
    gm_order_host_waits(&((event *)handle)->order, __builtin_return_address(0));
    return gm_error(status_of_event(handle));
}

GM_API int cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
    event *a = from, *b = to;
    if (a->device != b->device) return gm_error(GM_INVALID_HANDLE);
    if (!a->recorded || !b->recorded) return gm_error(GM_INVALID_VALUE);
    if (b->plan.number == a->plan.number + 1 && b->launches == a->launches) {
        /* cuDNN's fastest plan must not depend on chance */
        *milliseconds = b->plan.graph ? gm_plan_milliseconds(b->plan.graph, b->plan.workspace) : 1;
        return GM_SUCCESS;
    }
    *milliseconds = (float)((double)(b->time.tv_sec - a->time.tv_sec) * 1e3 +
                            (double)(b->time.tv_nsec - a->time.tv_nsec) / 1e6);
    return GM_SUCCESS;
}

GM_SAME(cudaEventElapsedTime_v2, cudaEventElapsedTime);

/* A stream that waits for an event of a capturing stream joins its capture. */
GM_API int cudaStreamWaitEvent(void *handle, void *awaited, unsigned flags) {
    event *e = awaited;
    stream *s = stream_of(handle);
    if (flags) return gm_error(flags == EXTERNAL ? add_external(s, WAIT_NODE) : GM_INVALID_VALUE);
    if (e->capture && !s->capture) {
        pthread_mutex_lock(&lock);
        s->invalid = any_invalid(e->capture);
        s->graph = e->graph;
        s->capture = e->capture;
        pthread_mutex_unlock(&lock);
    }
    if (!e->capture && !s->capture) gm_order_waits(&s->order, &e->order);
    if (!e->capture || e->capture != s->capture) return GM_SUCCESS;
    bool ok = true;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < e->last.count && ok; i++) ok = add_to_list(&s->last, e->last.nodes[i]);
    pthread_mutex_unlock(&lock);
    return gm_error(ok ? GM_SUCCESS : GM_OUT_OF_MEMORY);
}

/* ---- stream capture ---- */

enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 }; /* cudaStreamCaptureStatus */

static int capture_status(const stream *s) {
    return !s->capture ? CAPTURE_NONE : s->invalid ? CAPTURE_INVALIDATED : CAPTURE_ACTIVE;
}

GM_API int cudaStreamBeginCapture(void *handle, int mode) {
    if (mode < MODE_GLOBAL || mode > MODE_RELAXED) return gm_error(GM_INVALID_VALUE);
    if ((uintptr_t)handle <= 1) return gm_error(GM_STREAM_CAPTURE_UNSUPPORTED); /* the legacy stream */
    stream *s = stream_of(handle);
    if (s->capture) return gm_error(GM_ILLEGAL_STATE);
    void *g = gm_graph_new();
    if (!g) return gm_error(GM_OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    s->graph = g;
    s->origin = true;
    s->mode = mode;
    s->thread = this_thread();
    s->capture = ++captures;
    gm_count_captures(1);
    pthread_mutex_unlock(&lock);
    return GM_SUCCESS;
}

static void leave_capture(stream *s, unsigned long long id) {
    if (s->capture != id) return;
    s->capture = 0;
    s->graph = NULL;
    s->last.count = 0;
    s->origin = s->invalid = false;
}

GM_API int cudaStreamEndCapture(void *handle, void **out) {
    stream *s = stream_of(handle);
    if (!s->capture) return gm_error(GM_ILLEGAL_STATE);
    if (!s->origin) return gm_error(GM_CAPTURE_UNMATCHED);
    if (s->mode != MODE_RELAXED && s->thread != this_thread()) return gm_error(GM_CAPTURE_WRONG_THREAD);
    unsigned long long id = s->capture;
    bool invalid = s->invalid;
    void *g = s->graph;
    pthread_mutex_lock(&lock);
    for (stream *member = next_stream(NULL); member; member = next_stream(member)) leave_capture(member, id);
    gm_count_captures(-1);
    pthread_mutex_unlock(&lock);
    if (invalid) cudaGraphDestroy(g);
    *out = invalid ? NULL : g;
    return gm_error(invalid ? GM_CAPTURE_INVALIDATED : GM_SUCCESS);
}

GM_API int cudaStreamIsCapturing(void *handle, int *status) {
    *status = capture_status(stream_of(handle));
    return GM_SUCCESS;
}

/* CUDA 12 */
GM_API int cudaStreamGetCaptureInfo_v2(void *handle, int *status, unsigned long long *id, void **graph_out,
                                       const void **dependencies, size_t *count) {
    const stream *s = stream_of(handle);
    *status = capture_status(s);
    if (id) *id = s->capture;
    if (graph_out) *graph_out = s->graph;
    if (dependencies) *dependencies = s->last.nodes;
    if (count) *count = s->last.count;
    return GM_SUCCESS;
}

GM_API int cudaStreamGetCaptureInfo_v3(void *handle, int *status, unsigned long long *id, void **graph_out,
                                       const void **dependencies, const void **edges, size_t *count) {
    if (edges) *edges = NULL;
    return cudaStreamGetCaptureInfo_v2(handle, status, id, graph_out, dependencies, count);
}

/* CUDA 13 */
GM_SAME(cudaStreamGetCaptureInfo, cudaStreamGetCaptureInfo_v3);

/* Sets the nodes after which the next one is added (1), or adds to them (0). */
static int update_dependencies(void *handle, void *const *nodes, size_t count, unsigned flags) {
    stream *s = stream_of(handle);
    if (!s->capture) return GM_ILLEGAL_STATE;
    if (flags > 1 || (count && !nodes)) return GM_INVALID_VALUE;
    node_list given = {NULL, 0}; /* a copy: a program may pass the list that it received */
    bool ok = set_list(&given, nodes, count);
    pthread_mutex_lock(&lock);
    if (flags && ok) s->last.count = 0;
    for (size_t i = 0; i < given.count && ok; i++) ok = add_to_list(&s->last, given.nodes[i]);
    pthread_mutex_unlock(&lock);
    free(given.nodes);
    return ok ? GM_SUCCESS : GM_OUT_OF_MEMORY;
}

/* CUDA 13 takes the edges' data after the nodes; CUDA 12 has a second function for that. */
GM_API int cudaStreamUpdateCaptureDependencies(void *handle, void *const *nodes, uintptr_t data_or_count,
                                               size_t count_or_flags, unsigned flags) {
    if (gm_cuda_version() < 13000)
        return gm_error(update_dependencies(handle, nodes, data_or_count, (unsigned)count_or_flags));
    return gm_error(update_dependencies(handle, nodes, count_or_flags, flags));
}

GM_API int cudaStreamUpdateCaptureDependencies_v2(void *handle, void *const *nodes, const void *data, size_t count,
                                                  unsigned flags) {
    return gm_error(update_dependencies(handle, nodes, count, flags));
}

GM_API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    if (!mode || *mode < MODE_GLOBAL || *mode > MODE_RELAXED) return gm_error(GM_INVALID_VALUE);
    int previous_mode = thread_mode;
    thread_mode = *mode;
    *mode = previous_mode;
    return GM_SUCCESS;
}
