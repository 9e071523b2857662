/* cuDNN's graph API, with which PyTorch runs convolutions and attention.
 *
 * Descriptors store their attributes. If the installed cuDNN can plan for the card (installed.c), each graph is also
 * built with cuDNN's own descriptors, and cuDNN's heuristics rank its engines for the card.
 *
 * - For a single convolution cuDNN also creates the plans: they report their workspaces, and a graph that cuDNN refuses
 *   is refused here.
 * - For any other graph (attention, fused convolutions), and for an engine that compiles its kernel, the workspace is
 *   read from the engine's configuration: it was the same as the plan's whenever both were read. Creating a plan would
 *   compile the kernel, about a second for each. With torch.backends.cudnn.benchmark that was nearly all of the time.
 *
 * If the installed cuDNN cannot plan, there is one engine whose workspace is zero, and the report of a step that ran it
 * has a note. In this case, and if the cuDNN that plans is not PyTorch's own version, a convolution's workspace lies in
 * a range, and a run uses one size of it (base/sizes.c). Nothing is executed.
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
    VARIANT_PACK_WORKSPACE = 1003,
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
    RUNTIME_COMPILATION = 0, /* of cudnnBackendBehaviorNote_t */
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
    atomic_int holders;    /* its caller, and every descriptor that it was set in, where cuDNN's own would have a copy */
    attribute *attributes; /* a list, the last one set first */
    uint64_t bytes;        /* of its tensors, once it is finalized */
    bool convolves;        /* one of its operations is a convolution, or a gradient of one */
    bool alone;            /* that is the only operation in its graph */
    bool has_counterpart;  /* a descriptor of the installed cuDNN belongs to it, or will */
    void *installed;       /* that descriptor */
    void *card;            /* for a plan of the installed cuDNN: the card that it was made for */
    int64_t workspace;     /* of such a plan */
    uint64_t most;         /* largest workspace in bytes observed for a convolution, by its tensors */
    uint64_t graph;        /* equal for everything in equal graphs with a convolution; otherwise 0 */
} descriptor;

/* Returns the bytes of an element of cudnnBackendAttributeType_t. */
static size_t element_size(int type) {
    switch (type) {
    case 2: case 24: return 1;            /* boolean, char */
    case 0: case 3: case 5: case 6: case 15: return 8; /* handle, int64, double, pointer, descriptor */
    case 26: return 16;                   /* fraction: two int64 */
    default: return 4;                    /* float, int32 and every enum */
    }
}

static descriptor *descriptor_at(const attribute *at, int64_t index) {
    descriptor *element;
    memcpy(&element, at->data + sizeof element * (size_t)index, sizeof element);
    return element;
}

static const attribute *find_attribute(const descriptor *d, int name) {
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

static void release(descriptor *d) {
    if (!d || atomic_fetch_sub(&d->holders, 1) > 1) return;
    if (d->installed) gm_installed_destroy(d->installed);
    for (attribute *at = d->attributes, *next; at; at = next) {
        next = at->next;
        for (int64_t i = 0; at->type == GM_TYPE_BACKEND_DESCRIPTOR && i < at->count; i++) release(descriptor_at(at, i));
        free(at);
    }
    free(d);
}

GM_API int cudnnBackendDestroyDescriptor(descriptor *d) {
    if (d && gm_inside_cudnn()) return gm_installed_destroy(d);
    release(d);
    return GM_SUCCESS;
}

GM_API int cudnnBackendSetAttribute(descriptor *d, int name, int type, int64_t count, const void *elements) {
    size_t size = element_size(type) * (size_t)(count > 0 ? count : 0);
    if (!d || count < 0 || (size && !elements)) return GM_CUDNN_BAD_PARAM;
    if (gm_inside_cudnn()) return gm_installed_set(d, name, type, count, elements);
    attribute *stored = malloc(sizeof *stored + size);
    if (!stored) return GM_CUDNN_NOT_INITIALIZED;
    *stored = (attribute){name, type, count, size, d->attributes};
    if (size) memcpy(stored->data, elements, size);
    for (int64_t i = 0; type == GM_TYPE_BACKEND_DESCRIPTOR && i < count; i++) {
        if (descriptor_at(stored, i)) atomic_fetch_add(&descriptor_at(stored, i)->holders, 1);
    }
    d->attributes = stored;
    return GM_SUCCESS;
}

/* ---- cuDNN's own descriptors ---- */

static int make_installed(descriptor *d);

static int set_installed(descriptor *d, const attribute *at) {
    if (at->type == GM_TYPE_HANDLE) return GM_SUCCESS; /* the device is set in another way */
    if (at->type != GM_TYPE_BACKEND_DESCRIPTOR) {
        return gm_installed_set(d->installed, at->name, at->type, at->count, at->data);
    }
    void **handles = calloc((size_t)at->count + 1, sizeof *handles);
    int status = handles ? GM_SUCCESS : GM_CUDNN_NOT_INITIALIZED;
    for (int64_t i = 0; i < at->count && !status; i++) {
        descriptor *component = descriptor_at(at, i);
        if (!component) continue;
        if (!component->installed) status = make_installed(component);
        handles[i] = component->installed;
    }
    if (!status) status = gm_installed_set(d->installed, at->name, at->type, at->count, handles);
    free(handles);
    return status;
}

/* Sets all attributes in the order in which they were set: the list is in reverse order. */
static int set_all_installed(descriptor *d, const attribute *at) {
    if (!at) return GM_SUCCESS;
    int status = set_all_installed(d, at->next);
    return status ? status : set_installed(d, at);
}

static int make_installed(descriptor *d) {
    int status = gm_installed_create(d->type, &d->installed);
    if (status) return status;
    int name = d->type == GM_ENGINEHEUR       ? ENGINEHEUR_DEVICEPROP
               : d->type == GM_ENGINE         ? ENGINE_DEVICEPROP
               : d->type == GM_EXECUTION_PLAN ? EXECUTION_PLAN_DEVICEPROP
                                              : 0;
    status = set_all_installed(d, d->attributes);
    if (!status && name) {
        d->card = gm_installed_card();
        status = d->card ? gm_installed_set(d->installed, name, GM_TYPE_BACKEND_DESCRIPTOR, 1, &d->card)
                         : GM_CUDNN_NOT_SUPPORTED;
    }
    if (!status) status = gm_installed_finalize(d->installed);
    if (status) {
        gm_installed_destroy(d->installed);
        d->installed = NULL;
    }
    return status;
}

static void inherit(descriptor *result, const descriptor *d) {
    result->bytes = d->bytes;
    result->convolves = d->convolves;
    result->alone = d->alone;
    result->graph = d->graph;
    result->most = d->most;
}

/* Results are copied to descriptors that the caller has created; cuDNN needs its own. */
static int get_installed(descriptor *d, int name, int64_t room, int64_t *count, descriptor **into) {
    void **handles = calloc((size_t)room + 1, sizeof *handles);
    int status = handles ? GM_SUCCESS : GM_CUDNN_NOT_INITIALIZED;
    for (int64_t i = 0; i < room && !status; i++) {
        if (!into[i]) status = GM_CUDNN_BAD_PARAM;
        else if (!into[i]->installed) status = gm_installed_create(into[i]->type, &into[i]->installed);
        if (!status) handles[i] = into[i]->installed;
    }
    if (!status) status = gm_installed_get(d->installed, name, GM_TYPE_BACKEND_DESCRIPTOR, room, count, handles);
    for (int64_t i = 0; i < room && !status; i++) {
        inherit(into[i], d);
        into[i]->has_counterpart = true;
    }
    free(handles);
    return status;
}

static void forget_installed(descriptor *d) {
    if (d->installed) gm_installed_destroy(d->installed);
    d->installed = NULL;
    d->has_counterpart = false;
}

/* Creates cuDNN's descriptor. For a single convolution its status is returned, also a refusal; for any other graph a
 * refusal is ignored, because cuDNN may not know the answer without a GPU. */
static int ask(descriptor *d) {
    int status = make_installed(d);
    int64_t results = 1;
    if (d->alone) return status;
    if (!status && d->type == GM_ENGINEHEUR) {
        status = gm_installed_get(d->installed, ENGINEHEUR_RESULTS, GM_TYPE_BACKEND_DESCRIPTOR, 0, &results, NULL);
    }
    if (status || !results) forget_installed(d);
    return GM_SUCCESS;
}

static descriptor *configuration_of(const descriptor *plan) {
    const attribute *at = find_attribute(plan, EXECUTION_PLAN_ENGINE_CONFIG);
    return at && at->count ? descriptor_at(at, 0) : NULL;
}

/* Whether finalizing the plan would compile a kernel with NVRTC, by cuDNN's behaviour note on the engine. */
static bool is_compiled(const descriptor *plan) {
    const descriptor *configuration = configuration_of(plan);
    void *engine;
    if (!configuration || !configuration->installed || gm_installed_create(GM_ENGINE, &engine)) return false;
    int32_t notes[16];
    int64_t count = 0;
    bool compiled = false;
    if (gm_installed_get(configuration->installed, ENGINECFG_ENGINE, GM_TYPE_BACKEND_DESCRIPTOR, 1, &count, &engine) ||
        gm_installed_get(engine, ENGINE_BEHAVIOR_NOTE, GM_TYPE_BEHAVIOR_NOTE, sizeof notes / sizeof *notes, &count,
                         notes)) {
        count = 0;
    }
    for (int64_t i = 0; i < count; i++) compiled |= notes[i] == RUNTIME_COMPILATION;
    gm_installed_destroy(engine);
    return compiled;
}

/* Reads a plan's workspace from its engine's configuration, without creating cuDNN's plan. */
static void take_from_configuration(descriptor *plan) {
    const descriptor *configuration = configuration_of(plan);
    int64_t count = 0;
    bool has_workspace = configuration && configuration->installed &&
                 !gm_installed_get(configuration->installed, ENGINECFG_WORKSPACE_SIZE, GM_TYPE_INT64, 1, &count,
                                           &plan->workspace) &&
                 count == 1;
    plan->card = has_workspace ? gm_installed_card() : NULL;
    if (!has_workspace) plan->workspace = 0;
}

/* ---- finalizing, reading, running ---- */

/* Returns the bytes of an element of cudnnDataType_t, also of the vectorized ones. */
static uint64_t data_size(int type) {
    switch (type) {
    case 1: case 10: return 8;                 /* double, int64 */
    case 2: case 9: return 2;                  /* half, bfloat16 */
    case 3: case 6: case 11: case 12: case 13: return 1;
    case 8: return 32;                         /* int8x32 */
    default: return 4;
    }
}

static uint64_t length_at(const attribute *dimensions, int64_t index) {
    int64_t length;
    memcpy(&length, dimensions->data + sizeof length * (size_t)index, sizeof length);
    return length > 0 ? (uint64_t)length : 1;
}

static uint64_t element_count(const attribute *dimensions) {
    uint64_t count = 1;
    for (int64_t i = 0; i < dimensions->count; i++) count *= length_at(dimensions, i);
    return count;
}

static uint64_t tensor_bytes(const attribute *dimensions, const attribute *type) {
    int32_t kind = 0;
    if (type && type->size >= sizeof kind) memcpy(&kind, type->data, sizeof kind);
    return data_size(kind) * element_count(dimensions);
}

/* In the published workspaces (benchmarks/results/convolution_ranges.txt) a convolution needs copies of its tensors, and
 * for long sums partial sums of its result in float32, each of at least PARTIAL_SUM products. */
enum { PARTIAL_SUM = 768, FLOAT = 4, PLAN = 512 };

/* Returns the upper bound of an operation's workspace by that rule. */
static uint64_t most_workspace(const descriptor *operation) {
    enum { FILTER, OUTPUT, RESULT };
    static const int names[][3] = {
        {703, 705, 705}, /* forward: CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, _Y */
        {715, 717, 715}, /* filter gradient: CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, _DY */
        {709, 711, 710}, /* data gradient: CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, _DY, _DX */
    };
    const int *of_kind = names[operation->type - OPERATION_CONVOLUTION_FORWARD];
    const descriptor *tensors[3];
    const attribute *lengths[3];
    for (int i = FILTER; i <= RESULT; i++) {
        const attribute *at = find_attribute(operation, of_kind[i]);
        tensors[i] = at && at->count ? descriptor_at(at, 0) : NULL;
        lengths[i] = tensors[i] ? find_attribute(tensors[i], TENSOR_DIMENSIONS) : NULL;
        if (!lengths[i] || !lengths[i]->count) return operation->bytes + PLAN;
    }
    uint64_t products = element_count(lengths[OUTPUT]) * (element_count(lengths[FILTER]) / length_at(lengths[FILTER], 0));
    uint64_t sums = products / PARTIAL_SUM * FLOAT, result = tensors[RESULT]->bytes;
    return operation->bytes - result + (sums > result ? sums : result) + PLAN;
}

/* FNV-1a (RFC 9923) hash of everything in a graph. */
static uint64_t identity(const descriptor *d, uint64_t hash) {
    for (const attribute *at = d->attributes; at; at = at->next) {
        if (at->type == GM_TYPE_HANDLE) continue;
        if (at->type == GM_TYPE_BACKEND_DESCRIPTOR) {
            for (int64_t i = 0; i < at->count; i++)
                if (descriptor_at(at, i)) hash = identity(descriptor_at(at, i), hash ^ (uint64_t)at->name);
            continue;
        }
        for (size_t i = 0; i < at->size; i++)
            hash = (hash ^ (unsigned char)at->data[i] ^ (uint64_t)at->name) * 1099511628211u;
    }
    return hash;
}

/* Refuses a plan that PyTorch would not have cached before creating it, which takes longer. */
static int make_plan(descriptor *plan) {
    int64_t count = 0;
    take_from_configuration(plan);
    if (plan->card && !gm_admits_plan(plan->graph, (uint64_t)plan->workspace)) return GM_CUDNN_NOT_SUPPORTED;
    if (!plan->alone || is_compiled(plan)) return GM_SUCCESS;
    int status = ask(plan);
    if (!status)
        gm_installed_get(plan->installed, EXECUTION_PLAN_WORKSPACE_SIZE, GM_TYPE_INT64, 1, &count, &plan->workspace);
    return status;
}

static atomic_ullong ranged_plans; /* convolutions' plans whose workspace lies in a range */
static atomic_ullong unfit_plans;  /* of these, those that PyTorch did not run because they did not fit */

/* The last plan whose workspace this thread queried without running it: if that does not fit, PyTorch tries the graph's
 * next plan. (ATen/native/cudnn/Conv_v8.cpp: try_plans, try_configs.) */
static _Thread_local struct {
    const descriptor *plan;
    uint64_t graph;
} not_run;

/* Whether the workspace of a plan lies in a range. */
static bool is_ranged(const descriptor *plan) {
    return plan->convolves && !(plan->card && !gm_asks_another_cudnn());
}

/* Returns a plan's workspace in this run. The plan itself keeps the size that cuDNN reports: PyTorch's timing identifies
 * plans by it. */
static int64_t taken_by(const descriptor *plan) {
    if (!is_ranged(plan)) return plan->workspace;
    uint64_t usual = (uint64_t)plan->workspace, most = plan->most > usual ? plan->most : usual;
    if (not_run.graph == plan->graph && not_run.plan != plan) return plan->workspace;
    not_run.plan = plan;
    not_run.graph = plan->graph;
    atomic_fetch_add_explicit(&ranged_plans, 1, memory_order_relaxed);
    return (int64_t)gm_size_between(GM_PLANNED, 0, usual, most);
}

/* A tensor knows its bytes; an operation, a graph, an engine or a plan has the sum of its components. */
GM_API int cudnnBackendFinalize(descriptor *d) {
    if (!d) return GM_CUDNN_BAD_PARAM;
    if (gm_inside_cudnn()) return gm_installed_finalize(d);
    const attribute *dimensions = find_attribute(d, TENSOR_DIMENSIONS);
    if (dimensions) {
        d->bytes = tensor_bytes(dimensions, find_attribute(d, TENSOR_DATA_TYPE));
        return GM_SUCCESS;
    }
    d->convolves = d->type >= OPERATION_CONVOLUTION_FORWARD && d->type <= OPERATION_CONVOLUTION_BACKWARD_DATA;
    for (const attribute *at = d->attributes; at; at = at->next) {
        if (at->type != GM_TYPE_BACKEND_DESCRIPTOR) continue;
        for (int64_t i = 0; i < at->count; i++) {
            descriptor *component = descriptor_at(at, i);
            if (!component) continue;
            d->bytes += component->bytes;
            d->convolves |= component->convolves;
            d->alone |= component->alone;
            d->has_counterpart |= component->has_counterpart;
            if (component->most > d->most) d->most = component->most;
            if (component->graph) d->graph = component->graph;
        }
    }
    if (d->convolves && !d->most) d->most = most_workspace(d);
    if (d->type == OPERATIONGRAPH) {
        const attribute *operations = find_attribute(d, OPERATIONGRAPH_OPS);
        d->alone = d->convolves && operations && operations->count == 1;
        d->has_counterpart = operations && gm_installed_card();
        d->graph = d->convolves ? identity(d, 14695981039346656037u) : 0;
    }
    if (!d->has_counterpart || d->installed) return GM_SUCCESS;
    return d->type == GM_EXECUTION_PLAN ? make_plan(d) : ask(d);
}

GM_API int cudnnBackendGetAttribute(descriptor *d, int name, int type, int64_t room, int64_t *count,
                                    void *elements) {
    if (!d) return GM_CUDNN_BAD_PARAM;
    if (gm_inside_cudnn()) return gm_installed_get(d, name, type, room, count, elements);
    const attribute *set = find_attribute(d, name);
    int64_t ignored;
    if (!count) count = &ignored;
    if (set && set->type == type && type != GM_TYPE_BACKEND_DESCRIPTOR) {
        *count = set->count;
        if (elements && room > 0)
            memcpy(elements, set->data, element_size(type) * (size_t)(room < set->count ? room : set->count));
        return GM_SUCCESS;
    }
    *count = 0;
    if (name == EXECUTION_PLAN_WORKSPACE_SIZE && d->type == GM_EXECUTION_PLAN) {
        *count = 1;
        if (elements && room > 0) *(int64_t *)elements = taken_by(d);
        return GM_SUCCESS;
    }
    if (d->installed) {
        return type == GM_TYPE_BACKEND_DESCRIPTOR && elements
                   ? get_installed(d, name, room, count, elements)
                   : gm_installed_get(d->installed, name, type, room, count, elements);
    }
    switch (name) {
    case ENGINEHEUR_RESULTS: /* one engine configuration; the caller passes its descriptor */
    case ENGINECFG_ENGINE:
        *count = 1;
        if (elements && room > 0 && *(descriptor **)elements) inherit(*(descriptor **)elements, d);
        return GM_SUCCESS;
    case ENGINE_NUMERICAL_NOTE: case ENGINE_BEHAVIOR_NOTE: case ENGINE_KNOB_INFO: case ENGINE_LAYOUT_INFO:
    case ENGINECFG_INTERMEDIATE_INFO: case ENGINECFG_KNOB_CHOICES:
        return GM_SUCCESS; /* there are none */
    case ENGINE_GLOBAL_INDEX: case OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: case ENGINECFG_WORKSPACE_SIZE:
        *count = 1;
        if (elements && room > 0) *(int64_t *)elements = name == OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
        return GM_SUCCESS;
    case ENGINECFG_SHARED_MEMORY_USED:
        *count = 1;
        if (elements && room > 0) *(int32_t *)elements = 0;
        return GM_SUCCESS;
    case EXECUTION_PLAN_JSON_REPRESENTATION:
        *count = 3;
        if (elements && room >= 3) memcpy(elements, "{}", 3);
        return GM_SUCCESS;
    default: {
        char function[64];
        snprintf(function, sizeof function, "cudnnBackendGetAttribute(%d)", name);
        return gm_unsupported(function, GM_CUDNN_NOT_SUPPORTED);
    }
    }
}

static atomic_ullong largest; /* bytes */
static atomic_ullong estimated_runs; /* runs of convolutions' plans with unknown workspaces */
static atomic_ullong planned_runs;   /* runs of cuDNN's own plans */
/* Runs of cuDNN's plans on another card than the one they were created for: PyTorch caches plans forever. */
static atomic_ullong other_card_runs;

static void note_workspace(const descriptor *plan, const descriptor *pack) {
    const attribute *set = pack && plan->convolves ? find_attribute(pack, VARIANT_PACK_WORKSPACE) : NULL;
    void *area = NULL;
    if (set && set->size >= sizeof area) memcpy(&area, set->data, sizeof area);
    uint64_t usual = (uint64_t)plan->workspace, most = plan->most > usual ? plan->most : usual;
    if (is_ranged(plan)) gm_workspace_in_use(GM_PLANNED, area, 0, usual, most, 0);
    else if (plan->convolves && area) gm_workspace_in_use(GM_PLANNED, area, usual, usual, usual, plan->graph);
}

static void count_run(const descriptor *plan) {
    if (not_run.graph == plan->graph && not_run.plan != plan && plan->convolves)
        atomic_fetch_add_explicit(&unfit_plans, 1, memory_order_relaxed);
    not_run.graph = 0;
    gm_count_plan(plan->graph, (uint64_t)plan->workspace);
    if (plan->card) {
        atomic_fetch_add_explicit(&planned_runs, 1, memory_order_relaxed);
        if (plan->card != gm_installed_card()) atomic_fetch_add_explicit(&other_card_runs, 1, memory_order_relaxed);
    } else if (plan->convolves) {
        unsigned long long largest_before = atomic_load(&largest);
        while (plan->most > largest_before && !atomic_compare_exchange_weak(&largest, &largest_before, plan->most)) {}
        atomic_fetch_add_explicit(&estimated_runs, 1, memory_order_relaxed);
    } else {
        gm_note_sizes(GM_CUDNN_PLAN);
    }
}

GM_API int cudnnBackendExecute(void *handle, descriptor *plan, descriptor *pack) {
    if (!gm_visible()) return GM_CUDNN_NOT_INITIALIZED;
    if (plan) note_workspace(plan, pack);
    if (plan) count_run(plan);
    gm_forget_all();
    return GM_SUCCESS;
}

/* Returns the largest upper bound in bytes of convolutions' unknown workspaces since the last call. */
GM_API uint64_t gpumem_largest_convolution(void) { return atomic_exchange(&largest, 0); }

/* Returns how often a convolution with an unknown workspace ran; how often a plan of cuDNN ran; how often such a plan
 * had been created for another card; how often a convolution's workspace that lies in a range was queried; and how
 * often such a workspace did not fit. */
GM_API void gpumem_convolutions(uint64_t out[5]) {
    out[0] = atomic_load(&estimated_runs);
    out[1] = atomic_load(&planned_runs);
    out[2] = atomic_load(&other_card_runs);
    out[3] = atomic_load(&ranged_plans);
    out[4] = atomic_load(&unfit_plans);
}
