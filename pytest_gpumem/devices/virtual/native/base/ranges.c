/* A sorted array of address ranges: few insertions (the callers above cache), many look-ups. */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

/* The first range that ends past the address. */
static size_t lower_bound(const gm_ranges *set, uintptr_t address) {
    size_t low = 0, high = set->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (set->items[middle].end <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

bool gm_ranges_add(gm_ranges *set, gm_range item) {
    if (set->count == set->room) {
        size_t room = set->room ? set->room * 2 : 64;
        gm_range *items = realloc(set->items, room * sizeof *items);
        if (!items) return false;
        set->items = items;
        set->room = room;
    }
    size_t at = lower_bound(set, item.start);
    memmove(set->items + at + 1, set->items + at, (set->count - at) * sizeof *set->items);
    set->items[at] = item;
    set->count++;
    return true;
}

gm_range *gm_ranges_find(const gm_ranges *set, uintptr_t address) {
    size_t at = lower_bound(set, address);
    return at < set->count && set->items[at].start <= address ? &set->items[at] : NULL;
}

gm_range *gm_ranges_overlap(const gm_ranges *set, uintptr_t start, uintptr_t end) {
    size_t at = lower_bound(set, start);
    return at < set->count && set->items[at].start < end ? &set->items[at] : NULL;
}

void gm_ranges_remove(gm_ranges *set, gm_range *item) {
    size_t at = (size_t)(item - set->items);
    set->count--;
    memmove(set->items + at, set->items + at + 1, (set->count - at) * sizeof *set->items);
}
