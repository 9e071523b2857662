/* cuBLAS and cuBLASLt: results lie in device memory, which nobody reads. PyTorch brings the workspaces, through its
 * own allocator, so nothing here takes memory. */
#include "gpumem.h"

#include <stdlib.h>
#include <string.h>

enum { CUBLAS_NOT_SUPPORTED = 15, CUBLAS_INVALID = 7, CUBLAS_NOT_INITIALIZED = 1 };

typedef struct {
    void *stream;
    int math_mode, pointer_mode;
} handle;

GM_API int cublasCreate_v2(handle **out) {
    if (!gm_visible()) return CUBLAS_NOT_INITIALIZED;
    *out = calloc(1, sizeof **out);
    return *out ? GM_SUCCESS : CUBLAS_INVALID;
}

GM_API int cublasDestroy_v2(handle *h) {
    free(h);
    return GM_SUCCESS;
}

GM_API int cublasSetStream_v2(handle *h, void *stream) {
    h->stream = stream;
    return GM_SUCCESS;
}

GM_API int cublasGetStream_v2(handle *h, void **stream) {
    *stream = h->stream;
    return GM_SUCCESS;
}

GM_API int cublasSetMathMode(handle *h, int mode) {
    h->math_mode = mode;
    return GM_SUCCESS;
}

GM_API int cublasGetMathMode(handle *h, int *mode) {
    *mode = h->math_mode;
    return GM_SUCCESS;
}

GM_API int cublasSetPointerMode_v2(handle *h, int mode) {
    h->pointer_mode = mode;
    return GM_SUCCESS;
}

GM_API int cublasGetPointerMode_v2(handle *h, int *mode) {
    *mode = h->pointer_mode;
    return GM_SUCCESS;
}

GM_API int cublasSetWorkspace_v2(handle *h, void *workspace, size_t size) {
    (void)h, (void)workspace, (void)size;
    return GM_SUCCESS;
}

GM_API int cublasSetSmCountTarget(handle *h, int count) {
    (void)h, (void)count;
    return GM_SUCCESS;
}

GM_API const char *cublasGetStatusString(int status) {
    return status == GM_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_SUPPORTED by the virtual GPU";
}

/* A dot product's result may be asked for in host memory. */
static int dot(void *result, size_t size) {
    gm_forget_all();
    if (gm_owner(result) < 0) {
        memset(result, 0, size);
        gm_note_readback(size);
    }
    return GM_SUCCESS;
}

#define DOT(name, size)                                                                                  \
    GM_API int name(handle *h, int n, const void *x, int incx, const void *y, int incy, void *result) { \
        (void)h, (void)n, (void)x, (void)incx, (void)y, (void)incy;                                     \
        return dot(result, size);                                                                        \
    }
DOT(cublasSdot_v2, 4)
DOT(cublasDdot_v2, 8)
DOT(cublasCdotu_v2, 8)
DOT(cublasCdotc_v2, 8)
DOT(cublasZdotu_v2, 16)
DOT(cublasZdotc_v2, 16)

GM_API int cublasDotEx(handle *h, int n, const void *x, int xtype, int incx, const void *y, int ytype, int incy,
                       void *result, int type, int execution) {
    (void)h, (void)n, (void)x, (void)xtype, (void)incx, (void)y, (void)ytype, (void)incy, (void)execution;
    return dot(result, type == 2 || type == 14 ? 2 : 4); /* CUDA_R_16F, CUDA_R_16BF, else CUDA_R_32F */
}

/* All results of these are in device memory. */
static int computed(void) {
    gm_forget_all();
    return gm_visible() ? GM_SUCCESS : CUBLAS_NOT_INITIALIZED;
}

#define COMPUTE(name) GM_API int name(void) { return computed(); }
#include "blas_compute.h"

/* ---- cuBLASLt: descriptors are tokens ---- */

static int made(void **out) {
    *out = calloc(1, 64);
    return *out ? GM_SUCCESS : CUBLAS_INVALID;
}

static int freed(void *descriptor) {
    free(descriptor);
    return GM_SUCCESS;
}

GM_API int cublasLtCreate(void **out) { return made(out); }
GM_API int cublasLtDestroy(void *handle) { return freed(handle); }
GM_API int cublasLtMatmulDescCreate(void **out, int compute, int scale) { (void)compute, (void)scale; return made(out); }
GM_API int cublasLtMatmulDescDestroy(void *descriptor) { return freed(descriptor); }
GM_API int cublasLtMatmulPreferenceCreate(void **out) { return made(out); }
GM_API int cublasLtMatmulPreferenceDestroy(void *preference) { return freed(preference); }
GM_API int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    (void)type, (void)rows, (void)columns, (void)leading;
    return made(out);
}
GM_API int cublasLtMatrixLayoutDestroy(void *layout) { return freed(layout); }
GM_API int cublasLtMatmulDescSetAttribute(void) { return GM_SUCCESS; }
GM_API int cublasLtMatmulPreferenceSetAttribute(void) { return GM_SUCCESS; }
GM_API int cublasLtMatrixLayoutSetAttribute(void) { return GM_SUCCESS; }
GM_API int cublasLtMatmul(void) { return computed(); }
GM_API size_t cublasLtGetVersion(void) { return (size_t)gm_cuda_version() / 1000 * 10000; }

typedef struct {
    uint64_t algorithm[8];
    size_t workspace_size;
    int state;
    float waves_count;
    int reserved[4];
} heuristic_result; /* cublasLtMatmulHeuristicResult_t */

/* One algorithm that needs no workspace of its own: PyTorch allots the same workspace whichever is chosen. */
GM_API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                          void *preference, int wanted, heuristic_result *results, int *count) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    if (wanted < 1) return CUBLAS_INVALID;
    memset(results, 0, sizeof *results);
    results->waves_count = 1;
    *count = 1;
    return GM_SUCCESS;
}
