/* Drives the native library from many threads, linked with its sources, under a sanitizer
 * (tests/devices/virtual/native/test_sanitizers.py). Ends with 0 and "clean" where every account is back at zero. */
#define _GNU_SOURCE
#include "base/base.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 8, ROUNDS = 1000, LIVE = 64 };
#define MIB ((size_t)1 << 20)
#define PAGE (2 * MIB)

extern void gpumem_set_card(const gm_card *card);
extern int gpumem_show(int count);
extern void gpumem_account(int device, gm_account *out);
extern int gpumem_unsupported_count(void);
extern const char *gpumem_unsupported_name(int index, uint64_t *calls);
extern int cudaSetDevice(int device), cudaMalloc(void **address, size_t size), cudaFree(void *address);
extern int cudaHostAlloc(void **address, size_t size, unsigned flags), cudaFreeHost(void *address);
extern int cudaMemcpy(void *to, const void *from, size_t size, int kind);
extern int cudaMemset(void *address, int value, size_t size);
extern int cudaLaunchKernelExC(const void *config, const void *function, void **args);
extern int cudaMemGetInfo(size_t *unused, size_t *total);
extern int cudaPointerGetAttributes(void *out, const void *pointer);
extern int cudaGetDeviceProperties(void *prop, int device), cudaGetDeviceProperties_v2(void *prop, int device);
extern int cudaFuncGetAttributes(void *out, const void *function);
extern int cudaStreamCreate(void **out), cudaStreamDestroy(void *stream);
extern int cudaStreamBeginCapture(void *stream, int mode), cudaStreamEndCapture(void *stream, void **graph);
extern int cudaStreamWaitEvent(void *stream, void *event, unsigned flags);
extern int cudaGraphInstantiate(void **out, void *graph, unsigned long long flags);
extern int cudaGraphLaunch(void *graph, void *stream), cudaGraphDestroy(void *), cudaGraphExecDestroy(void *);
extern int cudaEventCreate(void **out), cudaEventRecord(void *, void *), cudaEventDestroy(void *);
extern int cudaEventQuery(void *event), cudaEventSynchronize(void *event), cudaStreamSynchronize(void *stream);
extern int cudaDeviceSynchronize(void);
extern int cudaMallocManaged(void **, size_t, unsigned), cudaMemAdvise(const void *, size_t, int, uint64_t);
extern int cudaUserObjectCreate(void **, void *, void (*)(void *), unsigned, unsigned);
extern int cudaGraphRetainUserObject(void *, void *, unsigned, unsigned);
extern int cuMemAddressReserve(uintptr_t *, size_t, size_t, uintptr_t, unsigned long long);
extern int cuMemAddressFree(uintptr_t, size_t), cuMemUnmap(uintptr_t, size_t), cuMemRelease(void *);
extern int cuMemCreate(void **, size_t, const void *, unsigned long long);
extern int cuMemMap(uintptr_t, size_t, size_t, void *, unsigned long long);
extern int cuMemGetAddressRange_v2(uintptr_t *, size_t *, uintptr_t);
extern int cuDeviceGetCount(int *);
extern int cudnnBackendCreateDescriptor(int, void **), cudnnBackendDestroyDescriptor(void *);
extern int cudnnBackendSetAttribute(void *, int, int, int64_t, const void *);
extern int cudnnBackendGetAttribute(void *, int, int, int64_t, int64_t *, void *);
extern int cudnnBackendFinalize(void *), cudnnBackendExecute(void *, void *, void *);

extern int cudaDeviceGetDefaultMemPool(void **, int), cudaMemPoolTrimTo(void *, size_t);
extern int cudaMallocAsync(void **, size_t, void *), cudaFreeAsync(void *, void *);
extern int cudaMemPoolGetAttribute(void *, int, void *), cudaMemPoolSetAttribute(void *, int, void *);
typedef struct {
    char bytes[64];
} ipc_handle;
extern int cudaIpcGetMemHandle(ipc_handle *, void *), cudaIpcOpenMemHandle(void **, ipc_handle, unsigned);
extern int cudaIpcCloseMemHandle(void *);
extern int cufftCreate(int *), cufftDestroy(int);
extern int cufftXtMakePlanMany(int, int, long long *, long long *, long long, long long, int, long long *, long long,
                               long long, int, long long, size_t *, int);
extern int cusolverDnCreate(void **), cusolverDnDestroy(void *), cusolverDnSsyevd_bufferSize(void *, int, int, int,
                                                                                            void *, int, void *, int *);
extern int cusparseCreateCsr(void **, int64_t, int64_t, int64_t, void *, void *, void *, int, int, int, int);
extern int cusparseSpMatGetSize(void *, int64_t *, int64_t *, int64_t *), cusparseDestroySpMat(void *);
extern uint64_t gpumem_guessed(void), gpumem_estimated_libraries(const void **libraries);
extern void gpumem_guesses(uint64_t *counts);
extern int gpumem_queue_copy(const void *bytes, uint64_t size, int other);
extern void gpumem_drop_queued_copies(uint64_t out[4]);

static void check(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "not true: %s\n", what);
    exit(3);
}
#define CHECK(what) check(what, #what)

static unsigned next(unsigned *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void blocks(unsigned *seed) {
    void *live[LIVE] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        unsigned at = next(seed) % LIVE;
        if (live[at]) {
            char attributes[96];
            uintptr_t base;
            size_t size, unused, total;
            CHECK(cudaPointerGetAttributes(attributes, live[at]) == 0);
            CHECK(cuMemGetAddressRange_v2(&base, &size, (uintptr_t)live[at] + 1) == 0);
            CHECK(base == (uintptr_t)live[at]);
            CHECK(cudaMemGetInfo(&unused, &total) == 0);
            CHECK(cudaFree(live[at]) == 0);
            live[at] = NULL;
        } else if (cudaMalloc(&live[at], 1 + next(seed) % (16 * MIB))) {
            CHECK(live[at] == NULL);
        }
    }
    for (int at = 0; at < LIVE; at++) CHECK(cudaFree(live[at]) == 0);
}

static void mappings(unsigned *seed, int device) {
    int properties[8] = {1, 0, 1, device};
    uintptr_t start;
    CHECK(cuMemAddressReserve(&start, 64 * PAGE, 0, 0, 0) == 0);
    for (int round = 0; round < 100; round++) {
        unsigned count = 1 + next(seed) % 32;
        unsigned done = 0;
        for (void *memory; done < count && cuMemCreate(&memory, PAGE, properties, 0) == 0; done++) {
            CHECK(cuMemMap(start + done * PAGE, PAGE, 0, memory, 0) == 0);
            CHECK(cuMemRelease(memory) == 0);
        }
        if (done) CHECK(cuMemUnmap(start, done * PAGE) == 0);
    }
    CHECK(cuMemAddressFree(start, 64 * PAGE) == 0);
}

static void host(unsigned *seed, void *device) {
    for (int round = 0; round < 200; round++) {
        void *memory;
        size_t size = 1 + next(seed) % 9000;
        CHECK(cudaHostAlloc(&memory, size, 0) == 0);
        memset(memory, 7, size);
        CHECK(cudaMemcpy(memory, device, size, 4) == 0);
        CHECK(((char *)memory)[size - 1] == 0 || ((char *)memory)[size - 1] == 7); /* others launch kernels meanwhile */
        memset(memory, 7, size);
        CHECK(cudaMemcpy((char *)device + next(seed) % 9000, memory, size, 4) == 0);
        CHECK(cudaMemset((char *)device + next(seed) % 9000, 7, size) == 0);
        if (round % 50 == 0) CHECK(cudaLaunchKernelExC((char[64]){0}, NULL, NULL) == 0);
        CHECK(cudaFreeHost(memory) == 0);
    }
}

static void queued(void *device) {
    for (int round = 0; round < 100; round++) {
        uint64_t faults[4], counts[2] = {(uint64_t)round, 17}, read = 0;
        CHECK(gpumem_queue_copy(&counts[0], 8, 0) && gpumem_queue_copy(&counts[1], 8, 0) && gpumem_queue_copy("left", 4, 0));
        CHECK(cudaMemcpy(&read, device, 8, 2) == 0 && read == counts[0]);
        CHECK(cudaMemcpy(&read, device, 8, 2) == 0 && read == counts[1]);
        CHECK(cudaMemcpy(&read, device, 8, 2) == 0 && read != counts[1]);
        gpumem_drop_queued_copies(faults);
        CHECK(faults[0] == 1 && faults[1] == 1 && faults[2] == 8 && faults[3] == 4);
    }
}

static void count(void *calls) { ++*(int *)calls; }

/* No thread may ask for a device's end while another captures there; and beside a capture that is not relaxed (2), none
 * may call cudaMalloc. */
static pthread_rwlock_t capturing = PTHREAD_RWLOCK_INITIALIZER;

static void managed(void) {
    for (int round = 0; round < 200; round++) {
        void *memory, *stream, *graph, *executable, *object;
        int calls = 0;
        CHECK(cudaMallocManaged(&memory, 10000, 1) == 0);
        memset(memory, 7, 10000);
        CHECK(cudaMemAdvise(memory, 10000, 1, 1) == 0);
        CHECK(cudaFree(memory) == 0);
        pthread_rwlock_rdlock(&capturing);
        CHECK(cudaStreamCreate(&stream) == 0 && cudaStreamBeginCapture(stream, 2) == 0);
        CHECK(cudaStreamEndCapture(stream, &graph) == 0);
        pthread_rwlock_unlock(&capturing);
        CHECK(cudaUserObjectCreate(&object, &calls, count, 1, 1) == 0);
        CHECK(cudaGraphRetainUserObject(graph, object, 1, 1) == 0);
        CHECK(cudaGraphInstantiate(&executable, graph, 0) == 0 && cudaGraphDestroy(graph) == 0 && calls == 0);
        CHECK(cudaGraphExecDestroy(executable) == 0 && calls == 1 && cudaStreamDestroy(stream) == 0);
    }
}

static void captures(void) {
    for (int round = 0; round < 100; round++) {
        void *stream, *other, *event, *graph, *executable;
        CHECK(cudaStreamCreate(&stream) == 0 && cudaStreamCreate(&other) == 0 && cudaEventCreate(&event) == 0);
        pthread_rwlock_rdlock(&capturing);
        CHECK(cudaStreamBeginCapture(stream, 2) == 0 && cudaEventRecord(event, stream) == 0);
        CHECK(cudaStreamWaitEvent(other, event, 0) == 0 && cudaStreamEndCapture(stream, &graph) == 0);
        pthread_rwlock_unlock(&capturing);
        CHECK(cudaGraphInstantiate(&executable, graph, 0) == 0 && cudaGraphLaunch(executable, stream) == 0);
        CHECK(cudaGraphDestroy(graph) == 0 && cudaGraphExecDestroy(executable) == 0);
        CHECK(cudaEventDestroy(event) == 0 && cudaStreamDestroy(stream) == 0 && cudaStreamDestroy(other) == 0);
    }
}

static void waits(void) {
    for (int round = 0; round < 100; round++) {
        void *stream, *other, *event;
        CHECK(cudaStreamCreate(&stream) == 0 && cudaStreamCreate(&other) == 0 && cudaEventCreate(&event) == 0);
        CHECK(cudaEventRecord(event, stream) == 0 && cudaStreamWaitEvent(other, event, 0) == 0);
        CHECK(cudaEventQuery(event) == 0 && cudaStreamSynchronize(other) == 0);
        CHECK(cudaEventRecord(event, other) == 0 && cudaEventSynchronize(event) == 0);
        pthread_rwlock_wrlock(&capturing);
        CHECK(cudaEventRecord(event, NULL) == 0 && cudaDeviceSynchronize() == 0);
        pthread_rwlock_unlock(&capturing);
        CHECK(cudaEventDestroy(event) == 0 && cudaStreamDestroy(stream) == 0 && cudaStreamDestroy(other) == 0);
    }
}

static void descriptors(void) {
    for (int round = 0; round < 200; round++) {
        void *made;
        int64_t sizes[5] = {1, 2, 3, 4, 5}, found[5] = {0}, count = 0;
        CHECK(cudnnBackendCreateDescriptor(15, &made) == 0);
        CHECK(cudnnBackendSetAttribute(made, 900, 3, 5, sizes) == 0);
        CHECK(cudnnBackendGetAttribute(made, 900, 3, 5, &count, found) == 0);
        CHECK(count == 5 && found[4] == 5);
        CHECK(cudnnBackendDestroyDescriptor(made) == 0);
    }
}

static void *described(int type) {
    void *made;
    CHECK(cudnnBackendCreateDescriptor(type, &made) == 0);
    return made;
}

/* As cuDNN has it: a descriptor that was set in another may be destroyed before that is finalized. */
static void hand_over(void *to, int name, void *part) {
    CHECK(cudnnBackendSetAttribute(to, name, 15, 1, &part) == 0);
    CHECK(cudnnBackendDestroyDescriptor(part) == 0);
}

static void *finished(void *made) {
    CHECK(cudnnBackendFinalize(made) == 0);
    return made;
}

static void convolutions(void) {
    const char *stand_in = getenv("GPUMEM_CUDNN");
    for (int round = 0; round < 50; round++) {
        int64_t sizes[4] = {2, 3, 4, 5}, count = 0, workspace = -1;
        int mode = 0;
        void *handle = &mode, *operation = described(10), *graph = described(15), *heuristics = described(4);
        void *configuration = described(3), *plan = described(5);
        for (int name = 703; name <= 705; name++) { /* w, x, y */
            void *tensor = described(17);
            CHECK(cudnnBackendSetAttribute(tensor, 902, 3, 4, sizes) == 0);
            hand_over(operation, name, finished(tensor));
        }
        hand_over(graph, 801, finished(operation));
        CHECK(cudnnBackendSetAttribute(graph, 800, 0, 1, &handle) == 0);
        CHECK(cudnnBackendSetAttribute(heuristics, 200, 8, 1, &mode) == 0);
        hand_over(heuristics, 201, finished(graph));
        finished(heuristics);
        CHECK(cudnnBackendGetAttribute(heuristics, 202, 15, 0, &count, NULL) == 0 && count == 1);
        CHECK(cudnnBackendGetAttribute(heuristics, 202, 15, 1, &count, &configuration) == 0 && count == 1);
        CHECK(cudnnBackendDestroyDescriptor(heuristics) == 0);
        hand_over(plan, 401, configuration);
        finished(plan);
        CHECK(cudnnBackendGetAttribute(plan, 402, 3, 1, &count, &workspace) == 0);
        CHECK(workspace == (stand_in && *stand_in == '/' ? 1000000 : 0));
        CHECK(cudnnBackendExecute(handle, plan, NULL) == 0 && cudnnBackendDestroyDescriptor(plan) == 0);
    }
}

static void pools(unsigned *seed, int device) {
    void *live[LIVE] = {0}, *pool;
    uint64_t all = UINT64_MAX, used, zero = 0;
    char attributes[96];
    CHECK(cudaDeviceGetDefaultMemPool(&pool, device) == 0 && cudaMemPoolSetAttribute(pool, 4, &all) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        unsigned at = next(seed) % LIVE;
        if (live[at]) {
            CHECK(cudaPointerGetAttributes(attributes, live[at]) == 0);
            CHECK(cudaMemPoolGetAttribute(pool, 7, &used) == 0 && used > 0);
            CHECK(cudaFreeAsync(live[at], NULL) == 0);
            live[at] = NULL;
        } else if (cudaMallocAsync(&live[at], 1 + next(seed) % MIB, NULL)) {
            CHECK(live[at] == NULL);
        }
        if (round % 100 == 0) CHECK(cudaMemPoolSetAttribute(pool, 8, &zero) == 0 && cudaMemPoolTrimTo(pool, 0) == 0);
    }
    for (int at = 0; at < LIVE; at++) CHECK(cudaFreeAsync(live[at], NULL) == 0);
    CHECK(cudaMemPoolTrimTo(pool, 0) == 0);
}

/* As if another process had made the memory: its number, behind the handle's first eight bytes, is another. */
static void shared(void *block) {
    for (int round = 0; round < 200; round++) {
        ipc_handle handle;
        char attributes[96];
        void *opened;
        CHECK(cudaIpcGetMemHandle(&handle, block) == 0);
        CHECK(cudaIpcOpenMemHandle(&opened, handle, 1) == 201);
        handle.bytes[15] ^= 1;
        CHECK(cudaIpcOpenMemHandle(&opened, handle, 1) == 0);
        CHECK(cudaPointerGetAttributes(attributes, opened) == 0);
        CHECK(cudaIpcCloseMemHandle(opened) == 0);
    }
}

static void libraries(void) {
    for (int round = 0; round < 200; round++) {
        long long n[3] = {8, 1 + round, 8};
        size_t size;
        int plan, elements;
        void *made;
        int64_t rows, columns, nonzeros;
        CHECK(cufftCreate(&plan) == 0);
        CHECK(cufftXtMakePlanMany(plan, 3, n, NULL, 1, 1, 4, NULL, 1, 1, 4, 2, &size, 4) == 0 && size > 0);
        CHECK(cufftDestroy(plan) == 0);
        CHECK(cusolverDnCreate(&made) == 0 && cusolverDnDestroy(made) == 0);
        CHECK(cusolverDnSsyevd_bufferSize(NULL, 1, 0, round, NULL, round, NULL, &elements) == 0 && elements > 0);
        CHECK(cusparseCreateCsr(&made, 3, 4, 5, NULL, NULL, NULL, 1, 1, 0, 0) == 0);
        CHECK(cusparseSpMatGetSize(made, &rows, &columns, &nonzeros) == 0 && nonzeros == 5);
        CHECK(cusparseDestroySpMat(made) == 0);
    }
    const void *libraries;
    uint64_t counts[64], total = 0;
    uint64_t estimated = gpumem_estimated_libraries(&libraries);
    CHECK(estimated > 0 && estimated <= 64);
    gpumem_guesses(counts);
    for (uint64_t i = 0; i < estimated; i++) total += counts[i];
    CHECK(total > 0 && total <= gpumem_guessed()); /* other threads go on */
}

static void queries(int device) {
    char thirteen[1008], twelve[1032], function[144];
    int count;
    CHECK(cudaGetDeviceProperties(thirteen, device) == 0 && cudaGetDeviceProperties_v2(twelve, device) == 0);
    CHECK(cudaFuncGetAttributes(function, NULL) == 0 && cuDeviceGetCount(&count) == 0);
    CHECK(gm_unsupported("cuGreenCtxCreate", 801) == 801);  /* setup.py makes the function itself */
    CHECK(gpumem_unsupported_count() >= 1 && gpumem_unsupported_name(0, NULL) != NULL);
}

static void *work(void *number) {
    unsigned seed = (unsigned)(uintptr_t)number;
    int device = (int)(seed % 2);
    void *block;
    CHECK(cudaSetDevice(device) == 0);
    queries(device);
    blocks(&seed);
    mappings(&seed, device);
    CHECK(cudaSetDevice(device + 2) == 0); /* devices of their own */
    pools(&seed, device + 2);
    CHECK(cudaSetDevice(device) == 0);
    while (cudaMalloc(&block, MIB)) {} /* others may hold it all for a moment */
    host(&seed, block);
    queued(block);
    shared(block);
    CHECK(cudaFree(block) == 0);
    managed();
    captures();
    waits();
    descriptors();
    convolutions();
    libraries();
    return NULL;
}

int main(void) {
    gm_card card = {.name = "sanitized", .total_memory = 160 * MIB, .major = 9, .sm_count = 132};
    pthread_t threads[THREADS];
    gpumem_set_card(&card);
    CHECK(gpumem_show(4) == 0);
    for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (int device = 0; device < 4; device++) {
        gm_account account;
        gpumem_account(device, &account);
        CHECK(account.charged == 0);
        if (device >= 2) continue; /* a pool grows often and shrinks at once */
        CHECK(account.mallocs == account.frees);
        CHECK(account.failures > 0 && account.peak_charged <= card.total_memory);
    }
    puts("clean");
    return 0;
}
