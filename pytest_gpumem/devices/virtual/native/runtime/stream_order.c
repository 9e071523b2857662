/* The order of work on streams: what the host can know of it.
 *
 * Here all work is done as soon as it is submitted. A GPU may do it any time later, up to the moment at which the host
 * waits for it. PyTorch's allocator keeps a block that another stream uses (record_stream) until an event on that
 * stream has completed, which it queries (cudaEventQuery) at each allocation. If the host has not waited for the event
 * by then, directly or through another stream that waits for this one, a GPU may return "not ready". All answers to
 * these queries are recorded, with the time at which the host has waited. If a run's requests are replayed with its
 * blocks kept until then, the result is the largest peak that a GPU can have
 * (pytest_gpumem/replay/allocator_replay.py).
 *
 * Each stream counts the events that are recorded after new work on it. For each other stream, it stores how many of
 * that stream's events have completed before its own next work (a vector clock). Once an event has completed, so has
 * all work before it. Streams that wait for each other without an event (the legacy stream and streams that block with
 * it) are treated as independent, which can only make the largest peak too large.
 */
#define _GNU_SOURCE
#include "runtime/stream_order.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_STREAMS = 4096 };    /* later ones share the last number */
enum { MAX_ANSWERS = 1 << 20 }; /* per run */
enum { MAX_PINNED = 64 };

typedef struct {
    uint64_t recorded, answered, awaited; /* nanoseconds since 1970; awaited is 0: never in this run */
    uint64_t device;
} answer;

typedef struct {
    uint64_t stream, event;
} place;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t recorded_events[MAX_STREAMS]; /* on each stream */
static int devices[MAX_STREAMS];
static size_t stream_count;
static uint64_t device_waits[GM_MAX_DEVICES]; /* how often the host has waited for each device */
static gm_clock host; /* of each stream, the events that the host has waited for */

static answer *answers;
static gm_clock *behind; /* for each answer: the events that precede its event; freed once the host has waited */
static size_t answer_count, answer_room, behind_room, first_open; /* those before first_open are awaited */
static uint64_t early_count;                          /* of the answers: before the host has waited */
static place pinned[MAX_PINNED]; /* events of pinned blocks that were free again before the host has waited */
static atomic_size_t pinned_count;
static uint64_t early_pinned; /* how often another pinned block was used meanwhile */
static bool answers_are_lost;

/* ---- clocks; the lock is held ---- */

static bool reach(gm_clock *clock, size_t count) {
    if (clock->count >= count) return true;
    uint64_t *larger = realloc(clock->events, count * sizeof *larger);
    if (!larger) return false;
    memset(larger + clock->count, 0, (count - clock->count) * sizeof *larger);
    *clock = (gm_clock){larger, count};
    return true;
}

static void advance(gm_clock *clock, size_t stream, uint64_t event) {
    if (reach(clock, stream + 1) && clock->events[stream] < event) clock->events[stream] = event;
}

static void join(gm_clock *clock, const gm_clock *other) {
    if (!reach(clock, other->count)) return;
    for (size_t i = 0; i < other->count; i++)
        if (clock->events[i] < other->events[i]) clock->events[i] = other->events[i];
}

static bool awaited(size_t stream, uint64_t event) {
    return !event || (stream < host.count && host.events[stream] >= event);
}

static bool all_awaited(const gm_clock *clock) {
    for (size_t i = 0; i < clock->count; i++)
        if (!awaited(i, clock->events[i])) return false;
    return true;
}

static void close_answers(void) {
    uint64_t time = 0;
    for (size_t i = first_open; i < answer_count; i++) {
        if (answers[i].awaited || !all_awaited(&behind[i])) continue;
        if (!time) time = gm_now();
        answers[i].awaited = time;
        free(behind[i].events);
    }
    while (first_open < answer_count && answers[first_open].awaited) first_open++;
}

/* A stream's number, which it gets at its first event. */
static size_t number_of(gm_stream_order *stream, int device) {
    if (!stream->number) {
        if (stream_count < MAX_STREAMS) stream_count++;
        stream->number = stream_count;
        devices[stream_count - 1] = device;
    }
    return stream->number - 1;
}

/* ---- the callers ---- */

enum { OTHER, ALLOCATOR, PINNED_ALLOCATOR };

/* In libc10_cuda.so only the caching allocator queries events or waits for them. In libtorch_cuda.so the allocator of
 * pinned memory does, and torch.distributed's watchdog of NCCL, a thread that records no events. */
static int kind_of(const void *caller) {
    static const void *_Atomic known[3];
    for (int kind = 0; kind < 3; kind++)
        if (caller == atomic_load_explicit(&known[kind], memory_order_relaxed)) return kind;
    Dl_info library;
    const char *path = dladdr(caller, &library) && library.dli_fname ? library.dli_fname : "";
    int kind = strstr(path, "libc10_cuda.so") ? ALLOCATOR : strstr(path, "libtorch_cuda.so") ? PINNED_ALLOCATOR : OTHER;
    atomic_store_explicit(&known[kind], caller, memory_order_relaxed);
    return kind;
}

/* Called with the lock held when a pinned block is freed that a stream has used. */
static void note_pinned_use(void) {
    size_t count = pinned_count < MAX_PINNED ? pinned_count : MAX_PINNED;
    bool early = false;
    for (size_t i = 0; i < count; i++) early |= !awaited(pinned[i].stream, pinned[i].event);
    early_pinned += early;
    if (!early) pinned_count = 0;
}

/* ---- what streams and events do ---- */

static atomic_bool any_created;

void gm_order_created(gm_stream_order *stream) {
    stream->counted = true;
    any_created = true;
}

bool gm_order_matters(void) { return atomic_load_explicit(&any_created, memory_order_relaxed); }

void gm_order_queued(gm_stream_order *stream, int device) {
    pthread_mutex_lock(&lock);
    stream->device_waits = device_waits[device];
    stream->queued++;
    pthread_mutex_unlock(&lock);
}

void gm_order_recorded(gm_event_order *event, gm_stream_order *stream, int device, const void *caller) {
    bool of_pinned = pinned_count && kind_of(caller) == PINNED_ALLOCATOR; /* looked up without the lock */
    pthread_mutex_lock(&lock);
    if (of_pinned) note_pinned_use();
    size_t number = number_of(stream, device);
    bool is_first = !recorded_events[number] && !stream->counted;
    bool has_work = stream->queued != stream->queued_before && stream->device_waits == device_waits[device];
    if (is_first || has_work) recorded_events[number]++;
    stream->queued_before = stream->queued; /* without new work before it, it completes with the last one */
    advance(&stream->over, number, recorded_events[number]);
    event->stream = number + 1;
    event->number = recorded_events[number];
    event->device = device;
    event->time = gm_now();
    event->thread = pthread_self();
    if (event->over.count) memset(event->over.events, 0, event->over.count * sizeof *event->over.events);
    join(&event->over, &stream->over);
    pthread_mutex_unlock(&lock);
}

void gm_order_waits(gm_stream_order *stream, const gm_event_order *event) {
    if (!event->stream) return;
    pthread_mutex_lock(&lock);
    join(&stream->over, &event->over);
    pthread_mutex_unlock(&lock);
}

void gm_order_host_waits_for_stream(gm_stream_order *stream) {
    pthread_mutex_lock(&lock);
    join(&host, &stream->over);
    stream->queued_before = stream->queued;
    close_answers();
    pthread_mutex_unlock(&lock);
}

void gm_order_host_waits_for_device(int device) {
    pthread_mutex_lock(&lock);
    device_waits[device]++;
    for (size_t i = 0; i < stream_count; i++)
        if (devices[i] == device) advance(&host, i, recorded_events[i]);
    close_answers();
    pthread_mutex_unlock(&lock);
}

/* ---- queries of PyTorch's allocators ---- */

static bool make_room(void) {
    return answer_count < MAX_ANSWERS && gm_grow(&answers, &answer_room, answer_count, sizeof *answers) &&
           gm_grow(&behind, &behind_room, answer_count, sizeof *behind);
}

/* The lock is held. */
static void add_answer(const gm_event_order *event) {
    if (!make_room()) {
        answers_are_lost = true;
        return;
    }
    bool early = !all_awaited(&event->over);
    gm_clock open = {0};
    if (early) join(&open, &event->over);
    uint64_t time = gm_now();
    answers[answer_count] = (answer){event->time, time, early ? 0 : time, (uint64_t)event->device};
    behind[answer_count++] = open;
    early_count += early;
}

void gm_order_asked(const gm_event_order *event, const void *caller) {
    int kind = event->stream ? kind_of(caller) : OTHER;
    if (kind == OTHER) return;
    pthread_mutex_lock(&lock);
    if (kind == ALLOCATOR) add_answer(event);
    else if (!awaited(event->stream - 1, event->number) && pthread_equal(event->thread, pthread_self()))
        pinned[pinned_count++ % MAX_PINNED] = (place){event->stream - 1, event->number};
    pthread_mutex_unlock(&lock);
}

void gm_order_host_waits(const gm_event_order *event, const void *caller) {
    if (!event->stream) return;
    int kind = kind_of(caller);
    pthread_mutex_lock(&lock);
    join(&host, &event->over);
    close_answers();
    if (kind == ALLOCATOR) add_answer(event); /* the allocator waits before it empties its cache */
    pthread_mutex_unlock(&lock);
}

/* ---- functions that Python calls ---- */

/* Returns how often a GPU might have returned "not ready": to the caching allocator, and to that of pinned memory. */
GM_API void gpumem_early_answers(uint64_t out[2]) {
    pthread_mutex_lock(&lock);
    out[0] = early_count;
    out[1] = early_pinned;
    pthread_mutex_unlock(&lock);
}

/* Copies the answers in their order, as many as there is room for; returns how many there are, or UINT64_MAX if some
 * are lost. */
GM_API uint64_t gpumem_allocator_events(answer *out, uint64_t room) {
    pthread_mutex_lock(&lock);
    uint64_t count = answers_are_lost ? UINT64_MAX : answer_count;
    if (room > answer_count) room = answer_count;
    if (room) memcpy(out, answers, room * sizeof *out);
    pthread_mutex_unlock(&lock);
    return count;
}

/* Begins a run: drops the answers of the last one. */
GM_API void gpumem_forget_allocator_events(void) {
    pthread_mutex_lock(&lock);
    for (size_t i = first_open; i < answer_count; i++)
        if (!answers[i].awaited) free(behind[i].events);
    answer_count = first_open = 0;
    early_count = early_pinned = pinned_count = 0;
    answers_are_lost = false;
    pthread_mutex_unlock(&lock);
}
