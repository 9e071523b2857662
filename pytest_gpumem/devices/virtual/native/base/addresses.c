/* All ranges of addresses that CUDA functions returned or registered, and the device that each belongs to.
 *
 * Each file that creates regions of cudaMalloc, pools, reservations, shared memory or pinned host memory records them
 * here. So a look-up needs none of these files, and none of them needs another. */
#include "base/base.h"

#include <pthread.h>

static gm_ranges ranges; /* tag: the owner; extra: the source */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The system hands out addresses only once: an older range of host memory at this address was freed without a call to
 * CUDA. Memory that a program registers must not overlap registered memory. */
bool gm_addresses_add(uintptr_t start, uint64_t size, int owner, gm_source source) {
    uintptr_t end = start + size;
    pthread_mutex_lock(&lock);
    gm_range *overlap = gm_ranges_overlap(&ranges, start, end);
    bool ok = !(overlap && source == GM_FROM_HOST_REGISTER);
    for (; ok && overlap; overlap = gm_ranges_overlap(&ranges, start, end)) gm_ranges_remove(&ranges, overlap);
    ok = ok && gm_ranges_add(&ranges, (gm_range){start, end, owner, source});
    pthread_mutex_unlock(&lock);
    return ok;
}

uint64_t gm_addresses_remove(uintptr_t start, gm_source source) {
    uint64_t size = 0;
    pthread_mutex_lock(&lock);
    gm_range *range = gm_ranges_find(&ranges, start);
    if (range && range->start == start && range->extra == source) {
        size = range->end - range->start;
        gm_ranges_remove(&ranges, range);
    }
    pthread_mutex_unlock(&lock);
    return size;
}

uintptr_t gm_addresses_end(uintptr_t address, gm_source source) {
    pthread_mutex_lock(&lock);
    const gm_range *range = gm_ranges_find(&ranges, address);
    uintptr_t end = range && range->extra == source ? range->end : 0;
    pthread_mutex_unlock(&lock);
    return end;
}

void gm_addresses_set_owner(uintptr_t address, int owner) {
    pthread_mutex_lock(&lock);
    gm_range *range = gm_ranges_find(&ranges, address);
    if (range) range->tag = owner;
    pthread_mutex_unlock(&lock);
}

int gm_owner(const void *address) {
    pthread_mutex_lock(&lock);
    const gm_range *range = gm_ranges_find(&ranges, (uintptr_t)address);
    int owner = range ? (int)range->tag : GM_PAGEABLE;
    pthread_mutex_unlock(&lock);
    return owner;
}
