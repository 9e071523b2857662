/* The bytes that a thread's next copies to the host bring, as Python has computed them.
 *
 * The CUDA code of an operator such as nonzero learns its output's size by a small copy from memory that its kernels
 * wrote. Kernels do not run: Python computes what they would have written, queues the bytes of these copies in their
 * order, and calls the operator on the same thread. A copy of another size than the next queued one never takes its
 * bytes: PyTorch's code is then not as Python takes it to be, which is counted, and a fault. Copies that are captured
 * into a graph bring nothing, and so take nothing.
 */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

typedef struct entry {
    struct entry *next;
    uint64_t size;
    char bytes[];
} entry;

/* of a thread: an operator's host code makes its copies on the thread that called the operator */
static _Thread_local struct {
    entry *first, **end;
    uint64_t strays, stray_size, stray_expected; /* copies of another size; the first one's, and what was queued */
} queue;

bool gm_queue_take(void *to, uint64_t size) {
    entry *next = queue.first;
    if (!next) return false;
    if (next->size != size) {
        if (!queue.strays++) {
            queue.stray_size = size;
            queue.stray_expected = next->size;
        }
        return false;
    }
    memcpy(to, next->bytes, size);
    queue.first = next->next;
    if (!queue.first) queue.end = NULL;
    free(next);
    return true;
}

/* ---- functions that Python calls ---- */

/* Queues what this thread's next copy of so many bytes to the host brings; 0: there is no memory for it. */
GM_API int gpumem_queue_copy(const void *bytes, uint64_t size) {
    entry *last = malloc(sizeof *last + size);
    if (!last) return 0;
    last->next = NULL;
    last->size = size;
    memcpy(last->bytes, bytes, size);
    if (!queue.first) queue.end = &queue.first;
    *queue.end = last;
    queue.end = &last->next;
    return 1;
}

/* Empties this thread's queue: how many copies were queued and not made, how many of another size were made since the
 * last call, and of the first of these its size and the size that was queued. */
GM_API void gpumem_drop_queued_copies(uint64_t out[4]) {
    out[0] = 0;
    while (queue.first) {
        entry *next = queue.first->next;
        free(queue.first);
        queue.first = next;
        out[0]++;
    }
    queue.end = NULL;
    out[1] = queue.strays;
    out[2] = queue.stray_size;
    out[3] = queue.stray_expected;
    queue.strays = queue.stray_size = queue.stray_expected = 0;
}
