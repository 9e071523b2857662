/* Unsupported functions that were called, and the terminal to report them to.
 *
 * A library may end the process after a refusal (exit(1)), and a test runner may have redirected standard error to a file
 * that is then lost. So the name is written to the terminal as well, and the end of a process in a test is reported. */
#define _GNU_SOURCE
#include "base/base.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ROOM = 2048, MESSAGE_ROOM = 1024 };
static struct {
    const char *function;
    uint64_t calls;
} refusals[ROOM];
static int refusal_count;
static const char *last_refused;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static atomic_int terminal = -1; /* a copy of standard error from before it was redirected */
static pid_t watched_process;    /* the process whose end in a test is reported; its forked children are not */

/* On a terminal the message may appear within a test runner's line: it starts with a line break. */
static void tell(const char *message) {
    struct stat now, saved;
    int fd = atomic_load(&terminal);
    fprintf(stderr, "%s\n", message);
    fflush(stderr);
    bool redirected = fd >= 0 && !fstat(fd, &saved) &&
                      (fstat(STDERR_FILENO, &now) || now.st_dev != saved.st_dev || now.st_ino != saved.st_ino);
    if (redirected) dprintf(fd, "\n%s\n", message);
}

int gm_unsupported(const char *function, int status) {
    bool first = true;
    if (gm_inside_cudnn()) return status; /* cuDNN works without it; no step is affected */
    pthread_mutex_lock(&lock);
    for (int i = 0; i < refusal_count && first; i++) {
        if (strcmp(refusals[i].function, function) == 0) {
            refusals[i].calls++;
            last_refused = refusals[i].function;
            first = false;
        }
    }
    if (first && refusal_count < ROOM) {
        char *copy = strdup(function); /* never freed: Python may reference it */
        if (copy) {
            refusals[refusal_count].function = last_refused = copy;
            refusals[refusal_count++].calls = 1;
        }
    }
    pthread_mutex_unlock(&lock);
    if (first) {
        char message[MESSAGE_ROOM];
        snprintf(message, sizeof message, "pytest-gpumem: the virtual GPU does not support %s", function);
        tell(message);
    }
    return status;
}

/* pytest sets PYTEST_CURRENT_TEST while a test runs, and removes it before it ends itself. */
static void report_end(int status, void *unused) {
    const char *test = getenv("PYTEST_CURRENT_TEST");
    char message[MESSAGE_ROOM];
    if (!test || !watched_process || getpid() != watched_process) return;
    int used = snprintf(message, sizeof message, "pytest-gpumem: the process ended with exit status %d in %s", status,
                        test);
    if (last_refused && used > 0 && used < MESSAGE_ROOM) {
        snprintf(message + used, sizeof message - (size_t)used, "; last refused: %s", last_refused);
    }
    tell(message);
}

/* ---- functions that Python calls ---- */

/* Sets where refusals are written besides standard error; the end of this process in a test is reported there too. */
GM_API void gpumem_set_terminal(int fd) {
    static atomic_bool registered;
    atomic_store(&terminal, fd);
    watched_process = fd >= 0 ? getpid() : 0; /* none: Python itself ends the process */
    if (!atomic_exchange(&registered, true)) on_exit(report_end, NULL);
}

GM_API int gpumem_unsupported_count(void) { return refusal_count; }

/* Returns the i-th unsupported function that was called, and its number of calls; NULL past the end. */
GM_API const char *gpumem_unsupported_name(int index, uint64_t *calls) {
    if (index < 0 || index >= refusal_count) return NULL;
    if (calls) *calls = refusals[index].calls;
    return refusals[index].function;
}
