/* Ranges whose values Python could compute but has not: large tensors that operators created from known values. A range
 * is valid until something is written to it. Callers hold the lock of values.c. */
#include "base/base.h"

#include <string.h>

static struct {
    uintptr_t start, end;
    uint64_t number;
} ranges[GM_MAX_DEFERRED]; /* in order of their numbers */
static size_t count;
static uint64_t last_number;

size_t gm_deferred_count(void) { return count; }

void gm_deferred_cut(uintptr_t start, uintptr_t end) {
    size_t left = 0;
    for (size_t i = 0; i < count; i++)
        if (ranges[i].end <= start || ranges[i].start >= end) ranges[left++] = ranges[i];
    count = left;
}

uint64_t gm_deferred_add(uintptr_t start, uintptr_t end) {
    gm_deferred_cut(start, end);
    if (count == GM_MAX_DEFERRED) memmove(ranges, ranges + 1, --count * sizeof ranges[0]);
    ranges[count].start = start;
    ranges[count].end = end;
    ranges[count].number = ++last_number;
    return ranges[count++].number;
}

uint64_t gm_deferred_at(uintptr_t start, uintptr_t end) {
    for (size_t i = 0; i < count; i++)
        if (ranges[i].start <= start && end <= ranges[i].end) return ranges[i].number;
    return 0;
}
