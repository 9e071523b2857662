/* Device memory that several processes share: a file without a name holds its bytes, and behind them which are known.
 *
 * A process exports an allocation (cudaIpcGetMemHandle): its bytes move into the file, which takes their place. Another
 * one opens the file through /proc and maps it. Each pulls the known intervals out of the file before it looks at its
 * own, and pushes them after a change. All of it happens under the lock of values.c.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As many intervals as a segment of 2 MiB has blocks of 512 bytes, each of a small tensor. */
enum { MAX_SHARED = 1024, MAX_INTERVALS = 4096, PATIENCE = 100000 };

typedef struct {
    atomic_int busy;
    int32_t count;
    uint64_t written; /* bytes of copies, which the file may hold */
    gm_interval known[MAX_INTERVALS]; /* relative to the start of the memory */
} header;

static struct {
    uintptr_t start, end; /* 0: a free place */
    header *header;
    int file; /* -1: another process's */
} blocks[MAX_SHARED];
static atomic_int block_count; /* places that were ever taken; 0: nothing is shared, and nothing is looked for */

static const size_t header_room = (sizeof(header) + 4095) / 4096 * 4096;

bool gm_shared_any(void) { return atomic_load_explicit(&block_count, memory_order_relaxed) > 0; }

/* A process may have died with the lock in its hands: it is taken over then. */
static void enter(header *h) {
    for (int i = 0; i < PATIENCE && atomic_exchange(&h->busy, 1); i++) sched_yield();
}

static void leave(header *h) { atomic_store(&h->busy, 0); }

int gm_shared_create(uint64_t size) {
    int file = (int)syscall(SYS_memfd_create, "gpumem", 1u /* MFD_CLOEXEC */);
    if (file >= 0 && ftruncate(file, (off_t)(size + header_room)) != 0) {
        close(file);
        file = -1;
    }
    return file;
}

int gm_shared_open(uint64_t process, int file) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%llu/fd/%d", (unsigned long long)process, file);
    return open(path, O_RDWR | O_CLOEXEC);
}

bool gm_shared_map(void *start, uint64_t size, int file, bool own) {
    int at = 0;
    while (at < block_count && blocks[at].start) at++;
    if (at == MAX_SHARED) return false;
    void *h = mmap(NULL, header_room, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)size);
    if (h == MAP_FAILED) return false;
    if (mmap(start, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
        munmap(h, header_room);
        return false;
    }
    blocks[at].header = h;
    blocks[at].file = own ? file : -1;
    blocks[at].start = (uintptr_t)start;
    blocks[at].end = (uintptr_t)start + size;
    if (at == block_count) block_count++;
    return true;
}

static int next_block(int at, uintptr_t start, uintptr_t end) {
    while (at < block_count && !(blocks[at].start && blocks[at].start < end && blocks[at].end > start)) at++;
    return at;
}

bool gm_shared_covers(uintptr_t address) { return next_block(0, address, address + 1) < block_count; }

int gm_shared_file(uintptr_t address) {
    int at = next_block(0, address, address + 1);
    return at < block_count ? blocks[at].file : -1;
}

bool gm_shared_unmap(uintptr_t start) {
    int at = next_block(0, start, start + 1);
    if (at == block_count || blocks[at].start != start) return false;
    munmap(blocks[at].header, header_room);
    if (blocks[at].file >= 0) close(blocks[at].file);
    blocks[at].start = 0;
    return true;
}

void gm_shared_pull(gm_intervals *known, uintptr_t start, uintptr_t end) {
    for (int at = next_block(0, start, end); at < block_count; at = next_block(at + 1, start, end)) {
        header *h = blocks[at].header;
        gm_intervals_cut(known, blocks[at].start, blocks[at].end);
        enter(h);
        for (int i = 0; i < h->count && i < MAX_INTERVALS; i++)
            gm_intervals_add(known, blocks[at].start + h->known[i].start, blocks[at].start + h->known[i].end);
        leave(h);
    }
}

void gm_shared_push(const gm_intervals *known, uintptr_t start, uintptr_t end) {
    for (int at = next_block(0, start, end); at < block_count; at = next_block(at + 1, start, end)) {
        header *h = blocks[at].header;
        uintptr_t from = blocks[at].start, to = blocks[at].end;
        int32_t count = 0;
        enter(h);
        for (size_t i = gm_intervals_first(known, from); i < known->count && known->items[i].start < to; i++) {
            if (count == MAX_INTERVALS) break; /* those behind them are unknown */
            uintptr_t first = known->items[i].start > from ? known->items[i].start : from;
            uintptr_t last = known->items[i].end < to ? known->items[i].end : to;
            h->known[count++] = (gm_interval){first - from, last - from};
        }
        h->count = count;
        leave(h);
    }
}

bool gm_shared_allow(uintptr_t start, uintptr_t end, uint64_t most) {
    int at = next_block(0, start, end);
    if (at == block_count || start < blocks[at].start || end > blocks[at].end) return false;
    header *h = blocks[at].header;
    enter(h);
    bool ok = blocks[at].end - blocks[at].start <= most || h->written + (end - start) <= most;
    if (ok) h->written += end - start;
    leave(h);
    return ok;
}
