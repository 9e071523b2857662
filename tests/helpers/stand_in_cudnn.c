/* A cuDNN of the tests: it finalizes what it is given, writes what it was told, and its plans want some bytes. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef VERSION
#define VERSION 91002
#endif
#ifndef WORKSPACE
#define WORKSPACE 1000000
#endif

int cuInit(unsigned flags);
int cuDeviceGetCount(int *count);
int nvrtcGetNumSupportedArchs(int *count);

typedef struct {
    int type;
} descriptor;

static void tell(const char *text) {
    FILE *file = fopen(getenv("STAND_IN_LOG"), "a");
    fprintf(file, "%s\n", text);
    fclose(file);
}

#ifndef CUDA
int cudaRuntimeGetVersion(int *version);

size_t cudnnGetCudartVersion(void) {
    int version = 0;
    cudaRuntimeGetVersion(&version);
    return (size_t)version;
}
#else
size_t cudnnGetCudartVersion(void) { return CUDA; }
#endif

size_t cudnnGetVersion(void) { return VERSION; }

const char *cudnnGetErrorString(int status) { return status ? "STAND_IN_ERROR" : "CUDNN_STATUS_SUCCESS"; }

void cudnnGetLastErrorString(char *message, size_t size) { snprintf(message, size, "the stand-in's last words"); }

int cudnnBackendCreateDescriptor(int type, descriptor **out) {
    *out = calloc(1, sizeof **out);
    (*out)->type = type;
    return 0;
}

int cudnnBackendDestroyDescriptor(descriptor *d) {
    free(d);
    return 0;
}

int cudnnBackendSetAttribute(descriptor *d, int name, int type, int64_t count, const void *elements) {
    char text[4096];
    if (name == 2702) snprintf(text, sizeof text, "device %.*s", (int)count, (const char *)elements);
    else snprintf(text, sizeof text, "set %d of %d as %d", name, d->type, type);
    tell(text);
    return 0;
}

int cudnnBackendFinalize(descriptor *d) {
    int count = -1, archs = -1;
    if (d->type == 38) {
        char text[96];
        cuDeviceGetCount(&count);
        int status = nvrtcGetNumSupportedArchs(&archs);
        snprintf(text, sizeof text, "devices %d, cuInit %d, NVRTC %d, some %d", count, cuInit(0), status, archs > 0);
        tell(text);
    }
#ifdef REFUSED
    return d->type == REFUSED ? 3000 : 0;
#else
    return 0;
#endif
}

int cudnnBackendGetAttribute(descriptor *d, int name, int type, int64_t wanted, int64_t *count, void *elements) {
    (void)d, (void)type;
    *count = name == 202 || name == 300 || name == 402 || name == 1301;
    if (name == 402 && wanted > 0) *(int64_t *)elements = WORKSPACE;
    if (name == 1301 && wanted > 0) *(int64_t *)elements = 0;
#ifdef COMPILED /* an engine with the note of run-time compilation, and its configuration's workspace */
    if (name == 303 || name == 1305) *count = 1;
    if (name == 303 && wanted > 0) *(int64_t *)elements = COMPILED;
    if (name == 1305 && wanted > 0 && elements) *(int *)elements = 0;
#endif
    return 0;
}
