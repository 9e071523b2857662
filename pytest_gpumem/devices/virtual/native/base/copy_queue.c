/* The bytes that a thread's next copies to the host bring, as Python has computed them.
 *
 * The CUDA code of an operator such as nonzero learns its output's size by a small copy from memory that its kernels
 * wrote. Kernels do not run: Python computes what they would have written, queues the bytes of these copies in their
 * order, and calls the operator on the same thread. Versions of PyTorch ask for one answer in several sizes (a count of
 * 4 bytes or of 8): a queued copy has a form for each, and the copy's size tells which. A copy of a size that no form of
 * the next queued one has never takes bytes: PyTorch's code is then not as Python takes it to be, which is counted, and a
 * fault. Copies that are captured into a graph bring nothing, and so take nothing.
 */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

/* One form of a copy. */
typedef struct form {
    struct form *next;
    bool is_other; /* than the one before it, of the same copy */
    uint64_t size;
    char bytes[];
} form;

/* of a thread: an operator's host code makes its copies on the thread that called the operator */
static _Thread_local struct {
    form *first, *last;
    uint64_t strays, stray_size, stray_expected; /* copies of another size; the first one's, and a queued one */
} queue;

/* Takes all forms of the first copy out of the queue. */
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

/* Queues what this thread's next copy of so many bytes to the host brings; as another form of the copy that was queued
 * last, where ``other``. 0: there is no memory for it. */
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

/* Empties this thread's queue: how many copies were queued and not made, how many of another size were made since the
 * last call, and of the first of these its size and the size that was queued. */
GM_API void gpumem_drop_queued_copies(uint64_t out[4]) {
    for (out[0] = 0; queue.first; out[0]++) drop_first();
    out[1] = queue.strays;
    out[2] = queue.stray_size;
    out[3] = queue.stray_expected;
    queue.strays = queue.stray_size = queue.stray_expected = 0;
}
