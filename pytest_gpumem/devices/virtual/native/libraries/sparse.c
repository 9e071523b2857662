/* cuSPARSE and cuSPARSELt: descriptors keep the shapes that are asked back; results lie in device memory.
 *
 * How much workspace a routine takes is not documented. It is taken as zero, and the report says so. How many
 * nonzeros a sum or a product of sparse matrices has depends on values, and reads zero.
 */
#include "runtime/runtime.h"

#include <stdlib.h>
#include <string.h>

enum { SPARSE_NOT_INITIALIZED = 1, SPARSE_ALLOC_FAILED = 2, SPARSE_INVALID_VALUE = 3 };

static int computed(void) {
    gm_forget_all();
    return gm_visible() ? GM_SUCCESS : SPARSE_NOT_INITIALIZED;
}

static int new_descriptor(void **out, size_t size) {
    *out = calloc(1, size);
    return *out ? GM_SUCCESS : SPARSE_ALLOC_FAILED;
}

static int delete_descriptor(void *d) {
    free(d);
    return GM_SUCCESS;
}

static int no_workspace(size_t *size) {
    gm_note_sizes(GM_CUSPARSE);
    *size = 0;
    return GM_SUCCESS;
}

static _Thread_local int64_t told_nonzeros = -1;

/* Sets the nonzeros of the sum or product that this thread takes next, as Python computed them; -1: nobody knows. */
GM_API void gpumem_tell_nonzeros(int64_t count) { told_nonzeros = count; }

/* The nonzeros of a result: where Python has not told them, and they are wanted, zero comes to the host. */
static int read_back(void *out, size_t size) {
    if (!out || gm_owner(out) >= 0) return GM_SUCCESS;
    int32_t count = (int32_t)told_nonzeros;
    if (told_nonzeros < 0) memset(out, 0, size);
    else memcpy(out, size == sizeof count ? (void *)&count : (void *)&told_nonzeros, size);
    if (told_nonzeros < 0) gm_note_readback(size);
    told_nonzeros = -1;
    return GM_SUCCESS;
}

/* ---- handles and descriptors ---- */

GM_API int cusparseCreate(void **out) { return gm_visible() ? new_descriptor(out, 64) : SPARSE_NOT_INITIALIZED; }
GM_API int cusparseDestroy(void *handle) { return delete_descriptor(handle); }
GM_API int cusparseSetStream(void *handle, void *stream) { (void)handle, (void)stream; return GM_SUCCESS; }
GM_API int cusparseSetPointerMode(void *handle, int mode) { (void)handle, (void)mode; return GM_SUCCESS; }
GM_API const char *cusparseGetErrorString(int status) {
    return status == GM_SUCCESS               ? "success"
           : status == SPARSE_NOT_INITIALIZED ? "no GPU here: the virtual GPU is visible in marked tests only"
                                              : "not supported by the virtual GPU";
}

GM_API int cusparseCreateMatDescr(void **out) { return new_descriptor(out, 64); }
GM_API int cusparseDestroyMatDescr(void *d) { return delete_descriptor(d); }
GM_API int cusparseSetMatType(void *d, int type) { (void)d, (void)type; return GM_SUCCESS; }
GM_API int cusparseSetMatFillMode(void *d, int mode) { (void)d, (void)mode; return GM_SUCCESS; }
GM_API int cusparseSetMatDiagType(void *d, int type) { (void)d, (void)type; return GM_SUCCESS; }
GM_API int cusparseSetMatIndexBase(void *d, int base) { (void)d, (void)base; return GM_SUCCESS; }

GM_API int cusparseCreateBsrsm2Info(void **out) { return new_descriptor(out, 64); }
GM_API int cusparseDestroyBsrsm2Info(void *d) { return delete_descriptor(d); }
GM_API int cusparseCreateBsrsv2Info(void **out) { return new_descriptor(out, 64); }
GM_API int cusparseDestroyBsrsv2Info(void *d) { return delete_descriptor(d); }
GM_API int cusparseSpGEMM_createDescr(void **out) { return new_descriptor(out, 64); }
GM_API int cusparseSpGEMM_destroyDescr(void *d) { return delete_descriptor(d); }
GM_API int cusparseSpSM_createDescr(void **out) { return new_descriptor(out, 64); }
GM_API int cusparseSpSM_destroyDescr(void *d) { return delete_descriptor(d); }
GM_API int cusparseSpSV_createDescr(void **out) { return new_descriptor(out, 64); }
GM_API int cusparseSpSV_destroyDescr(void *d) { return delete_descriptor(d); }

typedef struct {
    int64_t rows, columns, nonzeros;
    bool computed; /* how many nonzeros it has was decided on the device */
} sparse_matrix;

static int new_matrix(sparse_matrix **out, int64_t rows, int64_t columns, int64_t nonzeros) {
    if (rows < 0 || columns < 0 || nonzeros < 0) return SPARSE_INVALID_VALUE;
    int status = new_descriptor((void **)out, sizeof **out);
    if (!status) **out = (sparse_matrix){rows, columns, nonzeros, false};
    return status;
}

GM_API int cusparseCreateCoo(sparse_matrix **out, int64_t rows, int64_t columns, int64_t nonzeros, void *row_indices,
                             void *column_indices, void *values, int index_type, int base, int type) {
    (void)row_indices, (void)column_indices, (void)values, (void)index_type, (void)base, (void)type;
    return new_matrix(out, rows, columns, nonzeros);
}

GM_API int cusparseCreateCsr(sparse_matrix **out, int64_t rows, int64_t columns, int64_t nonzeros, void *row_offsets,
                             void *column_indices, void *values, int offset_type, int index_type, int base,
                             int type) {
    (void)row_offsets, (void)column_indices, (void)values, (void)offset_type, (void)index_type, (void)base;
    (void)type;
    return new_matrix(out, rows, columns, nonzeros);
}

GM_API int cusparseDestroySpMat(void *d) { return delete_descriptor(d); }
GM_API int cusparseCsrSetPointers(void) { return GM_SUCCESS; }
GM_API int cusparseCsrSetStridedBatch(void) { return GM_SUCCESS; }
GM_API int cusparseSpMatSetAttribute(void) { return GM_SUCCESS; }

GM_API int cusparseSpMatGetSize(const sparse_matrix *m, int64_t *rows, int64_t *columns, int64_t *nonzeros) {
    *rows = m->rows;
    *columns = m->columns;
    *nonzeros = m->nonzeros;
    return m->computed ? read_back(nonzeros, sizeof *nonzeros) : GM_SUCCESS;
}

GM_API int cusparseCreateDnMat(void **out, int64_t rows, int64_t columns, int64_t leading, void *values, int type,
                               int order) {
    (void)rows, (void)columns, (void)leading, (void)values, (void)type, (void)order;
    return new_descriptor(out, 64);
}

GM_API int cusparseDestroyDnMat(void *d) { return delete_descriptor(d); }
GM_API int cusparseDnMatSetStridedBatch(void) { return GM_SUCCESS; }

GM_API int cusparseCreateDnVec(void **out, int64_t size, void *values, int type) {
    (void)size, (void)values, (void)type;
    return new_descriptor(out, 64);
}

GM_API int cusparseDestroyDnVec(void *d) { return delete_descriptor(d); }

/* ---- products and solutions ---- */

GM_API int cusparseSpMM_bufferSize(void *h, int a_op, int b_op, const void *alpha, void *a, void *b, const void *beta,
                                   void *c, int type, int algorithm, size_t *size) {
    (void)h, (void)a_op, (void)b_op, (void)alpha, (void)a, (void)b, (void)beta, (void)c, (void)type, (void)algorithm;
    return no_workspace(size);
}

GM_API int cusparseSDDMM_bufferSize(void *h, int a_op, int b_op, const void *alpha, void *a, void *b,
                                    const void *beta, void *c, int type, int algorithm, size_t *size) {
    (void)h, (void)a_op, (void)b_op, (void)alpha, (void)a, (void)b, (void)beta, (void)c, (void)type, (void)algorithm;
    return no_workspace(size);
}

GM_API int cusparseSpMV_bufferSize(void *h, int op, const void *alpha, void *a, void *x, const void *beta, void *y,
                                   int type, int algorithm, size_t *size) {
    (void)h, (void)op, (void)alpha, (void)a, (void)x, (void)beta, (void)y, (void)type, (void)algorithm;
    return no_workspace(size);
}

GM_API int cusparseSpSV_bufferSize(void *h, int op, const void *alpha, void *a, void *x, void *y, int type,
                                   int algorithm, void *d, size_t *size) {
    (void)h, (void)op, (void)alpha, (void)a, (void)x, (void)y, (void)type, (void)algorithm, (void)d;
    return no_workspace(size);
}

GM_API int cusparseSpSM_bufferSize(void *h, int a_op, int b_op, const void *alpha, void *a, void *b, void *c, int type,
                                   int algorithm, void *d, size_t *size) {
    (void)h, (void)a_op, (void)b_op, (void)alpha, (void)a, (void)b, (void)c, (void)type, (void)algorithm, (void)d;
    return no_workspace(size);
}

GM_API int cusparseSpGEMM_workEstimation(void *h, int a_op, int b_op, const void *alpha, void *a, void *b,
                                         const void *beta, sparse_matrix *c, int type, int algorithm, void *d,
                                         size_t *size, void *buffer) {
    (void)h, (void)a_op, (void)b_op, (void)alpha, (void)a, (void)b, (void)beta, (void)c, (void)type, (void)algorithm;
    (void)d;
    return buffer ? computed() : no_workspace(size);
}

GM_API int cusparseSpGEMM_compute(void *h, int a_op, int b_op, const void *alpha, void *a, void *b, const void *beta,
                                  sparse_matrix *c, int type, int algorithm, void *d, size_t *size, void *buffer) {
    (void)h, (void)a_op, (void)b_op, (void)alpha, (void)a, (void)b, (void)beta, (void)type, (void)algorithm, (void)d;
    c->computed = true;
    return buffer ? computed() : no_workspace(size);
}

GM_API int cusparseSpGEMM_copy(void) { return computed(); }
GM_API int cusparseSpMM(void) { return computed(); }
GM_API int cusparseSpMV(void) { return computed(); }
GM_API int cusparseSDDMM_preprocess(void) { return computed(); }
GM_API int cusparseSDDMM(void) { return computed(); }
GM_API int cusparseSpSV_analysis(void) { return computed(); }
GM_API int cusparseSpSV_solve(void) { return computed(); }
GM_API int cusparseSpSM_analysis(void) { return computed(); }
GM_API int cusparseSpSM_solve(void) { return computed(); }

/* T: S, D, C or Z. */
#define FOR_EVERY_TYPE(T)                                                                                            \
    GM_API int cusparse##T##bsrmm(void) { return computed(); }                                                       \
    GM_API int cusparse##T##bsrmv(void) { return computed(); }                                                       \
    GM_API int cusparse##T##bsrsm2_analysis(void) { return computed(); }                                             \
    GM_API int cusparse##T##bsrsm2_solve(void) { return computed(); }                                                \
    GM_API int cusparse##T##bsrsv2_analysis(void) { return computed(); }                                             \
    GM_API int cusparse##T##bsrsv2_solve(void) { return computed(); }                                                \
    GM_API int cusparse##T##csrgeam2(void) { return computed(); }                                                    \
    GM_API int cusparse##T##bsrsm2_bufferSize(void *h, int direction, int a_op, int x_op, int mb, int n, int blocks, \
                                              void *d, void *values, const int *rows, const int *columns, int block, \
                                              void *info, int *size) {                                               \
        (void)h, (void)direction, (void)a_op, (void)x_op, (void)mb, (void)n, (void)blocks, (void)d, (void)values;    \
        (void)rows, (void)columns, (void)block, (void)info;                                                          \
        gm_note_sizes(GM_CUSPARSE);                                                                                  \
        *size = 0;                                                                                                   \
        return GM_SUCCESS;                                                                                           \
    }                                                                                                                \
    GM_API int cusparse##T##bsrsv2_bufferSize(void *h, int direction, int op, int mb, int blocks, void *d,           \
                                              void *values, const int *rows, const int *columns, int block,          \
                                              void *info, int *size) {                                               \
        (void)h, (void)direction, (void)op, (void)mb, (void)blocks, (void)d, (void)values, (void)rows;               \
        (void)columns, (void)block, (void)info;                                                                      \
        gm_note_sizes(GM_CUSPARSE);                                                                                  \
        *size = 0;                                                                                                   \
        return GM_SUCCESS;                                                                                           \
    }                                                                                                                \
    GM_API int cusparse##T##csrgeam2_bufferSizeExt(                                                                  \
        void *h, int m, int n, const void *alpha, void *ad, int ac, const void *av, const int *ar, const int *ai,    \
        const void *beta, void *bd, int bc, const void *bv, const int *br, const int *bi, void *cd, const void *cv,  \
        const int *cr, const int *ci, size_t *size) {                                                                \
        (void)h, (void)m, (void)n, (void)alpha, (void)ad, (void)ac, (void)av, (void)ar, (void)ai, (void)beta;        \
        (void)bd, (void)bc, (void)bv, (void)br, (void)bi, (void)cd, (void)cv, (void)cr, (void)ci;                    \
        return no_workspace(size);                                                                                   \
    }

FOR_EVERY_TYPE(S)
FOR_EVERY_TYPE(D)
FOR_EVERY_TYPE(C)
FOR_EVERY_TYPE(Z)

GM_API int cusparseXcsrgeam2Nnz(void *h, int m, int n, void *ad, int ac, const int *ar, const int *ai, void *bd,
                                int bc, const int *br, const int *bi, void *cd, int *cr, int *total, void *work) {
    (void)h, (void)m, (void)n, (void)ad, (void)ac, (void)ar, (void)ai, (void)bd, (void)bc, (void)br, (void)bi;
    (void)cd, (void)cr, (void)work;
    return read_back(total, sizeof *total);
}

/* Where a pivot is zero; -1 (nowhere) in host memory, as every factorisation here succeeds. */
static int no_zero_pivot(int *position) {
    if (position && gm_owner(position) < 0) *position = -1;
    return GM_SUCCESS;
}

GM_API int cusparseXbsrsm2_zeroPivot(void *h, void *d, int *at) { (void)h, (void)d; return no_zero_pivot(at); }
GM_API int cusparseXbsrsv2_zeroPivot(void *h, void *d, int *at) { (void)h, (void)d; return no_zero_pivot(at); }

/* ---- conversions ---- */

GM_API int cusparseXcoosort_bufferSizeExt(void *h, int m, int n, int nonzeros, const int *rows, const int *columns,
                                          size_t *size) {
    (void)h, (void)m, (void)n, (void)nonzeros, (void)rows, (void)columns;
    return no_workspace(size);
}

GM_API int cusparseXcsrsort_bufferSizeExt(void *h, int m, int n, int nonzeros, const int *rows, const int *columns,
                                          size_t *size) {
    (void)h, (void)m, (void)n, (void)nonzeros, (void)rows, (void)columns;
    return no_workspace(size);
}

GM_API int cusparseCreateIdentityPermutation(void) { return computed(); }
GM_API int cusparseXcoo2csr(void) { return computed(); }
GM_API int cusparseXcoosortByRow(void) { return computed(); }
GM_API int cusparseXcsrsort(void) { return computed(); }

/* ---- cuSPARSELt: matrices with two nonzeros in four. Descriptors are the caller's, of 512 bytes and more ---- */

typedef struct {
    int64_t rows, columns;
    int32_t type;
} lt_matrix;

GM_API int cusparseLtInit(void *handle) { (void)handle; return computed(); }

GM_API int cusparseLtDenseDescriptorInit(const void *h, lt_matrix *m, int64_t rows, int64_t columns, int64_t leading,
                                         uint32_t alignment, int type, int order) {
    (void)h, (void)leading, (void)alignment, (void)order;
    *m = (lt_matrix){rows, columns, type};
    return GM_SUCCESS;
}

GM_API int cusparseLtStructuredDescriptorInit(const void *h, lt_matrix *m, int64_t rows, int64_t columns,
                                              int64_t leading, uint32_t alignment, int type, int order,
                                              int sparsity) {
    (void)h, (void)leading, (void)alignment, (void)order, (void)sparsity;
    *m = (lt_matrix){rows, columns, type};
    return GM_SUCCESS;
}

/* Half of the values, and two bits for the place of each (cuSPARSELt, "structured sparsity"); cudaDataType 0 is
 * float, 3 and 8 are 8-bit integers, 28 and 29 8-bit floats, 2 and 14 16-bit ones. */
GM_API int cusparseLtSpMMACompressedSize2(const void *h, const lt_matrix *m, size_t *size, size_t *buffer) {
    (void)h;
    size_t element = m->type == 0 ? 4 : m->type == 2 || m->type == 14 ? 2 : 1;
    size_t values = (size_t)(m->rows * m->columns) / 2;
    *size = values * element + (values + 3) / 4;
    return no_workspace(buffer);
}

GM_API int cusparseLtMatmulGetWorkspace(const void *h, const void *plan, size_t *size) {
    (void)h, (void)plan;
    return no_workspace(size);
}

GM_API int cusparseLtMatmulAlgGetAttribute(const void *h, const void *selection, int attribute, void *data,
                                           size_t size) {
    (void)h, (void)selection;
    memset(data, 0, size);
    if (attribute == 1 && size == sizeof(int)) *(int *)data = 1; /* ..._ALG_CONFIG_MAX_ID: one algorithm, 0 */
    return GM_SUCCESS;
}

GM_API int cusparseLtMatDescriptorDestroy(void) { return GM_SUCCESS; }
GM_API int cusparseLtMatmulDescriptorInit(void) { return GM_SUCCESS; }
GM_API int cusparseLtMatmulDescSetAttribute(void) { return GM_SUCCESS; }
GM_API int cusparseLtMatmulAlgSelectionInit(void) { return GM_SUCCESS; }
GM_API int cusparseLtMatmulAlgSetAttribute(void) { return GM_SUCCESS; }
GM_API int cusparseLtMatmulPlanInit(void) { return GM_SUCCESS; }
GM_API int cusparseLtMatmulPlanDestroy(void) { return GM_SUCCESS; }
GM_API int cusparseLtMatmulSearch(void) { return computed(); }
GM_API int cusparseLtMatmul(void) { return computed(); }
GM_API int cusparseLtSpMMACompress2(void) { return computed(); }
