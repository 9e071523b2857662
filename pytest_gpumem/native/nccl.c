/* NCCL: communicators are tokens and collectives move nothing, for all values are zeros. The device memory that NCCL
 * takes for itself, outside of PyTorch's allocator, is not charged.
 */
#include "gpumem.h"

#include <stdlib.h>
#include <string.h>

enum { INTERNAL_ERROR = 3 };

typedef struct {
    int ranks, rank, device;
} communicator;

typedef struct {
    char bytes[128];
} unique_id;

static int made(communicator **out, int ranks, int rank) {
    if (!gm_visible()) return INTERNAL_ERROR;
    *out = malloc(sizeof **out);
    if (!*out) return INTERNAL_ERROR;
    **out = (communicator){ranks, rank, gm_current_device()};
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
    return made(out, ranks, rank);
}

GM_API int ncclCommInitRankConfig(communicator **out, int ranks, unique_id id, int rank, void *config) {
    (void)id, (void)config;
    return made(out, ranks, rank);
}

GM_API int ncclCommInitRankScalable(communicator **out, int ranks, int rank, int ids, unique_id *id, void *config) {
    (void)ids, (void)id, (void)config;
    return made(out, ranks, rank);
}

GM_API int ncclCommInitAll(communicator **out, int count, const int *devices) {
    for (int i = 0; i < count; i++) {
        int status = made(&out[i], count, i);
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
    return made(out, c->ranks, c->rank);
}

static int freed(communicator *c) {
    free(c);
    return GM_SUCCESS;
}

GM_API int ncclCommDestroy(communicator *c) { return freed(c); }
GM_API int ncclCommAbort(communicator *c) { return freed(c); }

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

/* Every result is in device memory. */
#define COLLECTIVE(name) GM_API int name(void) { return gm_visible() ? GM_SUCCESS : INTERNAL_ERROR; }
COLLECTIVE(ncclAllGather)
COLLECTIVE(ncclAllReduce)
COLLECTIVE(ncclAlltoAll)
COLLECTIVE(ncclBcast)
COLLECTIVE(ncclBroadcast)
COLLECTIVE(ncclGather)
COLLECTIVE(ncclReduce)
COLLECTIVE(ncclReduceScatter)
COLLECTIVE(ncclSend)
COLLECTIVE(ncclRecv)
COLLECTIVE(ncclGroupStart)
COLLECTIVE(ncclGroupEnd)
