/* Looks functions of the CUDA driver API up by name: Triton and PyTorch do not link libcuda.so.1. */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

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

/* Only the CUDA runtime requests it: its tables are not documented, and are missing here. A library linked with the
 * runtime's static version contains a copy of it, which then fails with "the API call is not supported in the installed
 * CUDA driver" (36). NVIDIA's own libraries contain such copies too, and work without the tables. */
#define PRIVATE_TABLES "cuGetExportTable"
static const char *const nvidias[] = {"libcudnn", "libcublas", "libcusolver", "libcusparse", "libcufft", "libcurand",
                                      "libnccl", "libcupti", "libcufile", "libnv", "libtorch", "libc10"};

static void refuse_runtime(const void *caller) {
    char name[512];
    Dl_info library;
    const char *path = dladdr(caller, &library) ? library.dli_fname : "a library";
    const char *file = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    for (size_t i = 0; i < sizeof nvidias / sizeof *nvidias; i++)
        if (strncmp(file, nvidias[i], strlen(nvidias[i])) == 0) return;
    const char *bindings = strstr(path, "/cuda/bindings/");
    if (bindings && strncmp(file, "driver.", strlen("driver.")) == 0) return; /* it looks up every existing function */
    bool is_shared = strncmp(file, "libcudart.so", strlen("libcudart.so")) == 0;
    snprintf(name, sizeof name, "%s: it has a CUDA runtime of its own (%s)", path,
             bindings    ? "import torch before it, with cuda.bindings 13 and torch for CUDA 13; or use torch.cuda"
             : is_shared ? "take the functions of the virtual GPU's: ctypes.CDLL(None), torch.cuda.cudart()"
                         : "link it with the shared one: nvcc -cudart shared");
    gm_unsupported(name, GM_NOT_SUPPORTED);
}

GM_API int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                            unsigned long long flags, int *result) {
    return gm_error(look_up(symbol, function, result));
}

GM_API int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *result) {
    return gm_error(look_up(symbol, function, result));
}

GM_API int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *result) {
    if (strcmp(symbol, PRIVATE_TABLES) == 0) refuse_runtime(__builtin_return_address(0));
    return look_up(symbol, function, result);
}

GM_API int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    if (strcmp(symbol, PRIVATE_TABLES) == 0) refuse_runtime(__builtin_return_address(0));
    return look_up(symbol, function, NULL);
}
