/* CUDA graphs: tokens, whose nodes are not recorded, and the user objects that they keep alive.
 *
 * A user object has a count of references; the program's and each graph's are in it. The last one that goes calls the
 * object's destructor (CUDA Programming Guide, "CUDA User Objects"), by which a program frees what a graph uses. CUDA
 * calls it on a thread of its own; no work is ever pending here, so it is called at once, with no lock held.
 */
#include "runtime/runtime.h"

#include <pthread.h>
#include <stdlib.h>

enum { NO_DESTRUCTOR_SYNC = 1 }; /* cudaUserObjectNoDestructorSync, which a program has to give */
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

typedef struct {
    held *objects;
} graph;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all counts and lists */

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

/* The references become the graph's: they are counted already. */
static int hold(graph *g, user_object *object, uint64_t count) {
    held *entry = malloc(sizeof *entry);
    if (!entry) return GM_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    *entry = (held){object, count, g->objects};
    g->objects = entry;
    pthread_mutex_unlock(&lock);
    return GM_SUCCESS;
}

static void delete_graph(graph *g) {
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

/* An executable graph keeps the objects of its graph alive by itself. */
GM_API int cudaGraphInstantiate(void **out, const graph *source, unsigned long long flags) {
    (void)flags;
    graph *copy = gm_graph_new();
    if (!copy) return gm_error(GM_OUT_OF_MEMORY);
    for (const held *entry = source->objects; entry; entry = entry->next) {
        int status = hold(copy, entry->object, entry->count);
        if (status) {
            delete_graph(copy);
            return gm_error(status);
        }
        retain(entry->object, entry->count);
    }
    *out = copy;
    return GM_SUCCESS;
}

GM_API int cudaGraphInstantiateWithFlags(void **out, const graph *source, unsigned long long flags) {
    return cudaGraphInstantiate(out, source, flags);
}

GM_API int cudaGraphDestroy(graph *g) {
    delete_graph(g);
    return GM_SUCCESS;
}

GM_API int cudaGraphExecDestroy(graph *g) {
    delete_graph(g);
    return GM_SUCCESS;
}

GM_API int cudaGraphLaunch(void *executable, void *stream) {
    (void)executable, (void)stream;
    gm_count_launch();
    return gm_error(gm_visible() ? GM_SUCCESS : GM_NO_DEVICE);
}

GM_API int cudaGraphGetNodes(void *g, void **nodes, size_t *count) {
    (void)g, (void)nodes;
    *count = 1; /* PyTorch warns of an empty graph; the nodes of a graph are not recorded here */
    return GM_SUCCESS;
}
