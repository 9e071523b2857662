/* A set of addresses as sorted intervals, none of which touches another: what is added is merged. */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

size_t gm_intervals_first(const gm_intervals *set, uintptr_t address) {
    size_t low = 0, high = set->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (set->items[middle].end <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void replace(gm_intervals *set, size_t first, size_t end, const gm_interval *items, size_t count) {
    if (!set->items) return;
    memmove(set->items + first + count, set->items + end, (set->count - end) * sizeof *items);
    if (count) memcpy(set->items + first, items, count * sizeof *items);
    set->count = set->count - (end - first) + count;
}

/* Room for one interval more, which is all that a change can add. */
static bool make_room(gm_intervals *set) {
    if (set->count < set->room) return true;
    size_t room = set->room ? set->room * 2 : 64;
    gm_interval *items = realloc(set->items, room * sizeof *items);
    if (!items) return false;
    set->items = items;
    set->room = room;
    return true;
}

bool gm_intervals_add(gm_intervals *set, uintptr_t start, uintptr_t end) {
    if (start >= end) return true;
    if (!make_room(set)) return false;
    size_t first = gm_intervals_first(set, start ? start - 1 : 0), last = first; /* an interval that ends here touches */
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

/* Where the middle of an interval is cut out and there is no memory for its second half, that half goes too. */
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
