/* cuDNN's graph API, which PyTorch makes convolutions and attention with.
 *
 * Descriptors keep what is set in them. Where cuDNN can be asked (installed.c), a graph is made a second time with
 * its own descriptors: its heuristics then rank its engines for the card.
 *
 * - Of a single convolution the plans are cuDNN's too: they say how much workspace they take, and what it refuses
 *   is refused.
 * - Of any other graph (attention, fused convolutions) the engine's configuration says how much, which was the same
 *   wherever both were asked: a plan would have its kernel compiled, for about a second each.
 *
 * Where it cannot be asked, there is one engine whose workspace is zero, and the report of a step that ran it says
 * so. Nothing is executed.
 */
#include "cudnn/cudnn.h"
#include "runtime/runtime.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    /* of cudnnBackendAttributeName_t */
    ENGINEHEUR_RESULTS = 202,
    ENGINEHEUR_DEVICEPROP = 204,
    ENGINECFG_ENGINE = 300,
    ENGINECFG_INTERMEDIATE_INFO = 301,
    ENGINECFG_KNOB_CHOICES = 302,
    ENGINECFG_WORKSPACE_SIZE = 303,
    ENGINECFG_SHARED_MEMORY_USED = 304,
    EXECUTION_PLAN_WORKSPACE_SIZE = 402,
    EXECUTION_PLAN_JSON_REPRESENTATION = 405,
    EXECUTION_PLAN_DEVICEPROP = 407,
    EXECUTION_PLAN_ENGINE_CONFIG = 401,
    OPERATIONGRAPH_OPS = 801,
    OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802,
    TENSOR_DATA_TYPE = 901,
    TENSOR_DIMENSIONS = 902,
    ENGINE_GLOBAL_INDEX = 1301,
    ENGINE_KNOB_INFO = 1302,
    ENGINE_NUMERICAL_NOTE = 1303,
    ENGINE_LAYOUT_INFO = 1304,
    ENGINE_BEHAVIOR_NOTE = 1305,
    ENGINE_DEVICEPROP = 1307,
    /* of cudnnBackendDescriptorType_t */
    OPERATION_CONVOLUTION_FORWARD = 10,
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12,
    OPERATIONGRAPH = 15,
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
    atomic_int holders;    /* its caller, and every descriptor that it was set in: cuDNN's would have a copy */
    attribute *attributes; /* the last one set is the first */
    uint64_t bytes;        /* of the tensors that it is about, once it is finalized */
    bool convolves;        /* one of its operations is a convolution, or a gradient of one */
    bool alone;            /* that is all that there is in its graph */
    bool asked;            /* cuDNN's own descriptor stands behind it, or is to */
    void *real;            /* which one */
    void *card;            /* of a plan that cuDNN was asked for: what it was made for */
    int64_t workspace;     /* of such a plan without a descriptor of cuDNN's */
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

static descriptor *part(const attribute *at, int64_t index) {
    descriptor *found;
    memcpy(&found, at->data + sizeof found * (size_t)index, sizeof found);
    return found;
}

static const attribute *find(const descriptor *d, int name) {
    for (const attribute *at = d->attributes; at; at = at->next)
        if (at->name == name) return at;
    return NULL;
}

GM_API int cudnnBackendCreateDescriptor(int type, descriptor **out) {
    if (gm_inside_cudnn()) return gm_installed_create(type, (void **)out);
    *out = calloc(1, sizeof **out);
    if (!*out) return GM_CUDNN_NOT_INITIALIZED;
    (*out)->type = type;
    atomic_init(&(*out)->holders, 1);
    return GM_SUCCESS;
}

static void let_go(descriptor *d) {
    if (!d || atomic_fetch_sub(&d->holders, 1) > 1) return;
    if (d->real) gm_installed_destroy(d->real);
    for (attribute *at = d->attributes, *next; at; at = next) {
        next = at->next;
        for (int64_t i = 0; at->type == GM_TYPE_BACKEND_DESCRIPTOR && i < at->count; i++) let_go(part(at, i));
        free(at);
    }
    free(d);
}

GM_API int cudnnBackendDestroyDescriptor(descriptor *d) {
    if (d && gm_inside_cudnn()) return gm_installed_destroy(d);
    let_go(d);
    return GM_SUCCESS;
}

GM_API int cudnnBackendSetAttribute(descriptor *d, int name, int type, int64_t count, const void *elements) {
    size_t size = element_size(type) * (size_t)(count > 0 ? count : 0);
    if (!d || count < 0 || (size && !elements)) return GM_CUDNN_BAD_PARAM;
    if (gm_inside_cudnn()) return gm_installed_set(d, name, type, count, elements);
    attribute *made = malloc(sizeof *made + size);
    if (!made) return GM_CUDNN_NOT_INITIALIZED;
    *made = (attribute){name, type, count, size, d->attributes};
    if (size) memcpy(made->data, elements, size);
    for (int64_t i = 0; type == GM_TYPE_BACKEND_DESCRIPTOR && i < count; i++) {
        if (part(made, i)) atomic_fetch_add(&part(made, i)->holders, 1);
    }
    d->attributes = made;
    return GM_SUCCESS;
}

/* ---- cuDNN's own descriptors ---- */

static int make_real(descriptor *d);

static int set_real(descriptor *d, const attribute *at) {
    if (at->type == GM_TYPE_HANDLE) return GM_SUCCESS; /* which device is meant is said otherwise */
    if (at->type != GM_TYPE_BACKEND_DESCRIPTOR) {
        return gm_installed_set(d->real, at->name, at->type, at->count, at->data);
    }
    void **reals = calloc((size_t)at->count + 1, sizeof *reals);
    int status = reals ? GM_SUCCESS : GM_CUDNN_NOT_INITIALIZED;
    for (int64_t i = 0; i < at->count && !status; i++) {
        descriptor *made_of = part(at, i);
        if (!made_of) continue;
        if (!made_of->real) status = make_real(made_of);
        reals[i] = made_of->real;
    }
    if (!status) status = gm_installed_set(d->real, at->name, at->type, at->count, reals);
    free(reals);
    return status;
}

/* Sets all that was set, in that order: the list has the last one first. */
static int set_all_real(descriptor *d, const attribute *at) {
    if (!at) return GM_SUCCESS;
    int status = set_all_real(d, at->next);
    return status ? status : set_real(d, at);
}

static int make_real(descriptor *d) {
    int status = gm_installed_create(d->type, &d->real);
    if (status) return status;
    int name = d->type == GM_ENGINEHEUR       ? ENGINEHEUR_DEVICEPROP
               : d->type == GM_ENGINE         ? ENGINE_DEVICEPROP
               : d->type == GM_EXECUTION_PLAN ? EXECUTION_PLAN_DEVICEPROP
                                              : 0;
    status = set_all_real(d, d->attributes);
    if (!status && name) {
        d->card = gm_installed_card();
        status = d->card ? gm_installed_set(d->real, name, GM_TYPE_BACKEND_DESCRIPTOR, 1, &d->card)
                         : GM_CUDNN_NOT_SUPPORTED;
    }
    if (!status) status = gm_installed_finalize(d->real);
    if (status) {
        gm_installed_destroy(d->real);
        d->real = NULL;
    }
    return status;
}

/* Results are copied into descriptors that the caller has made; cuDNN wants its own. */
static int get_reals(descriptor *d, int name, int64_t wanted, int64_t *count, descriptor **into) {
    void **reals = calloc((size_t)wanted + 1, sizeof *reals);
    int status = reals ? GM_SUCCESS : GM_CUDNN_NOT_INITIALIZED;
    for (int64_t i = 0; i < wanted && !status; i++) {
        if (!into[i]) status = GM_CUDNN_BAD_PARAM;
        else if (!into[i]->real) status = gm_installed_create(into[i]->type, &into[i]->real);
        if (!status) reals[i] = into[i]->real;
    }
    if (!status) status = gm_installed_get(d->real, name, GM_TYPE_BACKEND_DESCRIPTOR, wanted, count, reals);
    for (int64_t i = 0; i < wanted && !status; i++) {
        into[i]->bytes = d->bytes;
        into[i]->convolves = d->convolves;
        into[i]->alone = d->alone;
        into[i]->asked = true;
    }
    free(reals);
    return status;
}

static void forget_real(descriptor *d) {
    if (d->real) gm_installed_destroy(d->real);
    d->real = NULL;
    d->asked = false;
}

/* Of a single convolution whatever cuDNN answers is the answer; of others it may know nothing without a GPU. */
static int ask(descriptor *d) {
    int status = make_real(d);
    int64_t results = 1;
    if (d->alone) return status;
    if (!status && d->type == GM_ENGINEHEUR) {
        status = gm_installed_get(d->real, ENGINEHEUR_RESULTS, GM_TYPE_BACKEND_DESCRIPTOR, 0, &results, NULL);
    }
    if (status || !results) forget_real(d);
    return GM_SUCCESS;
}

/* A plan that is not compiled: its engine's configuration says what it will want. */
static int take_from_configuration(descriptor *plan) {
    const attribute *at = find(plan, EXECUTION_PLAN_ENGINE_CONFIG);
    descriptor *configuration = at && at->count ? part(at, 0) : NULL;
    int64_t count = 0;
    bool known = configuration && configuration->real &&
                 !gm_installed_get(configuration->real, ENGINECFG_WORKSPACE_SIZE, GM_TYPE_INT64, 1, &count,
                             &plan->workspace) &&
                 count == 1;
    plan->card = known ? gm_installed_card() : NULL;
    if (!known) plan->workspace = 0;
    return GM_SUCCESS;
}

/* ---- what becomes of it ---- */

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
    if (!d) return GM_CUDNN_BAD_PARAM;
    if (gm_inside_cudnn()) return gm_installed_finalize(d);
    const attribute *dimensions = find(d, TENSOR_DIMENSIONS);
    if (dimensions) {
        d->bytes = tensor_bytes(dimensions, find(d, TENSOR_DATA_TYPE));
        return GM_SUCCESS;
    }
    d->convolves = d->type >= OPERATION_CONVOLUTION_FORWARD && d->type <= OPERATION_CONVOLUTION_BACKWARD_DATA;
    for (const attribute *at = d->attributes; at; at = at->next) {
        if (at->type != GM_TYPE_BACKEND_DESCRIPTOR) continue;
        for (int64_t i = 0; i < at->count; i++) {
            descriptor *made_of = part(at, i);
            if (!made_of) continue;
            d->bytes += made_of->bytes;
            d->convolves |= made_of->convolves;
            d->alone |= made_of->alone;
            d->asked |= made_of->asked;
        }
    }
    if (d->type == OPERATIONGRAPH) {
        const attribute *operations = find(d, OPERATIONGRAPH_OPS);
        d->alone = d->convolves && operations && operations->count == 1;
        d->asked = operations && gm_installed_card();
    }
    if (!d->asked || d->real) return GM_SUCCESS;
    return d->type == GM_EXECUTION_PLAN && !d->alone ? take_from_configuration(d) : ask(d);
}

GM_API int cudnnBackendGetAttribute(descriptor *d, int name, int type, int64_t wanted, int64_t *count,
                                    void *elements) {
    if (!d) return GM_CUDNN_BAD_PARAM;
    if (gm_inside_cudnn()) return gm_installed_get(d, name, type, wanted, count, elements);
    const attribute *set = find(d, name);
    int64_t ignored;
    if (!count) count = &ignored;
    if (set && set->type == type && type != GM_TYPE_BACKEND_DESCRIPTOR) {
        *count = set->count;
        if (elements && wanted > 0)
            memcpy(elements, set->data, element_size(type) * (size_t)(wanted < set->count ? wanted : set->count));
        return GM_SUCCESS;
    }
    *count = 0;
    if (d->real) {
        return type == GM_TYPE_BACKEND_DESCRIPTOR && elements
                   ? get_reals(d, name, wanted, count, elements)
                   : gm_installed_get(d->real, name, type, wanted, count, elements);
    }
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
    case ENGINE_GLOBAL_INDEX: case OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: case ENGINECFG_WORKSPACE_SIZE:
        *count = 1;
        if (elements && wanted > 0) *(int64_t *)elements = name == OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
        return GM_SUCCESS;
    case EXECUTION_PLAN_WORKSPACE_SIZE:
        *count = 1;
        if (elements && wanted > 0) *(int64_t *)elements = d->workspace;
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
        return gm_unsupported(told, GM_CUDNN_NOT_SUPPORTED);
    }
    }
}

static atomic_ullong largest; /* bytes of a plan's tensors */
static atomic_ullong unasked; /* runs of convolutions' plans whose workspaces are not known */
static atomic_ullong asked;   /* runs of cuDNN's own plans */
static atomic_ullong astray;  /* of these, on another card than they were made for: PyTorch keeps plans for good */

static void count_run(const descriptor *plan) {
    gm_count_plan();
    if (plan->card) {
        atomic_fetch_add_explicit(&asked, 1, memory_order_relaxed);
        if (plan->card != gm_installed_card()) atomic_fetch_add_explicit(&astray, 1, memory_order_relaxed);
    } else if (plan->convolves) {
        unsigned long long before = atomic_load(&largest);
        while (plan->bytes > before && !atomic_compare_exchange_weak(&largest, &before, plan->bytes)) {}
        atomic_fetch_add_explicit(&unasked, 1, memory_order_relaxed);
    } else {
        gm_note_sizes(GM_CUDNN_PLAN);
    }
}

GM_API int cudnnBackendExecute(void *handle, descriptor *plan, descriptor *pack) {
    (void)handle, (void)pack;
    if (!gm_visible()) return GM_CUDNN_NOT_INITIALIZED;
    if (plan) count_run(plan);
    gm_forget_all();
    return GM_SUCCESS;
}

/* Bytes of the tensors of the largest convolution, of those whose workspaces are not known, since it was last asked. */
GM_API uint64_t gpumem_largest_convolution(void) { return atomic_exchange(&largest, 0); }

/* How often a convolution ran whose workspace is not known; a plan of cuDNN's; one made for another card. */
GM_API void gpumem_convolutions(uint64_t out[3]) {
    out[0] = atomic_load(&unasked);
    out[1] = atomic_load(&asked);
    out[2] = atomic_load(&astray);
}
