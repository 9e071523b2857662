/* Which pages of a region of address space are in use. A run of several pages gets the highest free ones, packed
 * downwards; a single page gets the lowest free one.
 *
 * CUDA's driver does so on Linux. In two runs on an RTX 3090 segments of 20 MiB, 512 MiB and 1 GiB are directly below
 * each other in the order in which they were requested (memory_snapshot() in public notes on Stable Diffusion's memory,
 * CUDA 11.8). The order matters: of free blocks of one size older versions of PyTorch (2.11 too) pick the lowest address.
 * If its segments of 2 MiB, which are a pool of their own, are placed downwards as well, FPN, DeepLabV3+, SegFormer-B2
 * and DDRNet reserve 2 MiB more or less than on an L40S; if upwards, 23 of 24 networks reserve the same as there to the
 * byte (benchmarks/results/published_segmentary.txt). */
#include "base/base.h"

/* Returns the first of `pages` free ones in a part of the region, or -1. */
static int64_t free_run(const gm_pages *set, gm_interval part, uint64_t pages) {
    for (size_t i = set->free.count; pages > 1 && i-- > 0;) {
        uintptr_t start = set->free.items[i].start, end = set->free.items[i].end;
        if (start < part.start) start = part.start;
        if (end > part.end) end = part.end;
        if (start < end && end - start >= pages) return (int64_t)(end - pages);
    }
    size_t lowest = gm_intervals_first(&set->free, part.start);
    if (pages > 1 || lowest == set->free.count || set->free.items[lowest].start >= part.end) return -1;
    uintptr_t start = set->free.items[lowest].start;
    return (int64_t)(start < part.start ? part.start : start);
}

bool gm_pages_open(gm_pages *set, uint64_t pages) { return gm_intervals_add(&set->free, 0, pages); }

int64_t gm_pages_take(gm_pages *set, uint64_t pages) {
    const gm_interval all = {0, UINTPTR_MAX};
    int64_t first = pages ? free_run(set, set->home, pages) : -1;
    if (first < 0 && pages) first = free_run(set, all, pages);
    if (first < 0 || !gm_ranges_add(&set->taken, (gm_range){(uintptr_t)first, (uintptr_t)first + pages, 0, 0})) return -1;
    gm_intervals_cut(&set->free, (uintptr_t)first, (uintptr_t)first + pages);
    return first;
}

gm_interval gm_pages_of(const gm_pages *set, uint64_t page) {
    const gm_range *range = gm_ranges_find(&set->taken, page);
    return range ? (gm_interval){range->start, range->end} : (gm_interval){0, 0};
}

void gm_pages_give(gm_pages *set, uint64_t first) {
    gm_range *range = gm_ranges_find(&set->taken, first);
    gm_intervals_add(&set->free, range->start, range->end);
    gm_ranges_remove(&set->taken, range);
}

/* Makes the segments of a step have the same order next to earlier memory as on an empty device: picks the largest free
 * part whose size is a power of two and that is aligned to its size; of equal parts the highest. */
void gm_pages_begin_apart(gm_pages *set) {
    set->home = (gm_interval){0, 0};
    for (size_t i = 0; i < set->free.count; i++) {
        const gm_interval *run = &set->free.items[i];
        uintptr_t size = 1;
        while (2 * size <= run->end - run->start) size *= 2;
        while (run->end / size * size < run->start + size) size /= 2;
        uintptr_t end = run->end / size * size;
        if (size >= set->home.end - set->home.start) set->home = (gm_interval){end - size, end};
    }
}
