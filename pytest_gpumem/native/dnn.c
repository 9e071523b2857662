/* cuDNN: descriptors keep what is set in them; plans run nothing.
 *
 * Which engine cuDNN picks for a convolution, and so how much workspace it takes, is not documented. Workspaces
 * are therefore zero here, and the report says of a step that made convolutions that their workspaces are not in
 * its figures (gpumem_convolutions).
 */
#include "gpumem.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CUDNN_NOT_INITIALIZED = 1001,
    CUDNN_BAD_PARAM = 2000,
    CUDNN_NOT_SUPPORTED = 3000,
};

static atomic_ullong executions;

static int none(const char *function) { return gm_unsupported(function, CUDNN_NOT_SUPPORTED); }

GM_API size_t cudnnGetVersion(void) { return (size_t)gm_cudnn_version(); }

GM_API size_t cudnnGetCudartVersion(void) { return (size_t)gm_cuda_version(); }

/* libraryPropertyType: 0 major, 1 minor, 2 patch level. */
GM_API int cudnnGetProperty(int type, int *value) {
    int version = gm_cudnn_version();
    if (type < 0 || type > 2) return CUDNN_BAD_PARAM;
    *value = type == 0 ? version / 10000 : type == 1 ? version / 100 % 100 : version % 100;
    return GM_SUCCESS;
}

GM_API const char *cudnnGetErrorString(int status) {
    switch (status) {
    case GM_SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case CUDNN_NOT_INITIALIZED: return "CUDNN_STATUS_NOT_INITIALIZED";
    case CUDNN_BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
    default: return "CUDNN_STATUS_NOT_SUPPORTED (by the virtual GPU; standard error names the function)";
    }
}

GM_API void cudnnGetLastErrorString(char *message, size_t size) { snprintf(message, size, "%s", ""); }

typedef struct {
    void *stream;
} handle;

GM_API int cudnnCreate(handle **out) {
    if (!gm_visible()) return CUDNN_NOT_INITIALIZED;
    *out = calloc(1, sizeof **out);
    return *out ? GM_SUCCESS : CUDNN_NOT_INITIALIZED;
}

GM_API int cudnnDestroy(handle *h) {
    free(h);
    return GM_SUCCESS;
}

GM_API int cudnnSetStream(handle *h, void *stream) {
    h->stream = stream;
    return GM_SUCCESS;
}

GM_API int cudnnGetStream(handle *h, void **stream) {
    *stream = h->stream;
    return GM_SUCCESS;
}

/* ---- the backend (graph) API ---- */

enum {
    ENGINEHEUR_RESULTS = 202,
    ENGINECFG_ENGINE = 300,
    ENGINECFG_INTERMEDIATE_INFO = 301,
    ENGINECFG_KNOB_CHOICES = 302,
    ENGINECFG_WORKSPACE_SIZE = 303,
    ENGINECFG_SHARED_MEMORY_USED = 304,
    EXECUTION_PLAN_WORKSPACE_SIZE = 402,
    EXECUTION_PLAN_JSON_REPRESENTATION = 405,
    OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802,
    TENSOR_DATA_TYPE = 901,
    TENSOR_DIMENSIONS = 902,
    ENGINE_GLOBAL_INDEX = 1301,
    ENGINE_KNOB_INFO = 1302,
    ENGINE_NUMERICAL_NOTE = 1303,
    ENGINE_LAYOUT_INFO = 1304,
    ENGINE_BEHAVIOR_NOTE = 1305,
    TYPE_BACKEND_DESCRIPTOR = 15,
    /* of cudnnBackendDescriptorType_t */
    OPERATION_CONVOLUTION_FORWARD = 10,
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12,
};

typedef struct attribute {
    int name, type;
    int64_t count;
    size_t size;
    struct attribute *next;
    char data[];
} attribute;

typedef struct {
    int type;
    attribute *attributes;
    uint64_t bytes; /* of the tensors that it is about, once it is finalized */
    int convolves;  /* whether one of its operations is a convolution, or a gradient of one */
} descriptor;

/* The size in bytes of an element of cudnnBackendAttributeType_t. */
static size_t element_size(int type) {
    switch (type) {
    case 2: case 24: return 1;            /* boolean, char */
    case 0: case 3: case 5: case 6: case 15: return 8; /* handle, int64, double, pointer, descriptor */
    case 26: return 16;                   /* fraction: two int64 */
    default: return 4;                    /* float, int32 and every enum */
    }
}

GM_API int cudnnBackendCreateDescriptor(int type, descriptor **out) {
    *out = calloc(1, sizeof **out);
    if (!*out) return CUDNN_NOT_INITIALIZED;
    (*out)->type = type;
    return GM_SUCCESS;
}

GM_API int cudnnBackendDestroyDescriptor(descriptor *d) {
    if (!d) return GM_SUCCESS;
    for (attribute *at = d->attributes, *next; at; at = next) {
        next = at->next;
        free(at);
    }
    free(d);
    return GM_SUCCESS;
}

GM_API int cudnnBackendSetAttribute(descriptor *d, int name, int type, int64_t count, const void *elements) {
    size_t size = element_size(type) * (size_t)(count > 0 ? count : 0);
    if (!d || count < 0 || (size && !elements)) return CUDNN_BAD_PARAM;
    attribute *made = malloc(sizeof *made + size);
    if (!made) return CUDNN_NOT_INITIALIZED;
    *made = (attribute){name, type, count, size, d->attributes};
    if (size) memcpy(made->data, elements, size);
    d->attributes = made;
    return GM_SUCCESS;
}

static const attribute *find(const descriptor *d, int name) {
    for (const attribute *at = d->attributes; at; at = at->next)
        if (at->name == name) return at;
    return NULL;
}

/* Bytes of an element of cudnnDataType_t; of the vectorized ones as well. */
static uint64_t data_size(int type) {
    switch (type) {
    case 1: case 10: return 8;                 /* double, int64 */
    case 2: case 9: return 2;                  /* half, bfloat16 */
    case 3: case 6: case 11: case 12: case 13: return 1;
    case 8: return 32;                         /* int8x32 */
    default: return 4;
    }
}

static uint64_t tensor_bytes(const attribute *dimensions, const attribute *type) {
    int32_t kind = 0;
    if (type && type->size >= sizeof kind) memcpy(&kind, type->data, sizeof kind);
    uint64_t bytes = data_size(kind);
    for (int64_t i = 0; i < dimensions->count; i++) {
        int64_t length;
        memcpy(&length, dimensions->data + 8 * (size_t)i, sizeof length);
        bytes *= length > 0 ? (uint64_t)length : 1;
    }
    return bytes;
}

/* A tensor knows its bytes; an operation, a graph, an engine, a plan has those of what it is made of. */
GM_API int cudnnBackendFinalize(descriptor *d) {
    if (!d) return CUDNN_BAD_PARAM;
    const attribute *dimensions = find(d, TENSOR_DIMENSIONS);
    if (dimensions) {
        d->bytes = tensor_bytes(dimensions, find(d, TENSOR_DATA_TYPE));
        return GM_SUCCESS;
    }
    d->convolves = d->type >= OPERATION_CONVOLUTION_FORWARD && d->type <= OPERATION_CONVOLUTION_BACKWARD_DATA;
    for (const attribute *at = d->attributes; at; at = at->next) {
        if (at->type != TYPE_BACKEND_DESCRIPTOR) continue;
        for (int64_t i = 0; i < at->count; i++) {
            descriptor *part;
            memcpy(&part, at->data + sizeof part * (size_t)i, sizeof part);
            if (!part) continue;
            d->bytes += part->bytes;
            d->convolves |= part->convolves;
        }
    }
    return GM_SUCCESS;
}

GM_API int cudnnBackendGetAttribute(descriptor *d, int name, int type, int64_t wanted, int64_t *count,
                                    void *elements) {
    if (!d) return CUDNN_BAD_PARAM;
    const attribute *set = find(d, name);
    int64_t ignored;
    if (!count) count = &ignored;
    if (set && set->type == type && type != TYPE_BACKEND_DESCRIPTOR) {
        *count = set->count;
        if (elements && wanted > 0)
            memcpy(elements, set->data, element_size(type) * (size_t)(wanted < set->count ? wanted : set->count));
        return GM_SUCCESS;
    }
    *count = 0;
    switch (name) {
    case ENGINEHEUR_RESULTS: /* one engine configuration; the caller brings its descriptor */
    case ENGINECFG_ENGINE:
        *count = 1;
        if (elements && wanted > 0 && *(descriptor **)elements) {
            (*(descriptor **)elements)->bytes = d->bytes;
            (*(descriptor **)elements)->convolves = d->convolves;
        }
        return GM_SUCCESS;
    case ENGINE_NUMERICAL_NOTE: case ENGINE_BEHAVIOR_NOTE: case ENGINE_KNOB_INFO: case ENGINE_LAYOUT_INFO:
    case ENGINECFG_INTERMEDIATE_INFO: case ENGINECFG_KNOB_CHOICES:
        return GM_SUCCESS; /* there are none */
    case ENGINE_GLOBAL_INDEX: case OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
    case ENGINECFG_WORKSPACE_SIZE: case EXECUTION_PLAN_WORKSPACE_SIZE:
        *count = 1;
        if (elements && wanted > 0) *(int64_t *)elements = name == OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
        return GM_SUCCESS;
    case ENGINECFG_SHARED_MEMORY_USED:
        *count = 1;
        if (elements && wanted > 0) *(int32_t *)elements = 0;
        return GM_SUCCESS;
    case EXECUTION_PLAN_JSON_REPRESENTATION:
        *count = 3;
        if (elements && wanted >= 3) memcpy(elements, "{}", 3);
        return GM_SUCCESS;
    default: {
        static char told[64];
        snprintf(told, sizeof told, "cudnnBackendGetAttribute(%d)", name);
        return none(told);
    }
    }
}

static atomic_ullong largest; /* bytes of a plan's tensors */

GM_API int cudnnBackendExecute(handle *h, descriptor *plan, descriptor *pack) {
    (void)h, (void)pack;
    if (!gm_visible()) return CUDNN_NOT_INITIALIZED;
    if (plan && plan->convolves) {
        unsigned long long before = atomic_load(&largest);
        while (plan->bytes > before && !atomic_compare_exchange_weak(&largest, &before, plan->bytes)) {}
        atomic_fetch_add_explicit(&executions, 1, memory_order_relaxed);
    } else {
        gm_note_sizes(GM_CUDNN_PLAN);
    }
    gm_forget_all();
    return GM_SUCCESS;
}

/* Bytes of the tensors of the largest plan that ran since it was last asked. */
GM_API uint64_t gpumem_largest_convolution(void) { return atomic_exchange(&largest, 0); }

/* How many plans of convolutions ran, whose workspaces the figures do not hold. */
GM_API uint64_t gpumem_convolutions(void) { return atomic_load(&executions); }

/* ---- descriptors of the other operations, and batch normalisation ---- */

static int made(void **out) {
    *out = calloc(1, 256);
    return *out ? GM_SUCCESS : CUDNN_NOT_INITIALIZED;
}

static int freed(void *d) {
    free(d);
    return GM_SUCCESS;
}

GM_API int cudnnCreateFilterDescriptor(void **out) { return made(out); }
GM_API int cudnnDestroyFilterDescriptor(void *d) { return freed(d); }
GM_API int cudnnSetFilterNdDescriptor(void) { return GM_SUCCESS; }
GM_API int cudnnCreateActivationDescriptor(void **out) { return made(out); }
GM_API int cudnnDestroyActivationDescriptor(void *d) { return freed(d); }
GM_API int cudnnSetActivationDescriptor(void) { return GM_SUCCESS; }
GM_API int cudnnCreateSpatialTransformerDescriptor(void **out) { return made(out); }
GM_API int cudnnDestroySpatialTransformerDescriptor(void *d) { return freed(d); }
GM_API int cudnnSetSpatialTransformerNdDescriptor(void) { return GM_SUCCESS; }

static int computed(void) {
    gm_forget_all();
    return gm_visible() ? GM_SUCCESS : CUDNN_NOT_INITIALIZED;
}

GM_API int cudnnSpatialTfGridGeneratorForward(void) { return computed(); }
GM_API int cudnnSpatialTfGridGeneratorBackward(void) { return computed(); }
GM_API int cudnnSpatialTfSamplerForward(void) { return computed(); }
GM_API int cudnnSpatialTfSamplerBackward(void) { return computed(); }

/* Per-channel statistics pass through PyTorch's own tensors; a workspace and a reserve space are cuDNN's choice
 * and, as the convolutions' are, taken as zero. */
GM_API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int operations, void *x,
                                                                    void *z, void *y, void *parameters,
                                                                    void *activation, size_t *size) {
    (void)h, (void)mode, (void)operations, (void)x, (void)z, (void)y, (void)parameters, (void)activation;
    *size = 0;
    return GM_SUCCESS;
}

GM_API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int operations, void *x, void *y,
                                                             void *dy, void *dz, void *dx, void *parameters,
                                                             void *activation, size_t *size) {
    (void)h, (void)mode, (void)operations, (void)x, (void)y, (void)dy, (void)dz, (void)dx;
    (void)parameters, (void)activation;
    *size = 0;
    return GM_SUCCESS;
}

GM_API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int operations,
                                                                void *activation, void *x, size_t *size) {
    (void)h, (void)mode, (void)operations, (void)activation, (void)x;
    *size = 0;
    return GM_SUCCESS;
}

GM_API int cudnnBatchNormalizationForwardTrainingEx(void) { return computed(); }
GM_API int cudnnBatchNormalizationBackwardEx(void) { return computed(); }
GM_API int cudnnBatchNormalizationForwardInference(void) { return computed(); }
