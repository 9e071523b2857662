/* The bytes in device memory, and which of them are known.
 *
 * A device's addresses are address space of this process, readable and writable: a page uses host memory once it is
 * written, and reads as zeros until then. So a copy is a copy and a memset a memset, up to a limit: the weights of a
 * large model must not fill the host. Bytes beyond the limit are unknown, and their pages are not written.
 *
 * Kernels do not run, and where they write cannot be known. So a launch on any device, or a call of a library that
 * launches kernels, makes all bytes unknown. Copies, memsets and collectives declare where they write: they make these
 * bytes known or unknown and leave all others. So does freeing memory. Known bytes are those that a real GPU would have. */
#define _GNU_SOURCE
#include "base/base.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((uintptr_t)4096)

/* Known intervals, each one live tensor or several that touch: with more intervals, newly written bytes stay unknown. A
 * change moves the intervals behind it: 4 MiB here at most. */
enum { MAX_INTERVALS = 1 << 18 };

/* The limits, which Python reads as well (gpumem_value_limits). A piece of 512 KiB is 65,536 values of 8 bytes: masks,
 * token ids, labels and lengths, which decide sizes and branches, are no larger, and are always stored. Larger pieces,
 * such as weights and activations of small models, are stored if Python enables it, up to a size each, until their sum
 * reaches a budget. The first copy to an address pays for its pages, 0.36 us each on the machine where this was chosen:
 * 20 us for 64 KiB, 180 us for 512 KiB, 6 ms for 16 MiB. The next one is a memcpy. */
#define SMALL_PIECE (512ull << 10)
#define LARGEST_PIECE (16ull << 20)
#define BUDGET (4096ull << 20)
#define BACKED_SMALL (256ull << 20) /* maximum growth of the process, without and with the larger pieces */
#define BACKED (2048ull << 20)
#define LOST (128ull << 20) /* unknown bytes after which a test counts as large: none of its larger pieces is stored then */

static _Atomic uint64_t largest_piece = SMALL_PIECE;
static _Atomic uint64_t most_backed = BACKED_SMALL;
static _Atomic uint64_t budget; /* bytes of larger pieces that may still be written */
static _Atomic uint64_t lost;   /* unknown bytes that operators wrote */
static _Atomic uint64_t lost_to_kernels; /* how often kernels outside of operators made all bytes unknown */

static gm_intervals known;  /* in bytes */
static gm_intervals backed; /* in pages that may use host memory */
static gm_intervals shared; /* with other processes or with the program, which may write there */
/* Numbers of known and deferred ranges, and of pages and shared ranges, which are read without the lock: if they are
 * zero, as in most calls, nothing has to be looked up under it. */
static atomic_size_t known_count, backed_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool computing; /* Python computes values, and declares what an operator of PyTorch writes */

/* PyTorch operators that are running; Python counts them. Nobody declares what kernels outside of them (Triton's, an
 * extension's, a graph's) write. */
static atomic_int running_operators;
static _Thread_local int operators_here; /* those that run on this thread */
static _Thread_local bool seen_here;     /* whether operators of this thread have been counted */

static atomic_int captures_running;      /* captured operations run when their graph is launched */

void gm_count_captures(int change) { atomic_fetch_add(&captures_running, change); }

bool gm_any_capture(void) { return atomic_load_explicit(&captures_running, memory_order_relaxed); }

static uintptr_t page_of(uintptr_t address) { return address & ~(PAGE - 1); }
static uintptr_t page_end(uintptr_t address) { return (address + PAGE - 1) & ~(PAGE - 1); }

/* Each change of known bytes is enclosed by begin_change and end_change. */
static void begin_change(uintptr_t start, uintptr_t end) {
    pthread_mutex_lock(&lock);
    gm_deferred_cut(start, end);
}

static void publish_counts(void) {
    atomic_store_explicit(&known_count, known.count + gm_deferred_count(), memory_order_relaxed);
    atomic_store_explicit(&backed_count, backed.count + shared.count, memory_order_relaxed);
}

static void end_change(void) {
    publish_counts();
    pthread_mutex_unlock(&lock);
}

/* A check without the lock: nothing can be known. */
static bool nothing_known(void) { return !atomic_load_explicit(&known_count, memory_order_relaxed); }

/* ---- address space ---- */

/* Limits on writable memory (ulimit -d, vm.overcommit_memory=2) count address space that was never used. Under them
 * address space can still be reserved, but stores nothing. */
static gm_intervals unwritable;

/* The caller holds the lock. */
static bool can_be_known(uintptr_t start, uintptr_t end) {
    const gm_intervals *never[] = {&unwritable, &shared};
    for (int i = 0; i < 2; i++) {
        size_t at = gm_intervals_first(never[i], start);
        if (at < never[i]->count && never[i]->items[at].start < end) return false;
    }
    return true;
}

void *gm_space_open(uint64_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (map != MAP_FAILED) {
        madvise(map, size, MADV_NOHUGEPAGE); /* four bytes would use 2 MiB */
        madvise(map, size, MADV_DONTDUMP);
        return map;
    }
    map = mmap(NULL, size, PROT_NONE, flags, -1, 0);
    if (map == MAP_FAILED) return NULL;
    pthread_mutex_lock(&lock);
    bool ok = gm_intervals_add(&unwritable, (uintptr_t)map, (uintptr_t)map + size);
    pthread_mutex_unlock(&lock);
    if (ok) return map;
    munmap(map, size);
    return NULL;
}

void gm_space_close(void *start, uint64_t size) {
    gm_space_release(start, size);
    pthread_mutex_lock(&lock);
    gm_intervals_cut(&unwritable, (uintptr_t)start, (uintptr_t)start + size);
    pthread_mutex_unlock(&lock);
    munmap(start, size);
}

void gm_space_share(const void *address, uint64_t size) {
    uintptr_t start = (uintptr_t)address, end = start + size;
    begin_change(start, end);
    gm_intervals_cut(&known, start, end);
    gm_intervals_add(&shared, start, end);
    end_change();
}

/* Returns pages to the host; the caller holds the lock. They read as zeros from then on. */
static void give_back(uintptr_t start, uintptr_t end) {
    for (gm_interval part = {start, start}; gm_intervals_next(&backed, &part, end);)
        madvise((void *)part.start, part.end - part.start, MADV_DONTNEED);
    gm_intervals_cut(&backed, start, end);
}

void gm_space_release(const void *address, uint64_t size) {
    uintptr_t start = (uintptr_t)address, end = start + size;
    if (nothing_known() && !atomic_load_explicit(&backed_count, memory_order_relaxed)) return;
    begin_change(start, end);
    gm_intervals_cut(&known, start, end);
    gm_intervals_cut(&shared, start, end);
    give_back(page_end(start), page_of(end));
    end_change();
}

/* Returns all pages without a known byte to the host; the caller holds the lock. */
static void give_back_unknown(void) {
    uintptr_t from = 0;
    for (size_t i = 0; i < known.count; i++) {
        if (page_of(known.items[i].start) > from) give_back(from, page_of(known.items[i].start));
        from = page_end(known.items[i].end);
    }
    give_back(from, UINTPTR_MAX & ~(PAGE - 1));
}

/* Returns whether these bytes may be written, and so use host memory; the caller holds the lock. */
static bool back(uintptr_t start, uintptr_t end) {
    if (!can_be_known(start, end)) return false;
    start = page_of(start);
    end = page_end(end);
    if (gm_intervals_cover(&backed, start, end)) return true;
    if (backed.total + (end - start) > most_backed) give_back_unknown();
    return backed.total + (end - start) <= most_backed && gm_intervals_add(&backed, start, end);
}

/* ---- known and unknown ---- */

/* The caller holds the lock. */
static void mark(uintptr_t start, uintptr_t end) {
    if (!gm_intervals_add(&known, start, end) || known.count > MAX_INTERVALS) gm_intervals_cut(&known, start, end);
}

static void forget_known(void) {
    pthread_mutex_lock(&lock);
    gm_deferred_cut(0, UINTPTR_MAX);
    known.count = 0;
    known.total = 0;
    end_change();
}

static _Thread_local uint64_t writes; /* by kernels that this thread launched, to any address */

static _Thread_local void *work_stream;
static void (*on_work)(void *stream);

void gm_on_work(void (*function)(void *stream)) { on_work = function; }

void gm_work_next_on(void *stream) { work_stream = stream; }

void gm_note_work(void) {
    if (on_work) on_work(work_stream);
}

void gm_forget_all(void) {
    writes++;
    gm_note_work();
    if (nothing_known()) return;
    bool told = atomic_load_explicit(&computing, memory_order_relaxed) &&
                atomic_load_explicit(&running_operators, memory_order_relaxed) > 0;
    if (told) return;
    atomic_fetch_add_explicit(&lost_to_kernels, 1, memory_order_relaxed);
    forget_known();
}

GM_API uint64_t gpumem_lost_to_kernels(void) { return atomic_load(&lost_to_kernels); }

GM_API uint64_t gpumem_thread_writes(void) { return writes; }

/* Between two measured tests: values of fixtures of wider scope stay known, as the tests that share them read them. */
void gm_values_trim(void) {
    pthread_mutex_lock(&lock);
    give_back_unknown();
    publish_counts();
    pthread_mutex_unlock(&lock);
}

void gm_count_operators(int change) {
    operators_here += change;
    seen_here = true;
    atomic_fetch_add_explicit(&running_operators, change, memory_order_relaxed);
}

int gm_operators_here(void) { return operators_here; }

bool gm_between_operators(void) {
    return seen_here && operators_here == 0 && atomic_load_explicit(&computing, memory_order_relaxed);
}

void gm_forget(const void *address, uint64_t size) {
    uintptr_t start = (uintptr_t)address, end = start + size;
    if (!size || nothing_known()) return;
    begin_change(start, end);
    gm_intervals_cut(&known, start, end);
    end_change();
}

bool gm_is_known(const void *address, uint64_t size) {
    uintptr_t start = (uintptr_t)address, end = start + size;
    if (nothing_known()) return size == 0;
    pthread_mutex_lock(&lock);
    bool covered = gm_intervals_cover(&known, start, end);
    pthread_mutex_unlock(&lock);
    return covered;
}

/* Returns whether a piece of `size` bytes may be stored; a large one is deducted from the budget. */
static bool take(uint64_t size) {
    if (size <= SMALL_PIECE) return true;
    uint64_t left = budget;
    while (size <= largest_piece && size <= left)
        if (atomic_compare_exchange_weak(&budget, &left, left - size)) return true;
    return false;
}

/* Marks bytes as known that are there or are about to be written; false: not possible. */
bool gm_open_for_writing(void *address, uint64_t size) {
    uintptr_t start = (uintptr_t)address, end = start + size;
    begin_change(start, end);
    bool ok = take(size) && back(start, end);
    if (ok) mark(start, end);
    else gm_intervals_cut(&known, start, end);
    end_change();
    return ok;
}

/* ---- copies and memsets ---- */

void gm_write(void *address, const void *bytes, uint64_t size) {
    if (size && gm_open_for_writing(address, size)) memmove(address, bytes, size);
}

bool gm_read(const void *address, void *out, uint64_t size) {
    if (!gm_is_known(address, size)) return false;
    memmove(out, address, size);
    return true;
}

/* Copies each known part of the source. */
void gm_copy(void *to, const void *from, uint64_t size) {
    uintptr_t start = (uintptr_t)from, end = start + size;
    if (to == from) return;
    if (gm_is_known(from, size)) { /* in one call: the two may overlap */
        gm_write(to, from, size);
        return;
    }
    gm_forget(to, size);
    for (gm_interval piece = {start, start};;) {
        pthread_mutex_lock(&lock);
        bool any = gm_intervals_next(&known, &piece, end);
        pthread_mutex_unlock(&lock);
        if (!any) return;
        gm_write((char *)to + (piece.start - start), (const void *)piece.start, piece.end - piece.start);
    }
}

/* Zeros cost nothing: pages that were never written are zeros, and a large number of whole pages is returned to the host. */
static void fill_zeros(uintptr_t start, uintptr_t end) {
    begin_change(start, end);
    if (end - start > largest_piece && end - start > 2 * PAGE) give_back(page_end(start), page_of(end));
    for (gm_interval part = {start, start}; gm_intervals_next(&backed, &part, end);)
        memset((void *)part.start, 0, part.end - part.start);
    if (can_be_known(start, end)) mark(start, end);
    end_change();
}

void gm_fill(void *address, int value, uint64_t size) {
    if (!size) return;
    if (!(value & 0xff)) fill_zeros((uintptr_t)address, (uintptr_t)address + size);
    else if (gm_open_for_writing(address, size)) memset(address, value, size);
}

/* ---- functions that Python calls ---- */

/* Returns the limits in bytes: of a small piece, of the largest piece, of the sum of all pieces larger than small ones,
 * of pages that use host memory without and with such pieces, and of unknown results. */
GM_API void gpumem_value_limits(uint64_t out[6]) {
    const uint64_t limits[] = {SMALL_PIECE, LARGEST_PIECE, BUDGET, BACKED_SMALL, BACKED, LOST};
    memcpy(out, limits, sizeof limits);
}

/* Sets the maximum bytes of a stored piece, of all larger than small pieces together from now on, and of pages that use
 * host memory. */
GM_API void gpumem_set_value_limits(uint64_t piece, uint64_t sum, uint64_t backing) {
    largest_piece = piece;
    budget = sum;
    if (sum) lost = 0; /* a budget begins; it can end once */
    most_backed = backing;
}

bool gm_note_lost(uint64_t size) {
    uint64_t before = atomic_fetch_add_explicit(&lost, size, memory_order_relaxed);
    return before <= LOST && before + size > LOST;
}

uint64_t gm_small_piece(void) { return SMALL_PIECE; }

uint64_t gm_largest_piece(void) { return atomic_load_explicit(&largest_piece, memory_order_relaxed); }

uint64_t gm_value_budget(void) { return atomic_load_explicit(&budget, memory_order_relaxed); }

/* Returns the bytes of larger than small pieces that may still be written. */
GM_API uint64_t gpumem_value_budget(void) { return gm_value_budget(); }

/* Returns the bytes known now, and the bytes of pages that may use host memory. */
GM_API void gpumem_values(uint64_t out[2]) {
    pthread_mutex_lock(&lock);
    out[0] = known.total;
    out[1] = backed.total;
    pthread_mutex_unlock(&lock);
}

/* While Python computes values, it declares which bytes are known: an operator's launch changes nothing. */
GM_API void gpumem_compute_values(int on) { atomic_store(&computing, on); }
GM_API void gpumem_count_operators(int change) { gm_count_operators(change); }

/* Whether the byte at an address is known or deferred. */
bool gm_could_know(const void *address) {
    uintptr_t start = (uintptr_t)address;
    if (nothing_known()) return false;
    pthread_mutex_lock(&lock);
    bool could = gm_intervals_cover(&known, start, start + 1) || gm_deferred_at(start, start + 1);
    pthread_mutex_unlock(&lock);
    return could;
}

GM_API bool gpumem_is_known(const void *address, uint64_t size) { return gm_is_known(address, size); }
GM_API void gpumem_forget(const void *address, uint64_t size) { gm_forget(address, size); }
GM_API void gpumem_fill_zeros(void *address, uint64_t size) { gm_fill(address, 0, size); }

/* Marks bytes as known for Python to write; 0: they would use too much host memory, or are not device memory. */
GM_API bool gpumem_open_for_writing(void *address, uint64_t size) { return gm_open_for_writing(address, size); }

/* Records that Python could compute the values there, which are unknown; returns the range's number, or 0: another
 * process may write there. */
GM_API uint64_t gpumem_defer(const void *address, uint64_t size) {
    uintptr_t start = (uintptr_t)address, end = start + size;
    begin_change(start, end);
    gm_intervals_cut(&known, start, end);
    uint64_t number = can_be_known(start, end) ? gm_deferred_add(start, end) : 0;
    end_change();
    return number;
}

/* Returns the number of the deferred range that contains all of these bytes; 0: none. */
GM_API uint64_t gpumem_deferred_at(const void *address, uint64_t size) {
    pthread_mutex_lock(&lock);
    uint64_t number = gm_deferred_at((uintptr_t)address, (uintptr_t)address + size);
    pthread_mutex_unlock(&lock);
    return number;
}

/* Like gpumem_open_for_writing, for the values of a deferred range, which stays deferred. The limits on a piece's size
 * and on the sum of pieces do not apply. */
GM_API bool gpumem_open_deferred(void *address, uint64_t size) {
    uintptr_t start = (uintptr_t)address, end = start + size;
    pthread_mutex_lock(&lock);
    bool ok = back(start, end);
    if (ok) mark(start, end);
    end_change();
    return ok;
}
