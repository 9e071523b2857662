/* What collectives compute from the bytes that ranks contribute, if all of these are known.
 *
 * Ranks that are devices of one process (ncclCommInitAll: DataParallel, torch.cuda.comm) call NCCL one after the other,
 * between ncclGroupStart and ncclGroupEnd, or each on its own thread. The last rank to reach a collective performs it for
 * all: the other ranks' tensors must not change until then, as NCCL requires. */
#include "libraries/collectives.h"
#include "base/base.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

uint64_t gm_element_size(int type) {
    switch (type) {
    case INT32: case UINT32: case FLOAT32: return 4;
    case INT64: case UINT64: case FLOAT64: return 8;
    case FLOAT16: case BFLOAT16: return 2;
    default: return 1;
    }
}

#define REDUCE(TYPE, SUM_TYPE)                                                                                         \
    do {                                                                                                               \
        SUM_TYPE total = 0;                                                                                            \
        for (int rank = 0; rank < ranks; rank++) {                                                                     \
            TYPE value;                                                                                                \
            memcpy(&value, given[rank] + at, sizeof value);                                                            \
            if (!rank) total = (SUM_TYPE)value;                                                                        \
            else if (operation == PROD) total *= (SUM_TYPE)value;                                                      \
            else if (operation == MAX) total = (SUM_TYPE)value > total ? (SUM_TYPE)value : total;                      \
            else if (operation == MIN) total = (SUM_TYPE)value < total ? (SUM_TYPE)value : total;                      \
            else total += (SUM_TYPE)value;                                                                             \
        }                                                                                                              \
        if (operation == AVG) total /= (SUM_TYPE)ranks;                                                                \
        TYPE result = (TYPE)total;                                                                                     \
        memcpy(to, &result, sizeof result);                                                                            \
    } while (0)

bool gm_reduce(const unsigned char *const *given, int ranks, unsigned char *to, uint64_t at, size_t count, int type,
               int operation) {
    for (int rank = 0; rank < ranks; rank++)
        if (!given[rank]) return false;
    uint64_t size = gm_element_size(type);
    bool is_float = type == FLOAT32 || type == FLOAT64;
    if (operation > AVG || !(is_float || type <= UINT64) || !gm_open_for_writing(to, count * size)) return false;
    for (size_t i = 0; i < count; i++, to += size, at += size) {
        switch (type) {
        case INT8: REDUCE(int8_t, int64_t); break;
        case UINT8: REDUCE(uint8_t, uint64_t); break;
        case INT32: REDUCE(int32_t, int64_t); break;
        case UINT32: REDUCE(uint32_t, uint64_t); break;
        case INT64: REDUCE(int64_t, __int128); break;
        case UINT64: REDUCE(uint64_t, unsigned __int128); break;
        case FLOAT32: REDUCE(float, double); break;
        default: REDUCE(double, double);
        }
    }
    return true;
}

/* ---- ranks of one process ---- */

/* A collective that some of the ranks have reached. */
typedef struct meeting {
    uint64_t number;
    gm_collective what;
    int came;
    struct meeting *next;
    struct {
        const unsigned char *from;
        unsigned char *to;
    } parts[]; /* for each rank */
} meeting;

struct gm_company {
    pthread_mutex_t lock;
    int ranks, members;
    meeting *open;      /* in order of their numbers */
    uint64_t numbers[]; /* number of each rank's last collective */
};

gm_company *gm_company_new(int ranks) {
    gm_company *company = calloc(1, sizeof *company + (size_t)ranks * sizeof *company->numbers);
    if (!company) return NULL;
    pthread_mutex_init(&company->lock, NULL);
    company->ranks = company->members = ranks;
    return company;
}

void gm_company_leave(gm_company *company) {
    if (!company) return;
    pthread_mutex_lock(&company->lock);
    bool last = !--company->members;
    pthread_mutex_unlock(&company->lock);
    if (!last) return;
    for (meeting *m = company->open, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    pthread_mutex_destroy(&company->lock);
    free(company);
}

/* Returns the bytes that a rank contributes, if they are known. */
static const unsigned char *known(const void *from, uint64_t size) { return gm_is_known(from, size) ? from : NULL; }

static void reduce_part(const meeting *m, int ranks, unsigned char *to, uint64_t at) {
    const gm_collective *what = &m->what;
    uint64_t size = what->count * gm_element_size(what->type);
    const unsigned char **given = malloc((size_t)ranks * sizeof *given);
    for (int rank = 0; rank < ranks && given; rank++)
        given[rank] = known(m->parts[rank].from + at, size) ? m->parts[rank].from : NULL;
    if (!given || !gm_reduce(given, ranks, to, at, what->count, what->type, what->operation)) gm_forget(to, size);
    free(given);
}

static void carry_out(const meeting *m, int ranks) {
    const gm_collective *what = &m->what;
    uint64_t size = what->count * gm_element_size(what->type);
    switch (what->kind) {
    case GM_BROADCAST:
        for (int rank = 0; rank < ranks; rank++) gm_copy(m->parts[rank].to, m->parts[what->root].from, size);
        break;
    case GM_REDUCE: reduce_part(m, ranks, m->parts[what->root].to, 0); break;
    case GM_ALL_REDUCE: /* a result may overwrite its rank's input: the other results are copies of the first */
        reduce_part(m, ranks, m->parts[0].to, 0);
        for (int rank = 1; rank < ranks; rank++) gm_copy(m->parts[rank].to, m->parts[0].to, size);
        break;
    case GM_ALL_GATHER:
        for (int rank = 0; rank < ranks; rank++)
            for (int other = 0; other < ranks; other++)
                gm_copy(m->parts[rank].to + size * (uint64_t)other, m->parts[other].from, size);
        break;
    case GM_REDUCE_SCATTER:
        for (int rank = 0; rank < ranks; rank++) reduce_part(m, ranks, m->parts[rank].to, size * (uint64_t)rank);
        break;
    }
}

bool gm_company_meet(gm_company *company, int rank, gm_collective what, const void *from, void *to) {
    pthread_mutex_lock(&company->lock);
    uint64_t number = ++company->numbers[rank];
    meeting **at = &company->open;
    while (*at && (*at)->number != number) at = &(*at)->next;
    meeting *m = *at;
    if (!m) {
        m = *at = calloc(1, sizeof *m + (size_t)company->ranks * sizeof *m->parts);
        if (m) m->number = number, m->what = what;
    }
    if (m) {
        m->parts[rank].from = from;
        m->parts[rank].to = to;
    }
    bool complete = m && ++m->came == company->ranks;
    if (complete) *at = m->next;
    pthread_mutex_unlock(&company->lock);
    if (!complete) return m != NULL;
    carry_out(m, company->ranks);
    free(m);
    return true;
}
