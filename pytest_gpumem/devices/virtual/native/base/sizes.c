/* Sizes of workspaces that a library chooses and no manual tells: they lie in a range, and a run takes one end of it.
 *
 * - Estimates: the size that is usual here, the least or the most.
 * - Sizes of which nothing is known but the most that they can be: zero, or the most.
 * - Plans of cuDNN's that PyTorch times with torch.backends.cudnn.benchmark. It allocates the largest workspace of all
 *   that fit, runs the first plans (torch.backends.cudnn.benchmark_limit of them), and keeps the fastest until the
 *   process ends. (ATen/native/cudnn/Conv_v8.cpp: generate_and_filter_plans, get_plans_from_find, run_single_conv.)
 *   Which one a GPU finds fastest is not known: the one with the largest workspace is made so. A virtual GPU keeps no
 *   plan, since PyTorch would have it for every later test and card. So of a graph whose plans were timed there are
 *   from then on those with the largest workspace, and those with the least for where that does not fit. A run that
 *   takes the least has the latter alone, at once: what PyTorch allocates to time others is cuDNN's choice too.
 */
#include "base/base.h"

#include <pthread.h>
#include <stdatomic.h>

enum { USUAL, LEAST, MOST }; /* of gpumem_take_sizes */

typedef struct {
    uint64_t graph, least, most; /* bytes of the plans' workspaces */
    bool kept;                   /* in this run: PyTorch has its plan by now */
} timed;

static timed *plans;
static size_t plan_count, plan_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int end_of_range;

/* The ranges that were asked for, in their order: with them the requests of a run tell the ends of its peaks. */
enum { MAX_NOTES = 1 << 20 };
typedef struct note {
    uint64_t time, address, least, usual, most, graph; /* time: nanoseconds since 1970 */
    int64_t use;
} note;
static note *notes;
static size_t note_count, note_room;
static bool notes_are_lost;
static atomic_ullong smaller, larger, choices, bounded;

/* at::native::_cudnn_set_conv_benchmark_empty_cache: PyTorch empties its cache once it has timed plans. Where it would
 * have kept the plan it times none and empties nothing. */
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

/* To the base 2, nearly. Times that lie between 1 and 2 ms tell sizes apart, the largest too. */
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

/* Takes this end of all ranges from now on. The plans that were timed before say which is the least of them. */
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

/* Copies the notes since sizes were last taken, as many as there is room for; returns how many there are, or UINT64_MAX
 * if some are lost. Of a plan that PyTorch timed the least and the most are those of all plans of its graph. */
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

/* How many sizes were answered so far that may be smaller, or larger; how many choices of plans; and how many of the
 * larger have no estimate. */
GM_API void gpumem_uncertain_sizes(uint64_t out[4]) {
    out[0] = atomic_load(&smaller);
    out[1] = atomic_load(&larger);
    out[2] = atomic_load(&choices);
    out[3] = atomic_load(&bounded);
}
