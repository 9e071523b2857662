/* Functions of the CUDA driver API looked up by name: Triton and PyTorch do not link libcuda.so.1. */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <dlfcn.h>
#include <stdio.h>

/* CUdriverProcAddressQueryResult and cudaDriverEntryPointQueryResult: 0 found, 1 no such symbol. */
static int look_up(const char *symbol, void **function, int *result) {
    char versioned[128];
    static void *self;
    Dl_info here;
    if (!self && dladdr((void *)&look_up, &here)) self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *function = self ? dlsym(self, symbol) : NULL;
    if (!*function && self) {
        snprintf(versioned, sizeof versioned, "%s_v2", symbol);
        *function = dlsym(self, versioned);
    }
    if (result) *result = *function ? 0 : 1;
    return *function ? GM_SUCCESS : GM_SYMBOL_NOT_FOUND;
}

GM_API int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                            unsigned long long flags, int *result) {
    (void)version, (void)flags;
    return gm_error(look_up(symbol, function, result));
}

GM_API int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *result) {
    (void)flags;
    return gm_error(look_up(symbol, function, result));
}

GM_API int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *result) {
    (void)version, (void)flags;
    return look_up(symbol, function, result);
}

GM_API int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    (void)version, (void)flags;
    return look_up(symbol, function, NULL);
}
