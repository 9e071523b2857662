/* The order of work on streams (stream_order.c). */
#ifndef GPUMEM_STREAM_ORDER_H
#define GPUMEM_STREAM_ORDER_H

#include "runtime/runtime.h"

#include <pthread.h>

/* For each stream, by number: how many of the events recorded on it have completed. */
typedef struct {
    uint64_t *events;
    size_t count;
} gm_clock;

typedef struct {
    gm_clock over; /* completed before the stream's next work */
    size_t number; /* from 1 on; 0: no event was recorded on it */
    bool counted;           /* all its work is counted: the program created it, and it is not a default stream */
    uint64_t queued;        /* kernels and copies */
    uint64_t queued_before; /* as of the last event on it, or the last time that the host waited for it */
    uint64_t device_waits;  /* waits of the host for its device, until its last work was queued */
} gm_stream_order;

typedef struct {
    gm_clock over;   /* completed once the event has */
    size_t stream;   /* number of its stream; 0: the event was not recorded */
    uint64_t number; /* index of the event on its stream */
    uint64_t time;   /* nanoseconds since 1970 */
    int device;
    pthread_t thread; /* the thread that recorded it */
} gm_event_order;

void gm_order_recorded(gm_event_order *event, gm_stream_order *stream, int device, const void *caller);
void gm_order_created(gm_stream_order *stream);
bool gm_order_matters(void); /* whether there are streams besides the default ones: only then work has to be counted */
void gm_order_queued(gm_stream_order *stream, int device); /* one more kernel or copy */
void gm_order_waits(gm_stream_order *stream, const gm_event_order *event);
void gm_order_host_waits(const gm_event_order *event, const void *caller); /* cudaEventSynchronize */
void gm_order_host_waits_for_stream(gm_stream_order *stream);
void gm_order_host_waits_for_device(int device);
void gm_order_asked(const gm_event_order *event, const void *caller); /* cudaEventQuery, called from there */

#endif
