/* The card, the number of visible devices, and this thread's device and last error. */
#define _GNU_SOURCE
#include "base/base.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

gm_card gm_profile = {.name = "unconfigured", .total_memory = 0};

static atomic_int visible_devices; /* 0: the machine has no GPU */
static atomic_int cuda_version = 13000;
static atomic_int cudnn_version = 90000;
static atomic_bool initialized; /* cuInit was called */
static _Thread_local int current_device;
static _Thread_local int last_error;

/* The installed cuDNN finds no device: with one it would load the kernels that it compiles. */
int gm_visible_devices(void) {
    return gm_inside_cudnn() ? 0 : atomic_load_explicit(&visible_devices, memory_order_relaxed);
}

bool gm_visible(void) { return gm_visible_devices() > 0; }

static int device_total = GM_MAX_DEVICES;

int gm_device_total(void) { return device_total; }

int gm_current_device(void) { return current_device; }

void gm_set_current_device(int device) { current_device = device; }

void gm_initialize(void) { atomic_store_explicit(&initialized, true, memory_order_relaxed); }

bool gm_initialized(void) { return atomic_load_explicit(&initialized, memory_order_relaxed); }

int gm_error(int status) {
    if (status != GM_SUCCESS) last_error = status;
    return status;
}

int gm_last_error(bool clear) {
    int status = last_error;
    if (clear) last_error = GM_SUCCESS;
    return status;
}

int gm_cuda_version(void) { return atomic_load(&cuda_version); }

int gm_cudnn_version(void) { return atomic_load(&cudnn_version); }

/* Python's _EstimatedLibrary has the same layout. */
typedef struct {
    const char *name, *note, *range;
} estimated_library;
static const estimated_library estimated_libraries[GM_ESTIMATED] = {
#define ESTIMATED(library, name, note, range) [library] = {name, note, range},
#include "base/estimated_libraries.h"
#undef ESTIMATED
};
static atomic_ullong estimates[GM_ESTIMATED];

/* Counts a size query to a library whose sizes are not documented. */
void gm_note_sizes(int library) { atomic_fetch_add_explicit(&estimates[library], 1, memory_order_relaxed); }

/* ---- child processes of a marked test: this library is preloaded into them, and a variable is set ---- */

/* Reads GPUMEM_VIRTUAL, written by gpumem_describe: devices, versions and the card's bytes, in hexadecimal. A launcher's
 * ranks select devices by LOCAL_RANK: there are at least LOCAL_WORLD_SIZE devices. */
__attribute__((constructor)) static void inherit(void) {
    const char *description = getenv("GPUMEM_VIRTUAL"), *launched = getenv("LOCAL_WORLD_SIZE");
    int count, cuda, cudnn, used = 0, ranks = launched ? atoi(launched) : 0;
    gm_card card;
    unsigned char *bytes = (unsigned char *)&card;
    if (!description || sscanf(description, "%d:%d:%d:%n", &count, &cuda, &cudnn, &used) != 3 || !used) return;
    description += used;
    if (strlen(description) != 2 * sizeof card || count < 1 || count > GM_MAX_DEVICES) return;
    for (size_t i = 0; i < sizeof card; i++) {
        unsigned byte;
        if (sscanf(description + 2 * i, "%2x", &byte) != 1) return;
        bytes[i] = (unsigned char)byte;
    }
    gm_profile = card;
    if (ranks > count) count = ranks < GM_MAX_DEVICES ? ranks : GM_MAX_DEVICES;
    gm_set_machine_devices(count);
    count = gm_shown_to_this_process();
    atomic_store(&cuda_version, cuda);
    atomic_store(&cudnn_version, cudnn);
    atomic_store(&visible_devices, count);
    device_total = count;
}

enum { DESCRIPTION_ROOM = 64 + 2 * sizeof(gm_card) };

/* ---- functions that Python calls ---- */

GM_API void gpumem_set_versions(int cuda, int cudnn) {
    atomic_store(&cuda_version, cuda);
    atomic_store(&cudnn_version, cudnn);
}

GM_API void gpumem_set_card(const gm_card *card) { gm_profile = *card; }

/* Shows `count` devices (0 hides them all). Returns the previous count. */
GM_API int gpumem_show(int count) {
    gm_values_trim();
    device_total = GM_MAX_DEVICES; /* from now on Python limits them: the inherited number no longer applies */
    if (count > GM_MAX_DEVICES) count = GM_MAX_DEVICES;
    if (count < 0) count = 0;
    gm_set_machine_devices(count);
    return atomic_exchange(&visible_devices, count);
}

/* Returns the value of GPUMEM_VIRTUAL that gives a child process `count` devices of the current card. */
GM_API const char *gpumem_describe(int count) {
    static char description[DESCRIPTION_ROOM];
    const unsigned char *bytes = (const unsigned char *)&gm_profile;
    int used = snprintf(description, sizeof description, "%d:%d:%d:", count, gm_cuda_version(), gm_cudnn_version());
    for (size_t i = 0; i < sizeof gm_profile; i++) { /* by hand, for speed: every measured test calls this */
        description[used++] = "0123456789abcdef"[bytes[i] >> 4];
        description[used++] = "0123456789abcdef"[bytes[i] & 15];
    }
    description[used] = 0;
    return description;
}

/* Returns how many sizes have been estimated so far: while this is unchanged, gpumem_guesses is, too. */
GM_API uint64_t gpumem_guessed(void) {
    uint64_t total = 0;
    for (int i = 0; i < GM_ESTIMATED; i++) total += atomic_load(&estimates[i]);
    return total;
}

/* Returns the libraries with estimated sizes, and how many there are. */
GM_API uint64_t gpumem_estimated_libraries(const estimated_library **libraries) {
    *libraries = estimated_libraries;
    return GM_ESTIMATED;
}

/* Returns how often each library with estimated sizes was queried for a size. */
GM_API void gpumem_guesses(uint64_t *counts) {
    for (int i = 0; i < GM_ESTIMATED; i++) counts[i] = atomic_load(&estimates[i]);
}

static atomic_ullong waits;

void gm_count_wait(void) { atomic_fetch_add_explicit(&waits, 1, memory_order_relaxed); }

GM_API uint64_t gpumem_waits(void) { return atomic_load(&waits); }
