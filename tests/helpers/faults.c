/*
 * Preloaded into a process: of the calls that change what is on disk one fails, or is the last.
 *
 * A write does half of its work first.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long due = -1, seen;
static int failure;

/* Lets call `number`, counted from 0 and from now on, fail with `code`; 0: it ends the process. */
void fault_at(long number, int code) {
    due = number;
    seen = 0;
    failure = code;
}

/* Calls since fault_at. */
long faults_seen(void) { return seen; }

static int strikes(void) { return due >= 0 && seen++ == due; }

static int strike(void) {
    if (failure == 0)
        kill(getpid(), SIGKILL);
    errno = failure;
    return -1;
}

static int on_disk(int file) {
    struct stat status;
    return fstat(file, &status) == 0 && !S_ISFIFO(status.st_mode) && !S_ISCHR(status.st_mode);
}

/* The body of a function that opens a file: the mode follows its flags where it makes one. */
#define OPENING(...)                                                                               \
    {                                                                                              \
        va_list arguments;                                                                         \
        va_start(arguments, flags);                                                                \
        mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;                             \
        va_end(arguments);                                                                         \
        if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && strikes())                                  \
            return strike();                                                                       \
        return __VA_ARGS__;                                                                        \
    }
#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...) OPENING(REAL(name)(path, flags, mode))
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                               \
    int name(int folder, const char *path, int flags, ...)                                         \
        OPENING(REAL(name)(folder, path, flags, mode))
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *bytes, size_t size) {
    if (on_disk(file) && strikes()) {
        if (REAL(write)(file, bytes, size / 2) < 0)
            return -1;
        return strike();
    }
    return REAL(write)(file, bytes, size);
}

#define CALL(name, parameters, ...)                                                                \
    int name parameters { return strikes() ? strike() : REAL(name)(__VA_ARGS__); }
CALL(mkdir, (const char *path, mode_t mode), path, mode)
CALL(rename, (const char *from, const char *to), from, to)
CALL(unlink, (const char *path), path)
CALL(chmod, (const char *path, mode_t mode), path, mode)
CALL(fsync, (int file), file)
CALL(flock, (int file, int operation), file, operation)
CALL(ftruncate, (int file, off_t size), file, size)
CALL(fchmod, (int file, mode_t mode), file, mode)

int close(int file) {
    if (on_disk(file) && strikes()) {
        REAL(close)(file);
        return strike();
    }
    return REAL(close)(file);
}
