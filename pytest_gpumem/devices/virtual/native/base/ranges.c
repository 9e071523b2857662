/* Sorted arrays of address ranges: ranges that belong to something, with few insertions (the callers cache) and many
 * look-ups; and sets of addresses as intervals that do not touch: adding merges them. */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

/* `items` is the address of the pointer to the array, of any type. */
bool gm_grow(void *items, size_t *room, size_t count, size_t size) {
    if (count < *room) return true;
    void *old;
    memcpy(&old, items, sizeof old);
    size_t larger = *room ? *room * 2 : 64;
    void *grown = realloc(old, larger * size);
    if (!grown) return false;
    memcpy(items, &grown, sizeof grown);
    *room = larger;
    return true;
}

/* Returns the index of the first item of `size` bytes that ends past the address; an item's first two words are a range. */
static size_t first_past(const void *items, size_t count, size_t size, uintptr_t address) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const uintptr_t *range = (const void *)((const char *)items + middle * size);
        if (range[1] <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* ---- ranges ---- */

bool gm_ranges_add(gm_ranges *set, gm_range item) {
    if (!gm_grow(&set->items, &set->room, set->count, sizeof item)) return false;
    size_t at = first_past(set->items, set->count, sizeof *set->items, item.start);
    memmove(set->items + at + 1, set->items + at, (set->count - at) * sizeof *set->items);
    set->items[at] = item;
    set->count++;
    return true;
}

gm_range *gm_ranges_find(const gm_ranges *set, uintptr_t address) {
    size_t at = first_past(set->items, set->count, sizeof *set->items, address);
    return at < set->count && set->items[at].start <= address ? &set->items[at] : NULL;
}

gm_range *gm_ranges_overlap(const gm_ranges *set, uintptr_t start, uintptr_t end) {
    size_t at = first_past(set->items, set->count, sizeof *set->items, start);
    return at < set->count && set->items[at].start < end ? &set->items[at] : NULL;
}

void gm_ranges_remove(gm_ranges *set, gm_range *item) {
    size_t at = (size_t)(item - set->items);
    set->count--;
    memmove(set->items + at, set->items + at + 1, (set->count - at) * sizeof *set->items);
}

/* ---- intervals ---- */

size_t gm_intervals_first(const gm_intervals *set, uintptr_t address) {
    return first_past(set->items, set->count, sizeof *set->items, address);
}

static void replace(gm_intervals *set, size_t first, size_t end, const gm_interval *items, size_t count) {
    if (!set->items) return;
    memmove(set->items + first + count, set->items + end, (set->count - end) * sizeof *items);
    if (count) memcpy(set->items + first, items, count * sizeof *items);
    set->count = set->count - (end - first) + count;
}

/* Makes room for one more interval, which is the most that a change can add. */
static bool make_room(gm_intervals *set) { return gm_grow(&set->items, &set->room, set->count, sizeof *set->items); }

bool gm_intervals_add(gm_intervals *set, uintptr_t start, uintptr_t end) {
    if (start >= end) return true;
    if (!make_room(set)) return false;
    size_t first = gm_intervals_first(set, start ? start - 1 : 0), last = first; /* an interval that ends here touches the
                                                                                    new one */
    gm_interval merged = {start, end};
    for (; last < set->count && set->items[last].start <= end; last++) {
        if (set->items[last].start < merged.start) merged.start = set->items[last].start;
        if (set->items[last].end > merged.end) merged.end = set->items[last].end;
        set->total -= set->items[last].end - set->items[last].start;
    }
    replace(set, first, last, &merged, 1);
    set->total += merged.end - merged.start;
    return true;
}

/* If the middle of an interval is cut out and there is no memory for its second half, that half is dropped too. */
void gm_intervals_cut(gm_intervals *set, uintptr_t start, uintptr_t end) {
    if (start >= end) return;
    size_t first = gm_intervals_first(set, start), last = first, count = 0;
    gm_interval left[2];
    for (; last < set->count && set->items[last].start < end; last++) {
        gm_interval *item = &set->items[last];
        set->total -= item->end - item->start;
        if (item->start < start) left[count++] = (gm_interval){item->start, start};
        if (item->end > end) left[count++] = (gm_interval){end, item->end};
    }
    if (count > last - first && !make_room(set)) count--;
    for (size_t i = 0; i < count; i++) set->total += left[i].end - left[i].start;
    replace(set, first, last, left, count);
}

bool gm_intervals_cover(const gm_intervals *set, uintptr_t start, uintptr_t end) {
    size_t at = gm_intervals_first(set, start);
    return start >= end || (at < set->count && set->items[at].start <= start && set->items[at].end >= end);
}

bool gm_intervals_next(const gm_intervals *set, gm_interval *part, uintptr_t end) {
    size_t at = gm_intervals_first(set, part->end);
    if (at == set->count || part->end >= end || set->items[at].start >= end) return false;
    const gm_interval item = set->items[at];
    *part = (gm_interval){item.start > part->end ? item.start : part->end, item.end < end ? item.end : end};
    return true;
}
