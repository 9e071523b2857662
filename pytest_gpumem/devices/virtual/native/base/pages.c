/*
 * Which pages of a region of address space are taken: for a run of several the highest free ones, packed downwards;
 * for a single page the lowest one. CUDA's driver does so on Linux. In two runs on an RTX 3090 a segment of 20 MiB,
 * one of 512 MiB and one of 1 GiB lie directly below each other in the order in which they were asked for
 * (memory_snapshot() in public notes on Stable Diffusion's memory, CUDA 11.8). The order matters: of free blocks of
 * one size older versions of PyTorch (2.11 too) take that of the lowest address. Where its segments of 2 MiB, which
 * are a pool of their own, go down as well, FPN, DeepLabV3+, SegFormer-B2 and DDRNet reserve 2 MiB more or less than
 * they did on an L40S; where they go up, 23 of 24 networks reserve the same there to the byte
 * (benchmarks/results/published_segmentary.txt).
 *
 * A complete binary tree over the pages knows for each node how many are free at its low end, at its high end and
 * in its longest run, so a search takes O(log n), for any number of live blocks. Stored is the difference to
 * the node's size: memory that was never written says "free as a whole".
 */
#include "base/base.h"

#include <stdlib.h>

typedef gm_node node;

static uint32_t free_low(const node *n, uint32_t size) { return size - n->low; }
static uint32_t free_high(const node *n, uint32_t size) { return size - n->high; }
static uint32_t free_longest(const node *n, uint32_t size) { return size - n->longest; }

bool gm_pages_open(gm_pages *set, unsigned levels) {
    set->count = (size_t)1 << levels;
    set->nodes = calloc(2 * set->count, sizeof *set->nodes);
    set->owner = calloc(set->count, sizeof *set->owner);
    if (set->nodes && set->owner) return true;
    free(set->nodes);
    free(set->owner);
    set->nodes = NULL;
    set->owner = NULL;
    return false;
}

static void fill(node *n, uint32_t size, bool taken) { n->low = n->high = n->longest = taken ? size : 0; }

/* Brings a node's halves up to date where it is free, or taken, as a whole. */
static void push_down(node *nodes, size_t at, uint32_t size) {
    if (nodes[at].longest != 0 && nodes[at].longest != size) return;
    for (size_t half = 2 * at; half <= 2 * at + 1; half++) fill(&nodes[half], size / 2, nodes[at].longest != 0);
}

/* Takes or frees [first, end) of the node at `at`, which covers [base, base + size). */
static void mark(node *nodes, size_t at, uint32_t base, uint32_t size, uint32_t first, uint32_t end, bool taken) {
    node *here = &nodes[at];
    if (first <= base && base + size <= end) {
        fill(here, size, taken);
        return;
    }
    node *left = &nodes[2 * at], *right = &nodes[2 * at + 1];
    uint32_t half = size / 2, middle = base + half;
    push_down(nodes, at, size);
    if (first < middle) mark(nodes, 2 * at, base, half, first, end, taken);
    if (end > middle) mark(nodes, 2 * at + 1, middle, half, first, end, taken);
    uint32_t across = free_high(left, half) + free_low(right, half), longest = across;
    if (free_longest(left, half) > longest) longest = free_longest(left, half);
    if (free_longest(right, half) > longest) longest = free_longest(right, half);
    here->low = size - (left->low ? free_low(left, half) : half + free_low(right, half));
    here->high = size - (right->high ? free_high(right, half) : half + free_high(left, half));
    here->longest = size - longest;
}

/* Brings the nodes above a node up to date, and says which pages it covers. */
static void walk_to(const gm_pages *set, size_t node_at, uint32_t *base, uint32_t *size) {
    size_t at = 1, depth = 0;
    *base = 0;
    *size = (uint32_t)set->count;
    while (node_at >> (depth + 1)) depth++;
    for (; depth > 0; depth--) {
        push_down(set->nodes, at, *size);
        *size /= 2;
        at = node_at >> (depth - 1);
        if (at & 1) *base += *size;
    }
}

/* The lowest free page of a node, or -1. */
static int64_t lowest(const gm_pages *set, size_t at) {
    node *nodes = set->nodes;
    uint32_t base, size;
    walk_to(set, at, &base, &size);
    if (free_longest(&nodes[at], size) == 0) return -1;
    while (nodes[at].longest != 0) {
        size /= 2;
        at *= 2;
        if (free_longest(&nodes[at], size) > 0) continue;
        base += size;
        at++;
    }
    return base;
}

/* The first of `pages` pages at the upper end of the highest free run of a node that has room for them, or -1. */
static int64_t highest(const gm_pages *set, size_t at, uint32_t pages) {
    node *nodes = set->nodes;
    uint32_t base, size;
    walk_to(set, at, &base, &size);
    if (free_longest(&nodes[at], size) < pages) return -1;
    while (nodes[at].longest != 0) {
        uint32_t half = size / 2;
        const node *left = &nodes[2 * at], *right = &nodes[2 * at + 1];
        if (free_longest(right, half) >= pages) {
            base += half;
            at = 2 * at + 1;
        } else if (free_high(left, half) + free_low(right, half) >= pages) {
            return (int64_t)base + half + free_low(right, half) - pages;
        } else {
            at = 2 * at;
        }
        size = half;
    }
    return (int64_t)base + size - pages;
}

static int64_t free_run(const gm_pages *set, size_t at, uint32_t pages) {
    return pages == 1 ? lowest(set, at) : highest(set, at, pages);
}

int64_t gm_pages_take(gm_pages *set, uint64_t pages) {
    if (pages == 0 || pages > set->count) return -1;
    int64_t first = set->home ? free_run(set, set->home, (uint32_t)pages) : -1;
    if (first < 0) first = free_run(set, 1, (uint32_t)pages);
    if (first < 0) return -1;
    uint32_t end = (uint32_t)((uint64_t)first + pages);
    mark(set->nodes, 1, 0, (uint32_t)set->count, (uint32_t)first, end, true);
    for (uint32_t page = (uint32_t)first; page < end; page++) set->owner[page] = (uint32_t)first + 1;
    return first;
}

int64_t gm_pages_owner(const gm_pages *set, size_t page) { return (int64_t)set->owner[page] - 1; }

uint64_t gm_pages_of(const gm_pages *set, size_t first) {
    size_t end = first;
    while (end < set->count && set->owner[end] == first + 1) end++;
    return end - first;
}

void gm_pages_give(gm_pages *set, size_t first) {
    uint32_t end = (uint32_t)(first + gm_pages_of(set, first));
    mark(set->nodes, 1, 0, (uint32_t)set->count, (uint32_t)first, end, false);
    for (size_t page = first; page < end; page++) set->owner[page] = 0;
}

/* The largest node below `at` that is free as a whole, of equal ones the highest. */
static size_t empty_part(gm_pages *set, size_t at, uint32_t size, uint32_t *largest) {
    const node *here = &set->nodes[at];
    if (here->longest == 0 || here->longest == size || size / 2 <= *largest) {
        if (here->longest != 0 || size <= *largest) return 0;
        *largest = size;
        return at;
    }
    size_t high = empty_part(set, 2 * at + 1, size / 2, largest), low = empty_part(set, 2 * at, size / 2, largest);
    return low ? low : high;
}

/* So that the segments of a step lie in the same order beside earlier memory as on an empty device. */
void gm_pages_begin_apart(gm_pages *set) {
    uint32_t largest = 0;
    set->home = set->nodes ? empty_part(set, 1, (uint32_t)set->count, &largest) : 0;
}
