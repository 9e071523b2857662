/* Bytes allocated on each device, charged against the capacity of its card. */
#define _GNU_SOURCE /* dladdr */
#include "base/base.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

static struct {
    gm_account account;
    uint64_t extra; /* capacity beyond the card's: memory that was in use when a step began */
} devices[GM_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t first_total;

static uint64_t capacity(int device) {
    uint64_t own = gm_profile.total_memory > gm_profile.context_memory
                       ? gm_profile.total_memory - gm_profile.context_memory
                       : 0;
    return own + devices[device].extra;
}

int gm_charge(int device, uint64_t size) {
    gm_account *account = &devices[device].account;
    int status = GM_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    uint64_t room = capacity(device);
    if (size > room || account->charged > room - size) {
        account->failures++;
    } else {
        account->charged += size;
        if (account->charged > account->peak_charged) account->peak_charged = account->charged;
        account->mallocs++;
        status = GM_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void gm_discharge(int device, uint64_t size) {
    pthread_mutex_lock(&lock);
    devices[device].account.charged -= size;
    devices[device].account.frees++;
    pthread_mutex_unlock(&lock);
}

uint64_t gm_free_memory(int device) {
    pthread_mutex_lock(&lock);
    uint64_t charged = devices[device].account.charged, room = capacity(device);
    pthread_mutex_unlock(&lock);
    return room > charged ? room - charged : 0;
}

uint64_t gm_total_memory(int device) {
    pthread_mutex_lock(&lock);
    uint64_t total = gm_profile.total_memory + devices[device].extra;
    pthread_mutex_unlock(&lock);
    return total;
}

uint64_t gm_total_for(int device, const void *caller) {
    uint64_t first = atomic_load(&first_total);
    Dl_info library;
    if (!first || !dladdr(caller, &library) || !library.dli_fname) return gm_total_memory(device);
    return strstr(library.dli_fname, "/torch/lib/") ? first : gm_total_memory(device);
}

/* ---- functions that Python calls ---- */

/* Sets the total memory per device that PyTorch's own libraries see from now on; 0: the real total. PyTorch's allocator
 * caches the total that it reads first, and limits are fractions of that, for cards of any size. */
GM_API void gpumem_set_first_total(uint64_t bytes) { atomic_store(&first_total, bytes); }

GM_API void gpumem_account(int device, gm_account *out) {
    pthread_mutex_lock(&lock);
    *out = devices[device].account;
    pthread_mutex_unlock(&lock);
}

GM_API void gpumem_forget_peak(int device) {
    pthread_mutex_lock(&lock);
    devices[device].account.peak_charged = devices[device].account.charged;
    pthread_mutex_unlock(&lock);
}

GM_API void gpumem_make_room(int device, uint64_t size) {
    pthread_mutex_lock(&lock);
    devices[device].extra = size;
    pthread_mutex_unlock(&lock);
}
