/* NVRTC (nothing is executed, so compiling just succeeds), and all that is refused by name. */
#include "gpumem.h"

#include <stdlib.h>
#include <string.h>

static int made(void **out) {
    *out = calloc(1, 64);
    return *out ? GM_SUCCESS : GM_OUT_OF_MEMORY;
}

/* ---- NVRTC ---- */

GM_API int nvrtcVersion(int *major, int *minor) {
    *major = gm_cuda_version() / 1000;
    *minor = gm_cuda_version() % 1000 / 10;
    return GM_SUCCESS;
}

GM_API int nvrtcCreateProgram(void **out, const char *source, const char *name, int count, const char *const *headers,
                              const char *const *names) {
    (void)source, (void)name, (void)count, (void)headers, (void)names;
    return made(out);
}

GM_API int nvrtcDestroyProgram(void **program) {
    free(*program);
    *program = NULL;
    return GM_SUCCESS;
}

GM_API int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    (void)program, (void)count, (void)options;
    return GM_SUCCESS;
}

GM_API int nvrtcAddNameExpression(void *program, const char *name) {
    (void)program, (void)name;
    return GM_SUCCESS;
}

GM_API int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
    (void)program;
    *lowered = name;
    return GM_SUCCESS;
}

static int one_byte(size_t *size) {
    *size = 1;
    return GM_SUCCESS;
}

static int empty(char *out) {
    *out = '\0';
    return GM_SUCCESS;
}

GM_API int nvrtcGetCUBINSize(void *program, size_t *size) { (void)program; return one_byte(size); }
GM_API int nvrtcGetPTXSize(void *program, size_t *size) { (void)program; return one_byte(size); }
GM_API int nvrtcGetProgramLogSize(void *program, size_t *size) { (void)program; return one_byte(size); }
GM_API int nvrtcGetCUBIN(void *program, char *out) { (void)program; return empty(out); }
GM_API int nvrtcGetPTX(void *program, char *out) { (void)program; return empty(out); }
GM_API int nvrtcGetProgramLog(void *program, char *out) { (void)program; return empty(out); }
GM_API const char *nvrtcGetErrorString(int status) { return status ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }

/* ---- all the rest that PyTorch links: refused by name ---- */

#define UNSUPPORTED(name, status) GM_API int name(void) { return gm_unsupported(#name, status); }
#include "unsupported.h"
