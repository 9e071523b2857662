/* Lets the installed cuDNN plan for a card that the machine does not have.
 *
 * Since 9.8 cuDNN plans for an absent device ("deviceless ahead-of-time compilation" in its documentation): a device
 * property descriptor takes the handle's place in heuristics, engines and plans. It is created from JSON
 * (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION) with a member for each device attribute that cuDNN reads; if a member is
 * missing, finalizing the descriptor fails, and cuDNN's log names the member. So heuristics, workspaces and refusals
 * are those of the installed cuDNN. Of the members, only the compute capability, the number of SMs and their shared
 * memory were observed to change a result.
 */
#define _GNU_SOURCE
#include "cudnn/cudnn.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MIN_VERSION = 90800,
    DEVICEPROP = 38,        /* CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR */
    DEVICEPROP_JSON = 2702, /* CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION */
};

static struct {
    size_t (*version)(void);
    size_t (*cuda_version)(void);
    const char *(*error_string)(int status);
    void (*last_error)(char *message, size_t size);
    int (*create)(int type, void **out);
    int (*destroy)(void *descriptor);
    int (*set)(void *descriptor, int name, int type, int64_t count, const void *elements);
    int (*finalize)(void *descriptor);
    int (*get)(void *descriptor, int name, int type, int64_t room, int64_t *count, void *elements);
} cudnn;
static atomic_bool opened;       /* all functions were found */
static atomic_bool asks_another; /* another file than PyTorch was linked with */
static atomic_int found_version; /* of the library, 90501 for 9.5.1; 0: none was found, or none looked up yet */

/* If cuDNN is not installed a stub has its name (devices/virtual/missing_libraries.py), and looking up its functions
 * finds this library's. */
static bool is_own(void *function) {
    Dl_info theirs, own;
    return dladdr(function, &theirs) && dladdr(&cudnn, &own) && theirs.dli_fbase == own.dli_fbase;
}

static bool look_up(void *library) {
    const struct {
        const char *name;
        void *into;
    } functions[] = {
        {"cudnnGetVersion", &cudnn.version},
        {"cudnnGetCudartVersion", &cudnn.cuda_version},
        {"cudnnGetErrorString", &cudnn.error_string},
        {"cudnnGetLastErrorString", &cudnn.last_error},
        {"cudnnBackendCreateDescriptor", &cudnn.create},
        {"cudnnBackendDestroyDescriptor", &cudnn.destroy},
        {"cudnnBackendSetAttribute", &cudnn.set},
        {"cudnnBackendFinalize", &cudnn.finalize},
        {"cudnnBackendGetAttribute", &cudnn.get},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = dlsym(library, functions[i].name);
        if (!function || is_own(function)) return false;
        memcpy(functions[i].into, &function, sizeof function);
    }
    return true;
}

/* The cuDNN that PyTorch was linked with is in the process, although PyTorch calls ours. $GPUMEM_CUDNN is the path of
 * another; with "none", no cuDNN is used. */
static void open_library(void) {
    const char *path = getenv("GPUMEM_CUDNN");
    bool path_given = path && *path;
    if (path_given && strcmp(path, "none") == 0) return;
    /* The linked cuDNN's version is not queried: for that it would look up its parts, by names that the parts of the other
     * cuDNN have as well. */
    void *linked = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);
    void *library = dlopen(path_given ? path : "libcudnn.so.9", path_given ? RTLD_LAZY : RTLD_LAZY | RTLD_NOLOAD);
    if (!library && path_given) {
        fprintf(stderr, "pytest-gpumem: GPUMEM_CUDNN: %s; give the path of a libcudnn.so.9, or none\n", dlerror());
    }
    if (!library || !look_up(library)) return;
    gm_enter_cudnn(); /* its parts may call one another by name, and find ours */
    int version = (int)cudnn.version(), major = (int)(cudnn.cuda_version() / 1000);
    gm_leave_cudnn();
    if (major != gm_cuda_version() / 1000) { /* without that CUDA's libraries its parts end the process */
        fprintf(stderr, "pytest-gpumem: GPUMEM_CUDNN: %s is made for CUDA %d, and this torch for CUDA %d: give one of "
                "nvidia-cudnn-cu%d's\n", path_given ? path : "cuDNN", major, gm_cuda_version() / 1000,
                gm_cuda_version() / 1000);
        return;
    }
    atomic_store(&asks_another, library != linked);
    atomic_store(&found_version, version);
    atomic_store(&opened, version >= MIN_VERSION);
}

static void open_once(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!gm_inside_cudnn()) pthread_once(&once, open_library);
}

int gm_installed_version(void) {
    open_once();
    return atomic_load(&found_version);
}

bool gm_asks_another_cudnn(void) {
    open_once();
    return atomic_load(&asks_another);
}

GM_API int gpumem_cudnn_found(void) { return atomic_load(&found_version); }

/* ---- cuDNN's functions ----
 *
 * Its own parts call some of them by name, and find graph.c's, which sends them back here.
 */

#define CALL(call)       \
    gm_enter_cudnn();    \
    int status = (call); \
    gm_leave_cudnn();    \
    return status

int gm_installed_create(int type, void **out) { CALL(cudnn.create(type, out)); }

int gm_installed_destroy(void *descriptor) { CALL(cudnn.destroy(descriptor)); }

int gm_installed_set(void *descriptor, int name, int type, int64_t count, const void *elements) {
    CALL(cudnn.set(descriptor, name, type, count, elements));
}

int gm_installed_finalize(void *descriptor) { CALL(cudnn.finalize(descriptor)); }

int gm_installed_get(void *descriptor, int name, int type, int64_t room, int64_t *count, void *elements) {
    CALL(cudnn.get(descriptor, name, type, room, count, elements));
}

const char *gm_installed_error_string(int status) { return atomic_load(&opened) ? cudnn.error_string(status) : NULL; }

bool gm_installed_last_error(char *message, size_t size) {
    if (!atomic_load(&opened)) return false;
    cudnn.last_error(message, size);
    return true;
}

/* ---- the card to plan for ---- */

typedef struct card {
    gm_card profile;
    void *property; /* NULL: cuDNN does not support it */
    struct card *next;
} card;

static card *cards; /* newest first */
static pthread_mutex_t cards_lock = PTHREAD_MUTEX_INITIALIZER;

static void lend_cublaslt(void) {
    void *function;
    memcpy(&function, &cudnn.version, sizeof function);
    gm_enter_cudnn();
    gm_lend_cublaslt(function);
    gm_leave_cudnn();
}

static void *make_property(const gm_card *card) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, lend_cublaslt); /* before an engine looks it up; not earlier, since it loads a large file */
    char json[1024];
    int length = snprintf(
        json, sizeof json,
        "{\"deviceName\":\"virtual GPU\",\"cudaDeviceId\":0,\"pciDeviceId\":0,\"isTccDriver\":0,"
        "\"supportCoopLaunch\":1,\"driverVer\":%d,\"deviceVer\":%d,\"multiProcessorCount\":%d,\"warpSize\":32,"
        "\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"maxThreadsPerBlock\":1024,"
        "\"maxThreadsPerSM\":%d,\"maxCtasPerSM\":%d,\"regsPerBlock\":65536,\"maxRegistersPerSM\":%d,"
        "\"maxSharedMemoryPerBlock\":%llu,\"maxSharedMemoryPerBlockOptin\":%llu,"
        "\"reservedSharedMemoryPerBlock\":%llu,\"totalGlobalMem\":%llu,\"l2CacheSize\":%llu,"
        "\"smClockRateKHz\":%d,\"memClockRateKHz\":%d}",
        gm_cuda_version(), card->major * 100 + card->minor * 10, card->sm_count, card->max_threads_per_sm,
        card->max_blocks_per_sm, card->registers_per_sm, (unsigned long long)card->shared_memory_per_block,
        (unsigned long long)card->shared_memory_per_block_optin,
        (unsigned long long)card->reserved_shared_memory_per_block, (unsigned long long)card->total_memory,
        (unsigned long long)card->l2_cache_size, card->clock_rate_khz, card->clock_rate_khz);
    void *property;
    if (gm_installed_create(DEVICEPROP, &property)) return NULL;
    if (!gm_installed_set(property, DEVICEPROP_JSON, GM_TYPE_CHAR, length, json) && !gm_installed_finalize(property))
        return property;
    gm_installed_destroy(property);
    return NULL;
}

/* ---- the first plan of a process ----
 *
 * Once cuDNN has planned a 1x1 convolution on a card before Ampere, its results for later cards in the process differ
 * from those in a fresh process: an RTX 3090 Ti's convolution then needs 1.6 MiB, instead of 8.6 in a fresh process and
 * on the GPU itself. The other way round nothing changes. So a 1x1 convolution is planned on a card with tensor cores for
 * TF32 before any other plan. */
enum { CONVOLUTION = 1, ENGINECFG = 3, FORWARD = 10, GRAPH = 15, TENSOR = 17, AMPERE = 8, CONFIGURATIONS = 16 };

/* An attribute of a descriptor: its number (cudnnBackendAttributeName_t), and the number of its type. */
typedef struct {
    int name, type;
    int64_t count;
    const void *elements;
} setting;

/* Returns a finalized descriptor; NULL: cuDNN refuses it. */
static void *made(int type, size_t count, const setting *settings) {
    void *descriptor;
    if (gm_installed_create(type, &descriptor)) return NULL;
    int status = GM_SUCCESS;
    for (const setting *s = settings; s < settings + count && !status; s++)
        status = gm_installed_set(descriptor, s->name, s->type, s->count, s->elements);
    if (!status && !gm_installed_finalize(descriptor)) return descriptor;
    gm_installed_destroy(descriptor);
    return NULL;
}

#define MADE(type, ...) \
    made(type, sizeof((setting[]){__VA_ARGS__}) / sizeof(setting), (setting[]){__VA_ARGS__})
#define DESCRIPTOR(name, component) {name, GM_TYPE_BACKEND_DESCRIPTOR, 1, &(component)}

static void *make_tensor(int64_t identity, const int64_t dimensions[4]) {
    const int32_t float32 = 0; /* CUDNN_DATA_FLOAT */
    int64_t alignment = 16, strides[4] = {1, 1, 1, 1};
    for (int i = 2; i >= 0; i--) strides[i] = strides[i + 1] * dimensions[i + 1];
    return MADE(TENSOR, {901, 1, 1, &float32}, {902, GM_TYPE_INT64, 4, dimensions}, {903, GM_TYPE_INT64, 4, strides},
                {906, GM_TYPE_INT64, 1, &identity}, {900, GM_TYPE_INT64, 1, &alignment});
}

/* The parts of the graph are kept for the lifetime of the process. */
static void *make_graph(void) {
    static const int64_t image[4] = {32, 64, 56, 56}, kernel[4] = {64, 64, 1, 1}, ones[2] = {1, 1}, zeros[2], spatial = 2;
    static const int32_t float32 = 0, cross_correlation = 1;
    const double one = 1, zero = 0;
    void *convolution = MADE(CONVOLUTION, {100, 1, 1, &float32}, {101, 7, 1, &cross_correlation},
                             {106, GM_TYPE_INT64, 1, &spatial}, {102, GM_TYPE_INT64, 2, ones},
                             {103, GM_TYPE_INT64, 2, ones}, {104, GM_TYPE_INT64, 2, zeros}, {105, GM_TYPE_INT64, 2, zeros});
    void *filter = make_tensor(1, kernel), *input = make_tensor(2, image), *output = make_tensor(3, image);
    if (!convolution || !filter || !input || !output) return NULL;
    void *operation = MADE(FORWARD, DESCRIPTOR(702, convolution), DESCRIPTOR(703, filter), DESCRIPTOR(704, input),
                           DESCRIPTOR(705, output), {700, GM_TYPE_DOUBLE, 1, &one}, {701, GM_TYPE_DOUBLE, 1, &zero});
    return operation ? MADE(GRAPH, DESCRIPTOR(801, operation)) : NULL;
}

static void plan_for_ampere(void) {
    gm_card ampere = gm_profile;
    ampere.major = AMPERE;
    ampere.minor = 0;
    void *property = make_property(&ampere), *graph = make_graph(), *results[CONFIGURATIONS];
    const int32_t by_heuristics = 3; /* CUDNN_HEUR_MODE_A */
    int64_t count = 0;
    if (!property || !graph) return;
    void *ranking = MADE(GM_ENGINEHEUR, DESCRIPTOR(201, graph), {200, 8, 1, &by_heuristics}, DESCRIPTOR(204, property));
    if (!ranking) return;
    for (int i = 0; i < CONFIGURATIONS; i++)
        if (gm_installed_create(ENGINECFG, &results[i])) return;
    gm_installed_get(ranking, 202, GM_TYPE_BACKEND_DESCRIPTOR, CONFIGURATIONS, &count, results);
    for (int64_t i = 0; i < count && i < CONFIGURATIONS; i++)
        MADE(GM_EXECUTION_PLAN, DESCRIPTOR(401, results[i]), DESCRIPTOR(407, property));
}

/* No other difference between two cards was observed to change a plan. */
static bool same_chip(const gm_card *a, const gm_card *b) {
    return a->major == b->major && a->minor == b->minor && a->sm_count == b->sm_count &&
           a->shared_memory_per_block == b->shared_memory_per_block &&
           a->shared_memory_per_block_optin == b->shared_memory_per_block_optin &&
           a->reserved_shared_memory_per_block == b->reserved_shared_memory_per_block &&
           a->max_threads_per_sm == b->max_threads_per_sm && a->max_blocks_per_sm == b->max_blocks_per_sm &&
           a->registers_per_sm == b->registers_per_sm;
}

void *gm_installed_card(void) {
    open_once();
    if (!atomic_load(&opened)) return NULL;
    pthread_mutex_lock(&cards_lock);
    card *c = cards;
    while (c && !same_chip(&c->profile, &gm_profile)) c = c->next;
    if (!c && !cards && gm_profile.major < AMPERE) plan_for_ampere();
    if (!c && (c = malloc(sizeof *c))) {
        *c = (card){gm_profile, make_property(&gm_profile), cards};
        cards = c;
    }
    void *property = c ? c->property : NULL;
    pthread_mutex_unlock(&cards_lock);
    return property;
}
