/* cuBLAS and cuBLASLt: results are in device memory and are not computed. PyTorch allocates the workspaces with its own
 * allocator, so nothing here uses memory. */
#include "runtime/runtime.h"

#include <string.h>

enum { CUBLAS_INVALID = 7, CUBLAS_NOT_INITIALIZED = 1 };

typedef struct {
    void *stream;
    int math_mode, pointer_mode;
} handle;

GM_API int cublasSetStream_v2(handle *h, void *stream) {
    gm_work_next_on(stream);
    h->stream = stream;
    return GM_SUCCESS;
}

GM_API int cublasGetStream_v2(handle *h, void **stream) { *stream = h->stream; return GM_SUCCESS; }
GM_API int cublasSetMathMode(handle *h, int mode) { h->math_mode = mode; return GM_SUCCESS; }
GM_API int cublasGetMathMode(handle *h, int *mode) { *mode = h->math_mode; return GM_SUCCESS; }
GM_API int cublasSetPointerMode_v2(handle *h, int mode) { h->pointer_mode = mode; return GM_SUCCESS; }
GM_API int cublasGetPointerMode_v2(handle *h, int *mode) { *mode = h->pointer_mode; return GM_SUCCESS; }

GM_API const char *cublasGetStatusString(int status) {
    return status == GM_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_SUPPORTED by the virtual GPU";
}

/* A dot product may return its result in host memory. */
static int dot(void *result, size_t size) {
    gm_forget_all();
    if (gm_owner(result) < 0) {
        memset(result, 0, size);
        gm_note_readback(size);
    }
    return GM_SUCCESS;
}

#define DOT(name, size)                                                                                 \
    GM_API int name(handle *h, int n, const void *x, int incx, const void *y, int incy, void *result) { \
        return dot(result, size);                                                                       \
    }
DOT(cublasSdot_v2, 4)
DOT(cublasDdot_v2, 8)
DOT(cublasCdotu_v2, 8)
DOT(cublasCdotc_v2, 8)
DOT(cublasZdotu_v2, 16)
DOT(cublasZdotc_v2, 16)

GM_API int cublasDotEx(handle *h, int n, const void *x, int xtype, int incx, const void *y, int ytype, int incy,
                       void *result, int type, int execution) {
    return dot(result, type == 2 || type == 14 ? 2 : 4); /* CUDA_R_16F, CUDA_R_16BF, else CUDA_R_32F */
}

/* The norms and sums of a vector, and the index of its largest element: for zeros the first, counted from 1. */
#define NORM(name, size)                                                       \
    GM_API int name(handle *h, int n, const void *x, int incx, void *result) { \
        return dot(result, size);                                              \
    }
NORM(cublasSnrm2_v2, 4)
NORM(cublasScnrm2_v2, 4)
NORM(cublasDnrm2_v2, 8)
NORM(cublasDznrm2_v2, 8)
NORM(cublasSasum_v2, 4)
NORM(cublasScasum_v2, 4)
NORM(cublasDasum_v2, 8)
NORM(cublasDzasum_v2, 8)

#define PLACE(name)                                                           \
    GM_API int name(handle *h, int n, const void *x, int incx, int *result) { \
        dot(result, sizeof *result);                                          \
        if (gm_owner(result) < 0) *result = n > 0;                            \
        return GM_SUCCESS;                                                    \
    }
PLACE(cublasIsamax_v2)
PLACE(cublasIdamax_v2)
PLACE(cublasIcamax_v2)
PLACE(cublasIzamax_v2)
PLACE(cublasIsamin_v2)
PLACE(cublasIdamin_v2)
PLACE(cublasIcamin_v2)
PLACE(cublasIzamin_v2)

/* Batched factorisations: info is in host memory, and reports that the arguments are valid. */
static int solved(int *info) {
    if (info) *info = 0;
    return gm_visible() ? GM_SUCCESS : CUBLAS_NOT_INITIALIZED;
}

#define BATCHED(T)                                                                                                \
    GM_API int cublas##T##geqrfBatched(handle *h, int m, int n, void *a, int lda, void *tau, int *info,           \
                                       int batch) {                                                               \
        return solved(info);                                                                                      \
    }                                                                                                             \
    GM_API int cublas##T##gelsBatched(handle *h, int trans, int m, int n, int columns, void *a, int lda, void *c, \
                                      int ldc, int *info, int *each, int batch) {                                 \
        return solved(info);                                                                                      \
    }                                                                                                             \
    GM_API int cublas##T##getrsBatched(handle *h, int trans, int n, int columns, const void *a, int lda,          \
                                       const int *pivots, void *b, int ldb, int *info, int batch) {               \
        return solved(info);                                                                                      \
    }
BATCHED(S)
BATCHED(D)
BATCHED(C)
BATCHED(Z)

/* Copies of vectors and matrices, column by column. */
static int copied(const void *from, size_t from_pitch, void *to, size_t to_pitch, size_t width, int height,
                  void *stream) {
    if (height <= 0 || !width) return GM_SUCCESS;
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, (size_t)height, 4, stream) ? CUBLAS_INVALID
                                                                                              : GM_SUCCESS;
}

GM_API int cublasSetMatrixAsync(int rows, int columns, int size, const void *a, int lda, void *b, int ldb,
                                void *stream) {
    size_t each = (size_t)size;
    return copied(a, (size_t)lda * each, b, (size_t)ldb * each, (size_t)rows * each, columns, stream);
}

GM_SAME(cublasGetMatrixAsync, cublasSetMatrixAsync);

GM_API int cublasSetVectorAsync(int n, int size, const void *x, int incx, void *y, int incy, void *stream) {
    size_t each = (size_t)size;
    return copied(x, (size_t)incx * each, y, (size_t)incy * each, each, n, stream);
}

GM_SAME(cublasGetVectorAsync, cublasSetVectorAsync);

/* ---- cuBLASLt: descriptors are tokens ---- */

GM_API size_t cublasLtGetVersion(void) { return (size_t)gm_cuda_version() / 1000 * 10000; }

typedef struct {
    uint64_t algorithm[8];
    size_t workspace_size;
    int state;
    float waves_count;
    int reserved[4];
} heuristic_result; /* cublasLtMatmulHeuristicResult_t */

/* Returns one algorithm that needs no workspace: PyTorch allocates the same workspace whichever algorithm is chosen. */
GM_API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                          void *preference, int room, heuristic_result *results, int *count) {
    if (room < 1) return CUBLAS_INVALID;
    memset(results, 0, sizeof *results);
    results->waves_count = 1;
    *count = 1;
    return GM_SUCCESS;
}

/* The only algorithm has no settings. */
GM_API int cublasLtMatmulAlgoInit(void *handle, int compute, int scale, int a, int b, int c, int d, int id,
                                  uint64_t *algorithm) {
    memset(algorithm, 0, sizeof(((heuristic_result *)NULL)->algorithm));
    return GM_SUCCESS;
}

GM_API int cublasLtMatmulAlgoCheck(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   const uint64_t *algorithm, heuristic_result *result) {
    int count;
    return cublasLtMatmulAlgoGetHeuristic(handle, operation, a, b, c, d, NULL, 1, result, &count);
}

GM_API int cublasLtMatmulAlgoConfigGetAttribute(const uint64_t *algorithm, int attribute, void *out, size_t size,
                                                size_t *written) {
    memset(out, 0, size);
    if (written) *written = size;
    return GM_SUCCESS;
}
