/* NVRTC: nothing is executed, so every program compiles, to nothing.
 *
 * The installed cuDNN (cudnn/installed.c) uses the real NVRTC: it leaves out engines whose kernels do not compile. */
#define _GNU_SOURCE
#include "base/base.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INTERNAL_ERROR = 11 };

/* ---- the real NVRTC ---- */

static void *real;

/* Folders of NVIDIA's wheels, relative to one of theirs (nvidia/cudnn/lib) or to PyTorch's (torch/lib). */
static const char *const places[] = {"../../cu13/lib", "../../cuda_nvrtc/lib", "../../nvidia/cu13/lib",
                                     "../../nvidia/cuda_nvrtc/lib", "."};

/* Opens a library by its path: by its name it would be this library, which has that SONAME. */
static void *open_beside(const char *library) {
    struct link_map *map;
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD), *library_found = NULL;
    if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &map)) return NULL;
    const char *end = strrchr(map->l_name, '/');
    for (size_t i = 0; end && !library_found && i < sizeof places / sizeof *places; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%.*s/%s/libnvrtc.so.%d", (int)(end - map->l_name), map->l_name, places[i],
                 gm_cuda_version() / 1000);
        library_found = dlopen(path, RTLD_LAZY);
    }
    dlclose(handle);
    return library_found;
}

static void open_real(void) {
    real = open_beside("libcudnn.so.9");
    if (!real) real = open_beside("libtorch_cuda.so");
}

static void *function(const char *name) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!gm_inside_cudnn()) return NULL;
    pthread_once(&once, open_real);
    return real ? dlsym(real, name) : NULL;
}

/* Calls the real function of this name if cuDNN is the caller. */
#define PASS_ON(type, parameters, arguments)        \
    do {                                            \
        type(*pass_on) parameters;                  \
        void *address = function(__func__);         \
        if (!address) break;                        \
        memcpy(&pass_on, &address, sizeof pass_on); \
        return pass_on arguments;                   \
    } while (0)

/* ---- the functions of NVRTC ---- */

GM_API int nvrtcVersion(int *major, int *minor) {
    PASS_ON(int, (int *, int *), (major, minor));
    *major = gm_cuda_version() / 1000;
    *minor = gm_cuda_version() % 1000 / 10;
    return GM_SUCCESS;
}

GM_API int nvrtcGetNumSupportedArchs(int *count) {
    PASS_ON(int, (int *), (count));
    return gm_unsupported(__func__, INTERNAL_ERROR);
}

GM_API int nvrtcGetSupportedArchs(int *archs) {
    PASS_ON(int, (int *), (archs));
    return gm_unsupported(__func__, INTERNAL_ERROR);
}

GM_API int nvrtcCreateProgram(void **out, const char *source, const char *name, int count, const char *const *headers,
                              const char *const *names) {
    PASS_ON(int, (void **, const char *, const char *, int, const char *const *, const char *const *),
            (out, source, name, count, headers, names));
    *out = calloc(1, 64);
    return *out ? GM_SUCCESS : GM_OUT_OF_MEMORY;
}

GM_API int nvrtcDestroyProgram(void **program) {
    PASS_ON(int, (void **), (program));
    free(*program);
    *program = NULL;
    return GM_SUCCESS;
}

GM_API int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    PASS_ON(int, (void *, int, const char *const *), (program, count, options));
    return GM_SUCCESS;
}

GM_API int nvrtcAddNameExpression(void *program, const char *name) {
    PASS_ON(int, (void *, const char *), (program, name));
    return GM_SUCCESS;
}

GM_API int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
    PASS_ON(int, (void *, const char *, const char **), (program, name, lowered));
    *lowered = name;
    return GM_SUCCESS;
}

#define SIZE_OF(name)                                      \
    GM_API int name(void *program, size_t *size) {         \
        PASS_ON(int, (void *, size_t *), (program, size)); \
        *size = 1;                                         \
        return GM_SUCCESS;                                 \
    }
#define TEXT_OF(name)                                   \
    GM_API int name(void *program, char *out) {         \
        PASS_ON(int, (void *, char *), (program, out)); \
        *out = '\0';                                    \
        return GM_SUCCESS;                              \
    }

SIZE_OF(nvrtcGetCUBINSize)
SIZE_OF(nvrtcGetPTXSize)
SIZE_OF(nvrtcGetProgramLogSize)
TEXT_OF(nvrtcGetCUBIN)
TEXT_OF(nvrtcGetPTX)
TEXT_OF(nvrtcGetProgramLog)

GM_API const char *nvrtcGetErrorString(int status) {
    PASS_ON(const char *, (int), (status));
    return status ? "NVRTC_ERROR" : "NVRTC_SUCCESS";
}

/* Undocumented, and never observed to be called: cuDNN up to 9.19 has no compiled engines without it. */
GM_API int __nvrtcCPEx(void) { return gm_unsupported("__nvrtcCPEx", INTERNAL_ERROR); }
