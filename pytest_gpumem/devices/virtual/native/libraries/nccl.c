/* NCCL: communicators are tokens, and the result of a collective is unknown, like that of a kernel. But small messages of
 * known bytes (values.c), which a program compares or agrees on, are exchanged: between ranks in several processes
 * (ranks.c), and between ranks that are devices of one process (collectives.c). For a lone rank, and for larger messages,
 * every other rank is assumed to contribute the same bytes: all ranks run the same program. The device memory that NCCL
 * allocates for itself, outside of PyTorch's allocator, is not charged. */
#include "libraries/collectives.h"
#include "libraries/ranks.h"
#include "runtime/runtime.h"

#include <stdlib.h>
#include <string.h>

enum { INTERNAL_ERROR = 3 };

/* ALONE: one rank of a world of other processes, which need not exist (then world is NULL). TOGETHER: all ranks are
 * devices of this process. SPLIT: a part of a world without the others, with an unknown number of ranks. */
enum { ALONE, TOGETHER, SPLIT };

typedef struct {
    int ranks, rank, device, kind;
    gm_world *world;
    gm_company *company; /* of ranks that are TOGETHER */
} communicator;

typedef struct {
    char bytes[GM_WORLD_NAME];
} unique_id;

static int new_communicator(communicator **out, int ranks, int rank, int kind) {
    if (!gm_visible()) return INTERNAL_ERROR;
    *out = malloc(sizeof **out);
    if (!*out) return INTERNAL_ERROR;
    **out = (communicator){ranks, rank, gm_current_device(), kind, NULL, NULL};
    return GM_SUCCESS;
}

static int join_world(communicator **out, int ranks, int rank, const unique_id *id) {
    int status = new_communicator(out, ranks, rank, ALONE);
    if (!status) (*out)->world = gm_world_join(id->bytes, ranks, rank);
    return status;
}

GM_API int ncclGetVersion(int *version) { *version = 22800; return GM_SUCCESS; }
GM_API const char *ncclGetErrorString(int status) { return status ? "not supported by the virtual GPU" : "no error"; }
GM_API const char *ncclGetLastError(void *c) { return ""; }
GM_API int ncclGetUniqueId(unique_id *id) { gm_world_name(id->bytes); return GM_SUCCESS; }

GM_API int ncclCommInitRank(communicator **out, int ranks, unique_id id, int rank) {
    return join_world(out, ranks, rank, &id);
}

GM_API int ncclCommInitRankConfig(communicator **out, int ranks, unique_id id, int rank, void *config) {
    return join_world(out, ranks, rank, &id);
}

GM_API int ncclCommInitRankScalable(communicator **out, int ranks, int rank, int ids, unique_id *id, void *config) {
    /* every rank has the same ids, of which one is enough here */
    return join_world(out, ranks, rank, id);
}

GM_API int ncclCommInitAll(communicator **out, int count, const int *devices) {
    if (!gm_visible()) return INTERNAL_ERROR;
    gm_company *company = gm_company_new(count);
    for (int i = 0; i < count; i++) {
        int status = new_communicator(&out[i], count, i, TOGETHER);
        if (status) return status;
        out[i]->device = devices ? devices[i] : i;
        out[i]->company = company;
    }
    return GM_SUCCESS;
}

enum { NO_COLOR = -1 };

/* Joins the part of a world that contains this rank: the ranks of its color, in the order of their keys. All ranks of the
 * world call this, and the first rank of each part names the part. */
static int join_part(communicator **out, const communicator *c, int color, int key) {
    const int own[2] = {color, key};
    int ranks = 0, rank = 0, first = -1, first_key = 0;
    unique_id id;
    gm_world_exchange(c->world, own, sizeof own);
    for (int i = 0; i < c->ranks; i++) {
        int given[2];
        const unsigned char *bytes = gm_world_bytes(c->world, i);
        if (!bytes) return color < 0 ? GM_SUCCESS : new_communicator(out, c->ranks, c->rank, SPLIT);
        memcpy(given, bytes, sizeof given);
        if (given[0] != color) continue;
        ranks++;
        if (given[1] < key || (given[1] == key && i < c->rank)) rank++;
        if (first < 0 || given[1] < first_key) first = i, first_key = given[1];
    }
    bool names = first == c->rank && color >= 0;
    if (names) gm_world_name(id.bytes);
    gm_world_exchange(c->world, names ? &id : NULL, sizeof id);
    if (color < 0) return GM_SUCCESS;
    const unsigned char *name = gm_world_bytes(c->world, first);
    if (!name) return new_communicator(out, c->ranks, c->rank, SPLIT);
    memcpy(&id, name, sizeof id);
    return join_world(out, ranks, rank, &id);
}

GM_API int ncclCommSplit(communicator *c, int color, int key, communicator **out, void *config) {
    *out = NULL;
    if (c->world) return join_part(out, c, color < 0 ? NO_COLOR : color, key);
    return color < 0 ? GM_SUCCESS : new_communicator(out, c->ranks, c->rank, SPLIT);
}

static int delete_communicator(communicator *c) {
    if (c) gm_world_leave(c->world);
    if (c) gm_company_leave(c->company);
    free(c);
    return GM_SUCCESS;
}

GM_API int ncclCommDestroy(communicator *c) { return delete_communicator(c); }
GM_API int ncclCommAbort(communicator *c) { return delete_communicator(c); }
GM_API int ncclCommCount(const communicator *c, int *count) { *count = c->ranks; return GM_SUCCESS; }
GM_API int ncclCommUserRank(const communicator *c, int *rank) { *rank = c->rank; return GM_SUCCESS; }
GM_API int ncclCommCuDevice(const communicator *c, int *device) { *device = c->device; return GM_SUCCESS; }
GM_API int ncclCommGetAsyncError(communicator *c, int *error) { *error = 0; return GM_SUCCESS; }

GM_API int ncclCommRegister(const communicator *c, void *buffer, size_t size, void **handle) {
    *handle = buffer;
    return GM_SUCCESS;
}

/* Makes a window on a buffer of every rank, a token here: NCCL's own memory is not charged. */
GM_API int ncclCommWindowRegister(communicator *c, void *buffer, size_t size, void **window, int flags) {
    return c && gm_visible() ? gm_new_descriptor(window, INTERNAL_ERROR) : INTERNAL_ERROR;
}

GM_API int ncclCommWindowDeregister(communicator *c, void *window) { return gm_delete_descriptor(window); }

GM_API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, communicator *c) {
    *operation = 5; /* the first after NCCL's own (ncclNumOps) */
    return GM_SUCCESS;
}

/* ---- collectives ---- */

enum { EXACT = 1 << 24 }; /* integers up to this are exact in FLOAT32, in any order of addition */

static bool captured(void *on) {
    int capturing = 0;
    cudaStreamIsCapturing(on, &capturing);
    return capturing;
}

/* Whether every rank has the same bytes as this one, and a collective on this stream works on them at once. */
static bool certain(const communicator *c, void *on) { return c->kind == ALONE && !captured(on); }

/* Whether the ranks are devices of this process, and this rank's part was accepted: the last rank to arrive does the
 * work. */
static bool met(const communicator *c, gm_collective what, const void *from, void *to, void *on) {
    return c->company && !captured(on) && gm_company_meet(c->company, c->rank, what, from, to);
}

static int started(const communicator *c, void *on) {
    if (!c || !gm_visible()) return INTERNAL_ERROR;
    gm_add_work(on);
    return GM_SUCCESS;
}

/* Reduces values that are equal on every rank; false if the result is not certain: a sum of non-integers depends on the
 * order. */
static bool reduce(unsigned char *bytes, size_t count, int type, int operation, int ranks) {
    if (operation == MAX || operation == MIN || (ranks == 1 && operation <= AVG)) return true;
    if (operation > PROD || type == FLOAT16 || type > (operation == PROD ? UINT64 : FLOAT64)) return false;
    size_t size = gm_element_size(type);
    for (unsigned char *at = bytes; at < bytes + count * size; at += size) {
        uint64_t whole = 0; /* low bits, little-endian */
        float single = 0;
        double number = 0;
        memcpy(type == FLOAT32 ? (void *)&single : type == FLOAT64 ? (void *)&number : (void *)&whole, at, size);
        double sum = (number += (double)single) * ranks;
        if (!(sum > -EXACT && sum < EXACT) || number != (double)(int64_t)number) return false;
        uint64_t product = whole;
        for (int i = 1; i < ranks && operation == PROD; i++) product *= whole;
        if (operation == SUM) product *= (uint64_t)ranks;
        single = (float)sum;
        memcpy(at, type == FLOAT32 ? (void *)&single : type == FLOAT64 ? (void *)&sum : (void *)&product, size);
    }
    return true;
}

/* Whether the ranks exchange their bytes for a collective on this stream; all ranks reach the same decision. */
static bool exchanges(const communicator *c, void *on, uint64_t size) {
    return c->world && size <= GM_EXCHANGED && certain(c, on);
}

static void exchange(const communicator *c, const void *from, uint64_t size) {
    gm_world_exchange(c->world, from && gm_is_known(from, size) ? from : NULL, size);
}

/* Reduces the elements that all ranks have contributed, from a byte offset on. */
static bool reduce_given(const communicator *c, unsigned char *to, uint64_t at, size_t count, int type, int operation) {
    const unsigned char **given = malloc((size_t)c->ranks * sizeof *given);
    if (!given) return false;
    for (int rank = 0; rank < c->ranks; rank++) given[rank] = gm_world_bytes(c->world, rank);
    bool ok = gm_reduce(given, c->ranks, to, at, count, type, operation);
    free(given);
    return ok;
}

/* Writes the bytes that a rank has contributed, or marks them as unknown. */
static void take(const communicator *c, int rank, void *to, uint64_t size) {
    const unsigned char *bytes = gm_world_bytes(c->world, rank);
    if (bytes && gm_open_for_writing(to, size)) memcpy(to, bytes, size);
    else gm_forget(to, size);
}

/* For a reduction to which no other rank contributes. */
static int reduce_alone(const communicator *c, const void *from, void *to, size_t count, int type, int operation,
                        void *on) {
    uint64_t size = count * gm_element_size(type);
    bool known = certain(c, on) && gm_is_known(from, size);
    if (known && from != to) gm_copy(to, from, size);
    if (!known || !gm_open_for_writing(to, size) || !reduce(to, count, type, operation, c->ranks)) gm_forget(to, size);
    return GM_SUCCESS;
}

GM_API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, communicator *c, void *on) {
    uint64_t size = count * gm_element_size(type);
    if (started(c, on)) return INTERNAL_ERROR;
    if (met(c, (gm_collective){GM_ALL_REDUCE, count, type, operation, 0}, from, to, on)) return GM_SUCCESS;
    if (exchanges(c, on, size)) {
        exchange(c, from, size);
        if (!reduce_given(c, to, 0, count, type, operation)) gm_forget(to, size);
        return GM_SUCCESS;
    }
    return reduce_alone(c, from, to, count, type, operation, on);
}

GM_API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, communicator *c,
                      void *on) {
    uint64_t size = count * gm_element_size(type);
    if (started(c, on)) return INTERNAL_ERROR;
    if (met(c, (gm_collective){GM_REDUCE, count, type, operation, root}, from, to, on)) return GM_SUCCESS;
    if (exchanges(c, on, size) && root != c->rank) exchange(c, from, size);
    return root == c->rank ? ncclAllReduce(from, to, count, type, operation, c, on) : GM_SUCCESS;
}

/* A rank that is not the root already has the root's bytes if all ranks are certain to have the same. */
GM_API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, communicator *c, void *on) {
    uint64_t size = count * gm_element_size(type);
    if (started(c, on)) return INTERNAL_ERROR;
    if (met(c, (gm_collective){GM_BROADCAST, count, type, SUM, root}, from, to, on)) return GM_SUCCESS;
    if (exchanges(c, on, size)) {
        exchange(c, root == c->rank ? from : NULL, size);
        take(c, root, to, size);
        return GM_SUCCESS;
    }
    if (root == c->rank && from != to) gm_copy(to, from, size);
    if (root != c->rank && (from != to || !certain(c, on))) gm_forget(to, size);
    return GM_SUCCESS;
}

GM_API int ncclBcast(void *buffer, size_t count, int type, int root, communicator *c, void *on) {
    return ncclBroadcast(buffer, buffer, count, type, root, c, on);
}

GM_API int ncclAllGather(const void *from, void *to, size_t count, int type, communicator *c, void *on) {
    uint64_t size = count * gm_element_size(type);
    if (started(c, on)) return INTERNAL_ERROR;
    if (met(c, (gm_collective){GM_ALL_GATHER, count, type, SUM, 0}, from, to, on)) return GM_SUCCESS;
    if (exchanges(c, on, size)) {
        exchange(c, from, size);
        for (int rank = 0; rank < c->ranks; rank++) take(c, rank, (char *)to + size * (uint64_t)rank, size);
        return GM_SUCCESS;
    }
    if (!certain(c, on) || !gm_is_known(from, size)) {
        if (c->kind == SPLIT) gm_forget_all();
        else gm_forget(to, size * (uint64_t)c->ranks);
        return GM_SUCCESS;
    }
    for (int rank = 0; rank < c->ranks; rank++) gm_copy((char *)to + size * (uint64_t)rank, from, size);
    return GM_SUCCESS;
}

GM_API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, communicator *c,
                             void *on) {
    uint64_t size = count * gm_element_size(type), all = size * (uint64_t)(c ? c->ranks : 0);
    if (started(c, on)) return INTERNAL_ERROR;
    if (met(c, (gm_collective){GM_REDUCE_SCATTER, count, type, operation, 0}, from, to, on)) return GM_SUCCESS;
    if (exchanges(c, on, all)) {
        exchange(c, from, all);
        if (!reduce_given(c, to, size * (uint64_t)c->rank, count, type, operation)) gm_forget(to, size);
        return GM_SUCCESS;
    }
    return reduce_alone(c, (const char *)from + size * (uint64_t)c->rank, to, count, type, operation, on);
}

GM_API int ncclSend(const void *from, size_t count, int type, int peer, communicator *c, void *on) {
    return started(c, on);
}

GM_API int ncclRecv(void *to, size_t count, int type, int peer, communicator *c, void *on) {
    if (started(c, on)) return INTERNAL_ERROR;
    gm_forget(to, count * gm_element_size(type));
    return GM_SUCCESS;
}

/* All-to-all exchanges and gathers: which bytes a rank receives from which rank is not tracked. */
static int exchanged(const communicator *c, void *on) {
    gm_work_next_on(on);
    gm_forget_all();
    return c && gm_visible() ? GM_SUCCESS : INTERNAL_ERROR;
}

GM_API int ncclAlltoAll(const void *from, void *to, size_t count, int type, communicator *c, void *on) {
    return exchanged(c, on);
}

GM_API int ncclGather(const void *from, void *to, size_t count, int type, int root, communicator *c, void *on) {
    return exchanged(c, on);
}

GM_API int ncclGroupStart(void) { return gm_visible() ? GM_SUCCESS : INTERNAL_ERROR; }
GM_API int ncclGroupEnd(void) { return gm_visible() ? GM_SUCCESS : INTERNAL_ERROR; }
