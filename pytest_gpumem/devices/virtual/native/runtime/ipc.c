/* Memory and events shared between processes (cudaIpc...).
 *
 * A handle contains the process, address and size of the memory. A process that opens it gets addresses that belong to a
 * device but use none of its memory: shared memory is charged only in the process that allocated it. Its bytes are
 * unknown in both. */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { HANDLE_SIZE = 64 };
#define MEMORY_MAGIC UINT64_C(0x6770756d656d2d6d)
#define EVENT_MAGIC UINT64_C(0x6770756d656d2d65)

typedef union {
    struct {
        uint64_t magic, process, address, size;
        int32_t device;
    } fields;
    char bytes[HANDLE_SIZE]; /* cudaIpcMemHandle_t and cudaIpcEventHandle_t */
} ipc_handle;

_Static_assert(sizeof(ipc_handle) == HANDLE_SIZE, "CUDA's IPC handles have 64 bytes");

enum { MAX_OPENED = 4096 };
static struct {
    uint64_t process, address; /* as in the handle */
    uintptr_t start;           /* 0: a free entry */
    size_t size;
    int references;
} opened[MAX_OPENED];
static int opened_count; /* entries that were ever in use */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

GM_API int cudaIpcGetMemHandle(ipc_handle *out, void *address) {
    void *base;
    size_t size;
    if (!gm_range_of(address, &base, &size)) return gm_error(GM_INVALID_VALUE);
    memset(out, 0, sizeof *out);
    out->fields.magic = MEMORY_MAGIC;
    out->fields.process = (uint64_t)getpid();
    out->fields.address = (uint64_t)(uintptr_t)base;
    out->fields.size = size;
    out->fields.device = gm_owner(address);
    gm_space_share(base, size);
    return GM_SUCCESS;
}

/* Returns the index of an open handle, or else of a free entry, or -1. */
static int place_of(const ipc_handle *handle) {
    int unused = -1;
    for (int i = 0; i < opened_count; i++) {
        if (!opened[i].start) unused = unused < 0 ? i : unused;
        else if (opened[i].process == handle->fields.process && opened[i].address == handle->fields.address &&
                 opened[i].size == handle->fields.size)
            return i;
    }
    if (unused < 0 && opened_count < MAX_OPENED) unused = opened_count++;
    return unused;
}

static int open_at(int place, const ipc_handle *handle) {
    if (place < 0) return GM_OUT_OF_MEMORY;
    if (opened[place].start) {
        opened[place].references++;
        return GM_SUCCESS;
    }
    void *map = gm_space_open(handle->fields.size);
    if (!map) return GM_OUT_OF_MEMORY;
    if (!gm_addresses_add((uintptr_t)map, handle->fields.size, handle->fields.device, GM_FROM_IPC)) {
        gm_space_close(map, handle->fields.size);
        return GM_OUT_OF_MEMORY;
    }
    gm_space_share(map, handle->fields.size);
    opened[place].process = handle->fields.process;
    opened[place].address = handle->fields.address;
    opened[place].start = (uintptr_t)map;
    opened[place].size = handle->fields.size;
    opened[place].references = 1;
    return GM_SUCCESS;
}

GM_API int cudaIpcOpenMemHandle(void **out, ipc_handle handle, unsigned flags) {
    if (!gm_visible()) return gm_error(GM_NO_DEVICE);
    if (handle.fields.magic != MEMORY_MAGIC || !handle.fields.size) return gm_error(GM_INVALID_VALUE);
    if (handle.fields.device < 0 || handle.fields.device >= gm_visible_devices()) return gm_error(GM_INVALID_DEVICE);
    if (handle.fields.process == (uint64_t)getpid()) return gm_error(GM_DEVICE_UNINITIALIZED); /* its own memory */
    pthread_mutex_lock(&lock);
    int place = place_of(&handle), status = open_at(place, &handle);
    if (!status) *out = (void *)opened[place].start;
    pthread_mutex_unlock(&lock);
    return gm_error(status);
}

GM_API int cudaIpcCloseMemHandle(void *address) {
    int status = GM_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < opened_count && status; i++) {
        if (!address || opened[i].start != (uintptr_t)address) continue;
        status = GM_SUCCESS;
        if (--opened[i].references) continue;
        gm_addresses_remove(opened[i].start, GM_FROM_IPC);
        gm_space_close(address, opened[i].size);
        opened[i].start = 0;
    }
    pthread_mutex_unlock(&lock);
    return gm_error(status);
}

/* ---- events: work is done as soon as it is submitted, so another process's event has completed ---- */

GM_API int cudaIpcGetEventHandle(ipc_handle *out, void *event) {
    if (!event) return gm_error(GM_INVALID_VALUE);
    memset(out, 0, sizeof *out);
    out->fields.magic = EVENT_MAGIC;
    out->fields.process = (uint64_t)getpid();
    return GM_SUCCESS;
}

GM_API int cudaIpcOpenEventHandle(void **out, ipc_handle handle) {
    if (handle.fields.magic != EVENT_MAGIC) return gm_error(GM_INVALID_VALUE);
    int status = cudaEventCreateWithFlags(out, 0);
    return status ? status : cudaEventRecord(*out, NULL);
}
