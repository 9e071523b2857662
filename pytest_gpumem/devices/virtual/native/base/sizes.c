/* Sizes of workspaces that a library chooses and no manual documents: they lie in a range, of which a run uses one size.
 *
 * - Estimates: the usual, the smallest or the largest size.
 * - Sizes of which only an upper bound is known: zero, or the bound.
 * - cuDNN plans that PyTorch times with torch.backends.cudnn.benchmark. It allocates the largest workspace of all that
 *   fit, runs the first plans (torch.backends.cudnn.benchmark_limit of them), and caches the fastest until the process
 *   ends. (ATen/native/cudnn/Conv_v8.cpp: generate_and_filter_plans, get_plans_from_find, run_single_conv.) Which one is
 *   fastest on a GPU is not known: here the one with the largest workspace is made the fastest. A virtual GPU must cache
 *   no plan, since PyTorch would use it for every later test and card. So a graph whose plans were timed has from then on
 *   only the plans with the largest workspace, and those with the smallest in case that does not fit. A run that uses the
 *   smallest sizes has only the latter from the start: what PyTorch allocates to time other plans is cuDNN's choice too. */
#include "base/base.h"

#include <pthread.h>
#include <stdatomic.h>

enum { USUAL, LEAST, MOST }; /* for gpumem_take_sizes */

typedef struct {
    uint64_t graph, least, most; /* bytes of the plans' workspaces */
    bool kept;                   /* in this run: PyTorch has cached its plan by now */
} timed;

static timed *plans;
static size_t plan_count, plan_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int end_of_range;

/* The ranges that were queried, in order: with them and a run's requests the range of its peaks is computed. */
enum { MAX_NOTES = 1 << 20 };
typedef struct note {
    uint64_t time, address, least, usual, most, graph; /* time: nanoseconds since 1970 */
    int64_t use;
} note;
static note *notes;
static size_t note_count, note_room;
static bool notes_are_lost;
static atomic_ullong smaller, larger, choices, bounded;

/* at::native::_cudnn_set_conv_benchmark_empty_cache: PyTorch empties its cache after timing plans. If a GPU's PyTorch
 * would have cached the plan, it times none and empties nothing. */
static void (*_Atomic set_emptying)(bool);
static atomic_bool emptying_is_off;

static void add_note(note added) {
    added.time = gm_now();
    pthread_mutex_lock(&lock);
    if (note_count < MAX_NOTES && gm_grow(&notes, &note_room, note_count, sizeof *notes)) notes[note_count++] = added;
    else notes_are_lost = true;
    pthread_mutex_unlock(&lock);
}

void gm_workspace_in_use(gm_use use, const void *address, uint64_t least, uint64_t usual, uint64_t most,
                         uint64_t graph) {
    if (least < most || graph) add_note((note){0, (uint64_t)(uintptr_t)address, least, usual, most, graph, use});
}

void gm_workspaces_end(void) { add_note((note){.use = GM_HELD_END}); }

uint64_t gm_size_between(gm_use use, uint64_t least, uint64_t usual, uint64_t most) {
    if (least < most && use < GM_IN_USE) add_note((note){0, 0, least, usual, most, 0, use});
    if (least < usual) atomic_fetch_add_explicit(&smaller, 1, memory_order_relaxed);
    if (usual < most) atomic_fetch_add_explicit(&larger, 1, memory_order_relaxed);
    int end = atomic_load(&end_of_range);
    return end == LEAST ? least : end == MOST ? most : usual;
}

uint64_t gm_size_up_to(gm_use use, uint64_t most) {
    if (most) atomic_fetch_add_explicit(&bounded, 1, memory_order_relaxed);
    return gm_size_between(use, 0, 0, most);
}

static timed *find_timed(uint64_t graph) {
    for (size_t i = 0; i < plan_count; i++)
        if (plans[i].graph == graph) return &plans[i];
    return NULL;
}

/* Approximates the binary logarithm, so that times between 1 and 2 ms distinguish all sizes, also the largest. */
static float logarithm(uint64_t size) {
    int exponent = 63 - __builtin_clzll(size | 1);
    return (float)exponent + (float)((double)size / (double)(1ULL << exponent) - 1);
}

float gm_plan_milliseconds(uint64_t graph, uint64_t workspace) {
    pthread_mutex_lock(&lock);
    timed *t = find_timed(graph);
    if (!t && gm_grow(&plans, &plan_room, plan_count, sizeof *t)) {
        t = &plans[plan_count++];
        *t = (timed){graph, workspace, workspace, false};
    }
    if (t) {
        if (workspace < t->least) t->least = workspace;
        if (workspace > t->most) t->most = workspace;
        t->kept = true;
    }
    if (t && t->least < t->most) atomic_fetch_add_explicit(&choices, 1, memory_order_relaxed);
    pthread_mutex_unlock(&lock);
    return 2 - logarithm(workspace + 1) / 64;
}

static void empty_cache(bool on) {
    void (*set)(bool) = atomic_load(&set_emptying);
    if (set && atomic_exchange(&emptying_is_off, !on) == on) set(on);
}

bool gm_admits_plan(uint64_t graph, uint64_t workspace) {
    pthread_mutex_lock(&lock);
    const timed *t = find_timed(graph);
    bool admitted = !t || workspace == t->least || (workspace == t->most && atomic_load(&end_of_range) != LEAST);
    bool kept = t && t->kept;
    pthread_mutex_unlock(&lock);
    empty_cache(!kept);
    return admitted;
}

/* Uses the usual (0), the smallest (1) or the largest (2) size of all ranges from now on. Plans that were timed earlier
 * are remembered for the smallest: they determine which plan that is. */
GM_API void gpumem_take_sizes(int end) {
    atomic_store(&end_of_range, end);
    empty_cache(true);
    pthread_mutex_lock(&lock);
    note_count = 0;
    notes_are_lost = false;
    if (end != LEAST) plan_count = 0;
    for (size_t i = 0; i < plan_count; i++) plans[i].kept = false;
    pthread_mutex_unlock(&lock);
}

/* Copies the notes since the last gpumem_take_sizes, at most `room`; returns how many there are, or UINT64_MAX if some
 * are lost. For a plan that PyTorch timed, the smallest and the largest size are those of all plans of its graph. */
GM_API uint64_t gpumem_workspaces(note *out, uint64_t room) {
    pthread_mutex_lock(&lock);
    uint64_t count = notes_are_lost ? UINT64_MAX : note_count;
    if (room > note_count) room = note_count;
    for (uint64_t i = 0; i < room; i++) {
        out[i] = notes[i];
        const timed *t = out[i].graph ? find_timed(out[i].graph) : NULL;
        if (t) out[i].least = t->least, out[i].usual = out[i].most = t->most;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

GM_API void gpumem_switch_emptying(void (*set)(bool)) { atomic_store(&set_emptying, set); }

/* Returns how many sizes so far may be smaller, or larger; how many choices of plans there were; and how many of the
 * sizes that may be larger have no estimate. */
GM_API void gpumem_uncertain_sizes(uint64_t out[4]) {
    out[0] = atomic_load(&smaller);
    out[1] = atomic_load(&larger);
    out[2] = atomic_load(&choices);
    out[3] = atomic_load(&bounded);
}
