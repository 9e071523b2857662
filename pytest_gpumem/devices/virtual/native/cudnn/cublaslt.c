/* The cuBLASLt that cuDNN's own engines query while they plan.
 *
 * cuDNN has an engine that turns a convolution with a 1x1 filter into a matrix product of cuBLASLt, and its heuristics
 * often rank it first. To plan, that engine creates a cuBLASLt handle and requests an algorithm. A handle needs a device:
 * without one the engine is refused, and a worse one is used, which copies its tensors. So the engine gets the virtual
 * GPU's handle, and one algorithm without a workspace. cuDNN allows cuBLASLt 0, 4 or 128 MiB, by shape; which algorithm a
 * GPU's cuBLASLt has is not known here, but in all published peaks that show it, it used no workspace.
 *
 * cuDNN looks cuBLASLt's functions up with dlsym in the real library, which it opens by name. Only in cuDNN's library of
 * engines, the reference to dlsym is redirected to this file: all but three functions are still the real ones. */
#define _GNU_SOURCE
#include "cudnn/cudnn.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ENGINES "libcudnn_engines_precompiled.so.9"

/* libraries/blas.c */
GM_API int cublasLtCreate(void **out);
GM_API int cublasLtDestroy(void *handle);
GM_API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                          void *preference, int room, void *results, int *count);

static void *look_up(void *library, const char *name) {
    const struct {
        const char *name;
        void (*function)(void);
    } ours[] = {
        {"cublasLtCreate", (void (*)(void))cublasLtCreate},
        {"cublasLtDestroy", (void (*)(void))cublasLtDestroy},
        {"cublasLtMatmulAlgoGetHeuristic", (void (*)(void))cublasLtMatmulAlgoGetHeuristic},
    };
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
        void *address;
        if (strcmp(name, ours[i].name) != 0) continue;
        memcpy(&address, &ours[i].function, sizeof address);
        return address;
    }
    return dlsym(library, name);
}

/* ---- the reference to dlsym ---- */

static void point_to(void **slot, void *(*function)(void *, const char *)) {
    uintptr_t page = (uintptr_t)slot & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    if (mprotect((void *)page, (uintptr_t)(slot + 1) - page, PROT_READ | PROT_WRITE)) return;
    memcpy(slot, &function, sizeof function);
}

/* System V ABI, "Dynamic Section": relocations of functions are in DT_JMPREL, or in DT_RELA if all are bound at load
 * time. */
static bool lead_here(const struct link_map *map) {
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++) {
        switch (d->d_tag) {
        case DT_JMPREL: tables[0] = (const void *)d->d_un.d_ptr; break;
        case DT_PLTRELSZ: sizes[0] = d->d_un.d_val; break;
        case DT_RELA: tables[1] = (const void *)d->d_un.d_ptr; break;
        case DT_RELASZ: sizes[1] = d->d_un.d_val; break;
        case DT_SYMTAB: symbols = (const void *)d->d_un.d_ptr; break;
        case DT_STRTAB: names = (const void *)d->d_un.d_ptr; break;
        default: break;
        }
    }
    if (!symbols || !names) return false;
    bool led = false;
    for (int t = 0; t < 2 && !led; t++) {
        for (size_t i = 0; tables[t] && i < sizes[t] / sizeof *tables[t]; i++) {
            const ElfW(Rela) *r = &tables[t][i];
            size_t symbol = sizeof(void *) == 8 ? r->r_info >> 32 : r->r_info >> 8;
            if (!symbol || r->r_addend || strcmp(names + symbols[symbol].st_name, "dlsym") != 0) continue;
            point_to((void **)(map->l_addr + r->r_offset), look_up);
            led = true;
        }
    }
    return led;
}

/* `function` belongs to the cuDNN in use, whose library of engines is in the same folder. cuDNN itself would load that at
 * its first plan. */
bool gm_lend_cublaslt(void *function) {
    Dl_info info;
    char path[4096];
    if (!dladdr(function, &info) || !info.dli_fname) return false;
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash ? (int)(slash + 1 - info.dli_fname) : 0;
    if (snprintf(path, sizeof path, "%.*s%s", folder, info.dli_fname, ENGINES) >= (int)sizeof path) return false;
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    struct link_map *map;
    return library && !dlinfo(library, RTLD_DI_LINKMAP, &map) && lead_here(map);
}
