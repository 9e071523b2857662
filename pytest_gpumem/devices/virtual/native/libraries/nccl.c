/* NCCL: communicators are tokens, and a collective's result is not known, as a kernel's is not. But where this process
 * knows the bytes that it gives (values.c), small ones that a program compares or agrees on, every other rank is
 * taken to give the same: they run the same program. The device memory that NCCL takes for itself, outside of PyTorch's
 * allocator, is not charged.
 */
#include "runtime/runtime.h"

#include <stdlib.h>
#include <string.h>

enum { INTERNAL_ERROR = 3 };

/* ALONE: one rank of a world of other processes, which need not exist. TOGETHER: all ranks are devices of
 * this process. SPLIT: a part of such a world, of how many ranks is not known. */
enum { ALONE, TOGETHER, SPLIT };

typedef struct {
    int ranks, rank, device, kind;
} communicator;

typedef struct {
    char bytes[128];
} unique_id;

static int new_communicator(communicator **out, int ranks, int rank, int kind) {
    if (!gm_visible()) return INTERNAL_ERROR;
    *out = malloc(sizeof **out);
    if (!*out) return INTERNAL_ERROR;
    **out = (communicator){ranks, rank, gm_current_device(), kind};
    return GM_SUCCESS;
}

GM_API int ncclGetVersion(int *version) {
    *version = 22800;
    return GM_SUCCESS;
}

GM_API const char *ncclGetErrorString(int status) { return status ? "not supported by the virtual GPU" : "no error"; }

GM_API const char *ncclGetLastError(void *c) {
    (void)c;
    return "";
}

GM_API int ncclGetUniqueId(unique_id *id) {
    memset(id, 0, sizeof *id);
    return GM_SUCCESS;
}

GM_API int ncclCommInitRank(communicator **out, int ranks, unique_id id, int rank) {
    (void)id;
    return new_communicator(out, ranks, rank, ALONE);
}

GM_API int ncclCommInitRankConfig(communicator **out, int ranks, unique_id id, int rank, void *config) {
    (void)id, (void)config;
    return new_communicator(out, ranks, rank, ALONE);
}

GM_API int ncclCommInitRankScalable(communicator **out, int ranks, int rank, int ids, unique_id *id, void *config) {
    (void)ids, (void)id, (void)config;
    return new_communicator(out, ranks, rank, ALONE);
}

GM_API int ncclCommInitAll(communicator **out, int count, const int *devices) {
    for (int i = 0; i < count; i++) {
        int status = new_communicator(&out[i], count, i, TOGETHER);
        if (status) return status;
        out[i]->device = devices ? devices[i] : i;
    }
    return GM_SUCCESS;
}

GM_API int ncclCommSplit(communicator *c, int color, int key, communicator **out, void *config) {
    (void)key, (void)config;
    if (color < 0) {
        *out = NULL;
        return GM_SUCCESS;
    }
    return new_communicator(out, c->ranks, c->rank, SPLIT);
}

static int delete_communicator(communicator *c) {
    free(c);
    return GM_SUCCESS;
}

GM_API int ncclCommDestroy(communicator *c) { return delete_communicator(c); }
GM_API int ncclCommAbort(communicator *c) { return delete_communicator(c); }

GM_API int ncclCommFinalize(communicator *c) {
    (void)c;
    return GM_SUCCESS;
}

GM_API int ncclCommCount(const communicator *c, int *count) {
    *count = c->ranks;
    return GM_SUCCESS;
}

GM_API int ncclCommUserRank(const communicator *c, int *rank) {
    *rank = c->rank;
    return GM_SUCCESS;
}

GM_API int ncclCommCuDevice(const communicator *c, int *device) {
    *device = c->device;
    return GM_SUCCESS;
}

GM_API int ncclCommGetAsyncError(communicator *c, int *error) {
    (void)c;
    *error = 0;
    return GM_SUCCESS;
}

GM_API int ncclCommRegister(const communicator *c, void *buffer, size_t size, void **handle) {
    (void)c, (void)size;
    *handle = buffer;
    return GM_SUCCESS;
}

GM_API int ncclCommDeregister(const communicator *c, void *handle) {
    (void)c, (void)handle;
    return GM_SUCCESS;
}

GM_API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, communicator *c) {
    (void)scalar, (void)type, (void)residence, (void)c;
    *operation = 5; /* the first after NCCL's own (ncclNumOps) */
    return GM_SUCCESS;
}

GM_API int ncclRedOpDestroy(int operation, communicator *c) {
    (void)operation, (void)c;
    return GM_SUCCESS;
}

/* ---- collectives ---- */

/* ncclDataType_t, ncclRedOp_t; lower precisions are not calculated with */
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum { SUM, PROD, MAX, MIN };
enum { EXACT = 1 << 24 }; /* whole numbers up to this are exact in FLOAT32, in any order of adding */

static uint64_t width(int type) {
    switch (type) {
    case INT32: case UINT32: case FLOAT32: return 4;
    case INT64: case UINT64: case FLOAT64: return 8;
    case FLOAT16: case BFLOAT16: return 2;
    default: return 1;
    }
}

/* Whether every rank holds the bytes that this one holds, and a collective on this stream works on them at once. */
static bool certain(const communicator *c, void *on) {
    int capturing = 0;
    cudaStreamIsCapturing(on, &capturing);
    return c->kind == ALONE && !capturing;
}

static int started(const communicator *c) { return c && gm_visible() ? GM_SUCCESS : INTERNAL_ERROR; }

static uint64_t multiplied(uint64_t value, int ranks, int operation) {
    uint64_t product = value;
    if (operation == SUM) return value * (uint64_t)ranks;
    for (int i = 1; i < ranks; i++) product *= value;
    return product;
}

/* The sum of a whole number over the ranks, if that does not depend on the order. */
static bool add(double *value, int ranks) {
    double sum = *value * ranks;
    if (!(sum > -EXACT && sum < EXACT) || *value != (double)(int64_t)*value) return false;
    *value = sum;
    return true;
}

/* Reduces values that every rank has alike; false where the result is not certain. */
static bool reduce(unsigned char *bytes, size_t count, int type, int operation, int ranks) {
    if (operation == MAX || operation == MIN || ranks == 1) return operation <= MIN;
    if (operation != SUM && operation != PROD) return false;
    for (size_t i = 0; i < count; i++) {
        unsigned char *at = bytes + i * width(type);
        uint64_t whole = 0;
        float single;
        double number;
        switch (type) {
        case INT8: case UINT8: case INT32: case UINT32: case INT64: case UINT64: /* low bits, little end first */
            memcpy(&whole, at, width(type));
            whole = multiplied(whole, ranks, operation);
            memcpy(at, &whole, width(type));
            break;
        case FLOAT32:
            memcpy(&single, at, sizeof single);
            number = single;
            if (operation != SUM || !add(&number, ranks)) return false;
            single = (float)number;
            memcpy(at, &single, sizeof single);
            break;
        case FLOAT64:
            memcpy(&number, at, sizeof number);
            if (operation != SUM || !add(&number, ranks)) return false;
            memcpy(at, &number, sizeof number);
            break;
        default: return false;
        }
    }
    return true;
}

GM_API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, communicator *c, void *on) {
    uint64_t size = count * width(type);
    if (started(c)) return INTERNAL_ERROR;
    bool known = certain(c, on) && gm_is_known(from, size);
    if (known && from != to) gm_copy(to, from, size);
    if (!known || !gm_open_for_writing(to, size) || !reduce(to, count, type, operation, c->ranks)) gm_forget(to, size);
    return GM_SUCCESS;
}

GM_API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, communicator *c,
                      void *on) {
    if (started(c)) return INTERNAL_ERROR;
    return root == c->rank ? ncclAllReduce(from, to, count, type, operation, c, on) : GM_SUCCESS;
}

/* A rank that is not the root has got the root's bytes already where it is sure to have the same. */
GM_API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, communicator *c, void *on) {
    uint64_t size = count * width(type);
    if (started(c)) return INTERNAL_ERROR;
    if (root == c->rank && from != to) gm_copy(to, from, size);
    if (root != c->rank && (from != to || !certain(c, on))) gm_forget(to, size);
    return GM_SUCCESS;
}

GM_API int ncclBcast(void *buffer, size_t count, int type, int root, communicator *c, void *on) {
    return ncclBroadcast(buffer, buffer, count, type, root, c, on);
}

GM_API int ncclAllGather(const void *from, void *to, size_t count, int type, communicator *c, void *on) {
    uint64_t size = count * width(type);
    if (started(c)) return INTERNAL_ERROR;
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
    (void)from, (void)operation, (void)on;
    if (started(c)) return INTERNAL_ERROR;
    gm_forget(to, count * width(type));
    return GM_SUCCESS;
}

GM_API int ncclSend(const void *from, size_t count, int type, int peer, communicator *c, void *on) {
    (void)from, (void)count, (void)type, (void)peer, (void)on;
    return started(c);
}

GM_API int ncclRecv(void *to, size_t count, int type, int peer, communicator *c, void *on) {
    (void)peer, (void)on;
    if (started(c)) return INTERNAL_ERROR;
    gm_forget(to, count * width(type));
    return GM_SUCCESS;
}

/* Which of its bytes a rank gets from which one is not told apart. */
static int exchanged(const communicator *c) {
    gm_forget_all();
    return started(c);
}

GM_API int ncclAlltoAll(const void *from, void *to, size_t count, int type, communicator *c, void *on) {
    (void)from, (void)to, (void)count, (void)type, (void)on;
    return exchanged(c);
}

GM_API int ncclGather(const void *from, void *to, size_t count, int type, int root, communicator *c, void *on) {
    (void)from, (void)to, (void)count, (void)type, (void)root, (void)on;
    return exchanged(c);
}

GM_API int ncclGroupStart(void) { return gm_visible() ? GM_SUCCESS : INTERNAL_ERROR; }
GM_API int ncclGroupEnd(void) { return gm_visible() ? GM_SUCCESS : INTERNAL_ERROR; }
