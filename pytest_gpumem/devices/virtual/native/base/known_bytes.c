/* Bytes of device memory that are known: small copies from the host, until something else may have written there.
 *
 * Kernels do not run and where they write cannot be known, so that a launch, or a call of a library that launches
 * kernels, on any device, makes all of them unknown. Copies, memsets and collectives say where they write: they
 * make these bytes known or unknown and leave all others. So does freeing memory. Known bytes are a real GPU's.
 */
#include "base/base.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uintptr_t start, end;
    unsigned char *bytes;
} piece;

enum { MOST_PIECES = 4096, MOST_BYTES = 16 << 20 }; /* beyond them all are forgotten */

static piece pieces[MOST_PIECES]; /* sorted, none overlaps another */
static atomic_size_t piece_count; /* changed under the lock; a look without it saves most calls the lock */
static size_t total;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void gm_forget_all(void) {
    if (!atomic_load_explicit(&piece_count, memory_order_relaxed)) return;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < piece_count; i++) free(pieces[i].bytes);
    piece_count = 0;
    total = 0;
    pthread_mutex_unlock(&lock);
}

/* The first piece that ends past the address. */
static size_t first_past(uintptr_t address) {
    size_t low = 0, high = piece_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (pieces[middle].end <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static bool insert(size_t at, uintptr_t start, const unsigned char *bytes, size_t size) {
    unsigned char *copy = piece_count < MOST_PIECES && total + size <= MOST_BYTES ? malloc(size) : NULL;
    if (!copy) return false;
    memcpy(copy, bytes, size);
    memmove(pieces + at + 1, pieces + at, (piece_count - at) * sizeof *pieces);
    pieces[at] = (piece){start, start + size, copy};
    piece_count++;
    total += size;
    return true;
}

static void drop(size_t at) {
    total -= pieces[at].end - pieces[at].start;
    free(pieces[at].bytes);
    piece_count--;
    memmove(pieces + at, pieces + at + 1, (piece_count - at) * sizeof *pieces);
}

/* Forgets the bytes between two addresses. A piece that reaches beyond both becomes two, if the table has room. */
static void cut(uintptr_t start, uintptr_t end) {
    size_t at = first_past(start);
    while (at < piece_count && pieces[at].start < end) {
        piece p = pieces[at];
        if (p.end > end) insert(at + 1, end, p.bytes + (end - p.start), p.end - end);
        if (p.start < start) {
            pieces[at].end = start;
            total -= p.end - start;
            at++;
        } else {
            drop(at);
        }
        if (p.end >= end) return;
    }
}

void gm_forget(const void *address, uint64_t size) {
    if (!size || !atomic_load_explicit(&piece_count, memory_order_relaxed)) return;
    pthread_mutex_lock(&lock);
    cut((uintptr_t)address, (uintptr_t)address + size);
    pthread_mutex_unlock(&lock);
}

void gm_remember(const void *address, const void *bytes, uint64_t size) {
    if (!size) return;
    if (size > GM_MOST_REMEMBERED) {
        gm_forget(address, size);
        return;
    }
    uintptr_t start = (uintptr_t)address;
    pthread_mutex_lock(&lock);
    cut(start, start + size);
    bool inserted = insert(first_past(start), start, bytes, size);
    pthread_mutex_unlock(&lock);
    if (!inserted) gm_forget_all();
}

bool gm_recall(const void *address, void *out, uint64_t size) {
    if (size > GM_MOST_REMEMBERED || !atomic_load_explicit(&piece_count, memory_order_relaxed)) return false;
    uintptr_t at = (uintptr_t)address, end = at + size;
    pthread_mutex_lock(&lock);
    for (size_t i = first_past(at); at < end && i < piece_count && pieces[i].start <= at; i++) {
        uintptr_t until = pieces[i].end < end ? pieces[i].end : end;
        memcpy((unsigned char *)out + (at - (uintptr_t)address), pieces[i].bytes + (at - pieces[i].start), until - at);
        at = until;
    }
    pthread_mutex_unlock(&lock);
    return at == end;
}
