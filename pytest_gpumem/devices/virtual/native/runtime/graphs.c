/* CUDA graphs: their nodes, which are kernels, copies and memsets without contents, with the edges between them
 * (PyTorch's allocator queries these), events that are external to a graph, and the user objects that a graph keeps
 * alive.
 *
 * A user object has a reference count, which includes the program's references and each graph's. Releasing the last one
 * calls the object's destructor (CUDA Programming Guide, "CUDA User Objects"), in which a program frees what a graph
 * uses. CUDA calls it on its own thread; no work is ever pending here, so it is called at once, with no lock held. */
#include "runtime/runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { NO_DESTRUCTOR_SYNC = 1 }; /* cudaUserObjectNoDestructorSync, which a program must pass */
enum { MOVE = 1 };               /* cudaGraphUserObjectMove: the caller's references become the graph's */

typedef struct {
    void *payload;
    void (*destroy)(void *payload);
    uint64_t references;
} user_object;

typedef struct held {
    user_object *object;
    uint64_t count;
    struct held *next;
} held;

enum { EMPTY_NODE = 5 }; /* cudaGraphNodeTypeEmpty */
enum { UPLOAD = 2 };                      /* cudaGraphInstantiateFlagUpload */

typedef struct {
    int type;
    size_t count;
    void *dependencies[]; /* nodes that must run before it */
} graph_node;

typedef struct {
    held *objects;
    graph_node **nodes; /* in order of creation */
    size_t count, room;
    unsigned long long flags; /* of an executable graph */
} graph;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for all counts and lists */

void *gm_graph_new(void) { return calloc(1, sizeof(graph)); }

static int retain(user_object *object, uint64_t count) {
    if (!object || !count) return GM_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    object->references += count;
    pthread_mutex_unlock(&lock);
    return GM_SUCCESS;
}

static int release(user_object *object, uint64_t count) {
    if (!object || !count) return GM_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    bool enough = count <= object->references;
    if (enough) object->references -= count;
    bool last = enough && !object->references;
    pthread_mutex_unlock(&lock);
    if (last) {
        object->destroy(object->payload);
        free(object);
    }
    return enough ? GM_SUCCESS : GM_INVALID_VALUE;
}

/* Moves references to the graph: they are counted already. */
static int hold(graph *g, user_object *object, uint64_t count) {
    held *entry = malloc(sizeof *entry);
    if (!entry) return GM_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    *entry = (held){object, count, g->objects};
    g->objects = entry;
    pthread_mutex_unlock(&lock);
    return GM_SUCCESS;
}

void *gm_graph_add(void *to, void *const *dependencies, size_t count, int type) {
    graph *g = to;
    graph_node *node = malloc(sizeof *node + count * sizeof *dependencies);
    if (!node) return NULL;
    node->type = type;
    node->count = count;
    if (count) memcpy(node->dependencies, dependencies, count * sizeof *dependencies);
    pthread_mutex_lock(&lock);
    bool ok = gm_grow(&g->nodes, &g->room, g->count, sizeof *g->nodes);
    if (ok) g->nodes[g->count++] = node;
    pthread_mutex_unlock(&lock);
    if (!ok) free(node);
    return ok ? node : NULL;
}

static void delete_graph(graph *g) {
    for (size_t i = 0; g && i < g->count; i++) free(g->nodes[i]);
    if (g) free(g->nodes);
    for (held *entry = g ? g->objects : NULL, *next; entry; entry = next) {
        next = entry->next;
        release(entry->object, entry->count);
        free(entry);
    }
    free(g);
}

GM_API int cudaUserObjectCreate(user_object **out, void *payload, void (*destroy)(void *), unsigned references,
                                unsigned flags) {
    if (!out || !destroy || !references || flags != NO_DESTRUCTOR_SYNC) return gm_error(GM_INVALID_VALUE);
    *out = malloc(sizeof **out);
    if (!*out) return gm_error(GM_OUT_OF_MEMORY);
    **out = (user_object){payload, destroy, references};
    return GM_SUCCESS;
}

GM_API int cudaUserObjectRetain(user_object *object, unsigned count) { return gm_error(retain(object, count)); }
GM_API int cudaUserObjectRelease(user_object *object, unsigned count) { return gm_error(release(object, count)); }

GM_API int cudaGraphRetainUserObject(graph *g, user_object *object, unsigned count, unsigned flags) {
    if (!g || !object || !count || flags > MOVE) return gm_error(GM_INVALID_VALUE);
    int status = hold(g, object, count);
    if (!status && flags != MOVE) status = retain(object, count);
    return gm_error(status);
}

GM_API int cudaGraphReleaseUserObject(graph *g, user_object *object, unsigned count) {
    if (!g || !object || !count) return gm_error(GM_INVALID_VALUE);
    uint64_t missing = count;
    pthread_mutex_lock(&lock);
    for (held **at = &g->objects; *at && missing;) {
        held *entry = *at;
        uint64_t taken = entry->object != object ? 0 : entry->count < missing ? entry->count : missing;
        entry->count -= taken;
        missing -= taken;
        if (entry->count) {
            at = &entry->next;
        } else {
            *at = entry->next;
            free(entry);
        }
    }
    pthread_mutex_unlock(&lock);
    if (missing < count) release(object, count - missing);
    return gm_error(missing ? GM_INVALID_VALUE : GM_SUCCESS);
}

/* Returns a graph with the same objects, but without the nodes; NULL: no memory. */
static graph *copy_of(const graph *source) {
    graph *copy = gm_graph_new();
    bool ok = copy != NULL;
    for (const held *entry = source->objects; entry && ok; entry = entry->next) {
        ok = hold(copy, entry->object, entry->count) == GM_SUCCESS;
        if (ok) retain(entry->object, entry->count);
    }
    if (ok) return copy;
    delete_graph(copy);
    return NULL;
}

/* An executable graph outlives its graph: it owns references to the objects itself. */
GM_API int cudaGraphInstantiate(void **out, const graph *source, unsigned long long flags) {
    graph *copy = copy_of(source);
    if (!copy) return gm_error(GM_OUT_OF_MEMORY);
    copy->flags = flags;
    *out = copy;
    return GM_SUCCESS;
}

GM_SAME(cudaGraphInstantiateWithFlags, cudaGraphInstantiate);

GM_API int cudaGraphDestroy(void *g) { delete_graph(g); return GM_SUCCESS; }
GM_API int cudaGraphExecDestroy(graph *g) { delete_graph(g); return GM_SUCCESS; }

/* Returns all flags but the one to upload the graph, which does not change an executable graph. */
GM_API int cudaGraphExecGetFlags(const graph *executable, unsigned long long *flags) {
    if (!executable || !flags) return gm_error(GM_INVALID_VALUE);
    *flags = executable->flags & ~(unsigned long long)UPLOAD;
    return GM_SUCCESS;
}

GM_API int cudaGraphLaunch(const graph *executable, void *stream) {
    gm_work_next_on(stream);
    gm_count_launch();
    return gm_error(gm_visible() ? GM_SUCCESS : GM_NO_DEVICE);
}

/* Copies nodes to a caller's array of *room entries, or counts them if there is no array; remaining entries are NULL. */
static int list(void *const *nodes, size_t count, void **out, size_t *room) {
    if (!room) return GM_INVALID_VALUE;
    if (out) {
        size_t copied = count < *room ? count : *room;
        if (copied) memcpy(out, nodes, copied * sizeof *out);
        for (size_t i = copied; i < *room; i++) out[i] = NULL;
        count = copied;
    }
    *room = count;
    return GM_SUCCESS;
}

GM_API int cudaGraphGetNodes(const graph *g, void **nodes, size_t *count) {
    return gm_error(g ? list((void *const *)g->nodes, g->count, nodes, count) : GM_INVALID_VALUE);
}

/* CUDA 13 queries the edges' data too, which mark programmatic launches: all edges are plain here. */
GM_API int cudaGraphNodeGetDependencies(const graph_node *node, void **nodes, void *data_or_count, size_t *count) {
    if (gm_cuda_version() < 13000) count = data_or_count;
    return gm_error(node ? list(node->dependencies, node->count, nodes, count) : GM_INVALID_VALUE);
}

GM_API int cudaGraphNodeGetDependencies_v2(const graph_node *node, void **nodes, void *data, size_t *count) {
    return gm_error(node ? list(node->dependencies, node->count, nodes, count) : GM_INVALID_VALUE);
}

GM_API int cudaGraphAddEmptyNode(void **out, graph *g, void *const *dependencies, size_t count) {
    if (!out || !g || (count && !dependencies)) return gm_error(GM_INVALID_VALUE);
    *out = gm_graph_add(g, dependencies, count, EMPTY_NODE);
    return gm_error(*out ? GM_SUCCESS : GM_OUT_OF_MEMORY);
}

/* A captured copy or memset counts as a kernel here: PyTorch queries the type only to recognise empty nodes. */
GM_API int cudaGraphNodeGetType(const graph_node *node, int *type) {
    if (!node || !type) return gm_error(GM_INVALID_VALUE);
    *type = node->type;
    return GM_SUCCESS;
}
