/* The bytes that a thread's next copies to the host return, as computed by Python.
 *
 * The CUDA code of an operator such as nonzero reads its output's size with a small copy from memory that its kernels
 * wrote. Kernels do not run: Python computes what they would have written, queues the bytes of these copies in order, and
 * calls the operator on the same thread. Versions of PyTorch copy the same number in several sizes (a count of 4 bytes or
 * of 8): a queued copy has a form for each, and the copy's size selects one. A copy whose size matches no form of the
 * next queued copy gets no queued bytes: then PyTorch's code differs from what Python expects, which is counted as a
 * fault. Copies captured into a graph do not run, so they use no queued bytes. */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

/* One form of a copy. */
typedef struct form {
    struct form *next;
    bool is_other; /* starts another copy than the form before it */
    uint64_t size;
    char bytes[];
} form;

/* per thread: an operator's host code makes its copies on the thread that called the operator */
static _Thread_local struct {
    form *first, *last;
    uint64_t strays, stray_size, stray_expected; /* copies of another size; the first one's, and a queued one */
} queue;

/* Removes all forms of the first copy from the queue. */
static void drop_first(void) {
    do {
        form *first = queue.first;
        queue.first = first->next;
        free(first);
    } while (queue.first && queue.first->is_other);
}

bool gm_queue_take(void *to, uint64_t size) {
    const form *taken = queue.first, *last = taken;
    while (taken && taken->size != size) {
        last = taken;
        taken = taken->next && taken->next->is_other ? taken->next : NULL;
    }
    if (taken) {
        memcpy(to, taken->bytes, size);
        drop_first();
    } else if (last && !queue.strays++) {
        queue.stray_size = size;
        queue.stray_expected = last->size;
    }
    return taken;
}

/* ---- functions that Python calls ---- */

/* Queues the result of this thread's next copy of this size to the host; if ``other`` is set, as another form of the copy
 * queued last. Returns 0 if there is no memory for it. */
GM_API int gpumem_queue_copy(const void *bytes, uint64_t size, int other) {
    form *new = malloc(sizeof *new + size);
    if (!new) return 0;
    new->next = NULL;
    new->is_other = other;
    new->size = size;
    memcpy(new->bytes, bytes, size);
    *(queue.first ? &queue.last->next : &queue.first) = new;
    queue.last = new;
    return 1;
}

/* Empties this thread's queue. Returns how many queued copies were not made, how many copies of another size were made
 * since the last call, and for the first of these its size and the queued size. */
GM_API void gpumem_drop_queued_copies(uint64_t out[4]) {
    for (out[0] = 0; queue.first; out[0]++) drop_first();
    out[1] = queue.strays;
    out[2] = queue.stray_size;
    out[3] = queue.stray_expected;
    queue.strays = queue.stray_size = queue.stray_expected = 0;
}
