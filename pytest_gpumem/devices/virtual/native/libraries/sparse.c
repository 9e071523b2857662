/* cuSPARSE and cuSPARSELt: descriptors store the shapes that programs query; results are in device memory.
 *
 * The workspaces of routines are not documented, and cuSPARSE reports them only to a handle, which needs a device. A
 * workspace is assumed to be zero. Its assumed upper bound is:
 *
 * - copies of the matrices (sorted or transposed), each with the indices of rows and columns, and a copy of the result
 *   in the type of the computation;
 * - for a product of two sparse matrices, every product of two values twice, each with its row and column: 32 bytes for
 *   doubles. cuSPARSE's manual says that memory grows with the number of these products; cupy/cupy#7044 has some 6 GB
 *   for 216,000,000, which is 28 bytes for each. Their number is computed as if all rows had equally many values.
 *
 * The number of nonzeros in a sum or a product of sparse matrices depends on values. If these are unknown, the result
 * has as many as possible.
 */
#include "runtime/runtime.h"

#include <limits.h>
#include <string.h>

enum { SPARSE_NOT_INITIALIZED = 1, SPARSE_ALLOC_FAILED = 2, SPARSE_INVALID_VALUE = 3 };

static int workspace(size_t *size, uint64_t most) {
    gm_note_sizes(GM_CUSPARSE);
    *size = gm_size_up_to(GM_HELD, most);
    return GM_SUCCESS;
}

static _Thread_local int64_t told_nonzeros = -1;

/* Sets the number of nonzeros of this thread's next sum or product, as computed by Python; -1: unknown. */
GM_API void gpumem_tell_nonzeros(int64_t count) { told_nonzeros = count; }

/* Returns the nonzeros of a result: if Python has not set them but they are read, the upper bound. With zero every limit
 * would hold. */
static int read_back(void *out, size_t size, int64_t most) {
    if (!out || gm_owner(out) >= 0) return GM_SUCCESS;
    int64_t count = told_nonzeros < 0 ? most : told_nonzeros;
    int32_t short_count = count > INT32_MAX ? INT32_MAX : (int32_t)count;
    memcpy(out, size == sizeof short_count ? (void *)&short_count : (void *)&count, size);
    if (told_nonzeros < 0) gm_note_readback(0); /* 0 bytes: assumed */
    told_nonzeros = -1;
    return GM_SUCCESS;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* a * b, or `most` if the product is larger. */
static int64_t product_up_to(int64_t a, int64_t b, int64_t most) { return b && a > most / b ? most : a * b; }

/* ---- handles and descriptors ---- */

GM_API int cusparseSetStream(void *handle, void *stream) { gm_work_next_on(stream); return GM_SUCCESS; }
GM_API const char *cusparseGetErrorString(int status) {
    return status == GM_SUCCESS               ? "success"
           : status == SPARSE_NOT_INITIALIZED ? "no GPU here: the virtual GPU is visible only in marked tests"
                                              : "not supported by the virtual GPU";
}

typedef struct {
    int64_t rows, columns, nonzeros;
    int index_size, element_size; /* bytes */
    bool computed;                /* its number of nonzeros was decided on the device */
} sparse_matrix;

typedef struct {
    int64_t elements;
    int element_size; /* bytes */
} dense_matrix; /* or a vector */

/* Bytes of an element by cudaDataType. */
static int element_size(int type) {
    switch (type) {
    case 3: case 8: case 28: case 29: return 1; /* 8-bit integers and floats */
    case 2: case 14: return 2;                  /* half, bfloat16 */
    case 1: case 4: return 8;                   /* double, complex float */
    case 5: return 16;                          /* complex double */
    default: return 4;
    }
}

static int new_matrix(sparse_matrix **out, int64_t rows, int64_t columns, int64_t nonzeros, int index_type, int type) {
    if (rows < 0 || columns < 0 || nonzeros < 0) return SPARSE_INVALID_VALUE;
    int status = gm_new_descriptor((void **)out, SPARSE_ALLOC_FAILED);
    int index_size = index_type == 3 ? 8 : 4; /* CUSPARSE_INDEX_64I */
    if (!status) **out = (sparse_matrix){rows, columns, nonzeros, index_size, element_size(type), false};
    return status;
}

static uint64_t copy_of(const sparse_matrix *m) {
    uint64_t index_size = (uint64_t)m->index_size, nonzeros = (uint64_t)m->nonzeros;
    return nonzeros * ((uint64_t)m->element_size + 2 * index_size) + (uint64_t)(m->rows + m->columns + 1) * index_size;
}

static uint64_t dense_copy(const dense_matrix *m, int type) {
    int computed_size = element_size(type);
    return (uint64_t)m->elements * (uint64_t)(computed_size > m->element_size ? computed_size : m->element_size);
}

/* Returns the bytes of all products of two values, each counted twice. */
static uint64_t all_products(const sparse_matrix *a, const sparse_matrix *b, int type) {
    double products = b->rows ? (double)a->nonzeros * (double)b->nonzeros / (double)b->rows : 0;
    return (uint64_t)(products * 2 * (element_size(type) + 2 * a->index_size));
}

GM_API int cusparseCreateCoo(sparse_matrix **out, int64_t rows, int64_t columns, int64_t nonzeros, void *row_indices,
                             void *column_indices, void *values, int index_type, int base, int type) {
    return new_matrix(out, rows, columns, nonzeros, index_type, type);
}

GM_API int cusparseCreateCsr(sparse_matrix **out, int64_t rows, int64_t columns, int64_t nonzeros, void *row_offsets,
                             void *column_indices, void *values, int offset_type, int index_type, int base,
                             int type) {
    return new_matrix(out, rows, columns, nonzeros, index_type, type);
}

GM_API int cusparseSpMatGetSize(const sparse_matrix *m, int64_t *rows, int64_t *columns, int64_t *nonzeros) {
    *rows = m->rows;
    *columns = m->columns;
    *nonzeros = m->nonzeros;
    return m->computed ? read_back(nonzeros, sizeof *nonzeros, m->nonzeros) : GM_SUCCESS;
}

static int new_dense(dense_matrix **out, int64_t elements, int type) {
    int status = gm_new_descriptor((void **)out, SPARSE_ALLOC_FAILED);
    if (!status) **out = (dense_matrix){elements, element_size(type)};
    return status;
}

GM_API int cusparseCreateDnMat(dense_matrix **out, int64_t rows, int64_t columns, int64_t leading, void *values,
                               int type, int order) {
    return new_dense(out, rows * columns, type);
}

GM_API int cusparseCreateDnVec(dense_matrix **out, int64_t size, void *values, int type) {
    return new_dense(out, size, type);
}

/* ---- products and solutions ---- */

/* Functions that return the size of a workspace. */
#define WORKSPACE(name, most, ...) \
    GM_API int cusparse##name(__VA_ARGS__, size_t *size) { return workspace(size, most); }

WORKSPACE(SpMM_bufferSize, copy_of(a) + dense_copy(c, type), void *h, int a_op, int b_op, const void *alpha,
          const sparse_matrix *a, void *b, const void *beta, const dense_matrix *c, int type, int algorithm)
WORKSPACE(SDDMM_bufferSize, copy_of(c), void *h, int a_op, int b_op, const void *alpha, void *a, void *b,
          const void *beta, const sparse_matrix *c, int type, int algorithm)
WORKSPACE(SpMV_bufferSize, copy_of(a) + dense_copy(y, type), void *h, int op, const void *alpha, const sparse_matrix *a,
          void *x, const void *beta, const dense_matrix *y, int type, int algorithm)
WORKSPACE(SpSV_bufferSize, copy_of(a) + dense_copy(x, type) + dense_copy(y, type), void *h, int op, const void *alpha,
          const sparse_matrix *a, const dense_matrix *x, const dense_matrix *y, int type, int algorithm, void *d)
WORKSPACE(SpSM_bufferSize, copy_of(a) + dense_copy(b, type) + dense_copy(c, type), void *h, int a_op, int b_op,
          const void *alpha, const sparse_matrix *a, const dense_matrix *b, const dense_matrix *c, int type,
          int algorithm, void *d)

GM_API int cusparseSpGEMM_workEstimation(void *h, int a_op, int b_op, const void *alpha, const sparse_matrix *a,
                                         const sparse_matrix *b, const void *beta, void *c, int type, int algorithm,
                                         void *d, size_t *size, void *buffer) {
    return buffer ? gm_computed(SPARSE_NOT_INITIALIZED) : workspace(size, copy_of(a) + copy_of(b));
}

GM_API int cusparseSpGEMM_compute(void *h, int a_op, int b_op, const void *alpha, const sparse_matrix *a,
                                  const sparse_matrix *b, const void *beta, sparse_matrix *c, int type, int algorithm,
                                  void *d, size_t *size, void *buffer) {
    int64_t all = product_up_to(c->rows, c->columns, INT64_MAX);
    c->computed = true; /* each value of a multiplies at most one row of b, and each value of b one column of a */
    c->nonzeros = least(product_up_to(a->nonzeros, least(b->columns, b->nonzeros), all),
                        product_up_to(b->nonzeros, least(a->rows, a->nonzeros), all));
    return buffer ? gm_computed(SPARSE_NOT_INITIALIZED) : workspace(size, all_products(a, b, type));
}

/* For triangular systems with blocks of `block` by `block` values. */
static int block_workspace(int *size, int rows, int blocks, int block, int element_size) {
    const sparse_matrix matrix = {rows, rows, blocks, sizeof(int), block * block * element_size, false};
    size_t bytes;
    uint64_t most = copy_of(&matrix);
    int status = workspace(&bytes, most > INT_MAX ? INT_MAX : most);
    *size = (int)bytes;
    return status;
}

enum { SIZE_OF_S = 4, SIZE_OF_D = 8, SIZE_OF_C = 8, SIZE_OF_Z = 16 };

/* T: S, D, C or Z. */
#define FOR_EVERY_TYPE(T)                                                                                            \
    GM_API int cusparse##T##bsrsm2_bufferSize(void *h, int direction, int a_op, int x_op, int mb, int n, int blocks, \
                                              void *d, void *values, const int *rows, const int *columns, int block, \
                                              void *info, int *size) {                                               \
        return block_workspace(size, mb, blocks, block, SIZE_OF_##T);                                                \
    }                                                                                                                \
    GM_API int cusparse##T##bsrsv2_bufferSize(void *h, int direction, int op, int mb, int blocks, void *d,           \
                                              void *values, const int *rows, const int *columns, int block,          \
                                              void *info, int *size) {                                               \
        return block_workspace(size, mb, blocks, block, SIZE_OF_##T);                                                \
    }                                                                                                                \
    GM_API int cusparse##T##csrgeam2_bufferSizeExt(                                                                  \
        void *h, int m, int n, const void *alpha, void *ad, int ac, const void *av, const int *ar, const int *ai,    \
        const void *beta, void *bd, int bc, const void *bv, const int *br, const int *bi, void *cd, const void *cv,  \
        const int *cr, const int *ci, size_t *size) {                                                                \
        const sparse_matrix a = {m, n, ac, sizeof(int), SIZE_OF_##T, false};                                         \
        const sparse_matrix b = {m, n, bc, sizeof(int), SIZE_OF_##T, false};                                         \
        return workspace(size, copy_of(&a) + copy_of(&b));                                                           \
    }

FOR_EVERY_TYPE(S)
FOR_EVERY_TYPE(D)
FOR_EVERY_TYPE(C)
FOR_EVERY_TYPE(Z)

GM_API int cusparseXcsrgeam2Nnz(void *h, int m, int n, void *ad, int ac, const int *ar, const int *ai, void *bd,
                                int bc, const int *br, const int *bi, void *cd, int *cr, int *total, void *work) {
    return read_back(total, sizeof *total, product_up_to(m, n, (int64_t)ac + bc));
}

/* Reports where a pivot is zero; -1 (nowhere) in host memory, as every factorisation here succeeds. */
static int no_zero_pivot(int *position) {
    if (position && gm_owner(position) < 0) *position = -1;
    return GM_SUCCESS;
}

GM_API int cusparseXbsrsm2_zeroPivot(void *h, void *d, int *at) { return no_zero_pivot(at); }
GM_API int cusparseXbsrsv2_zeroPivot(void *h, void *d, int *at) { return no_zero_pivot(at); }

/* ---- conversions ---- */

/* Indices and the permutation are sorted, which needs copies of both. */
static uint64_t sorted_copy(int rows, int columns, int nonzeros) {
    return copy_of(&(sparse_matrix){rows, columns, nonzeros, sizeof(int), sizeof(int), false});
}

WORKSPACE(Xcoosort_bufferSizeExt, sorted_copy(m, n, nonzeros), void *h, int m, int n, int nonzeros, const int *rows,
          const int *columns)
WORKSPACE(Xcsrsort_bufferSizeExt, sorted_copy(m, n, nonzeros), void *h, int m, int n, int nonzeros, const int *rows,
          const int *columns)

/* ---- cuSPARSELt: matrices with two nonzeros in four. The caller owns the descriptors, of at least 512 bytes ---- */

typedef struct {
    int64_t rows, columns;
    int32_t type;
} lt_matrix;

GM_API int cusparseLtDenseDescriptorInit(const void *h, lt_matrix *m, int64_t rows, int64_t columns, int64_t leading,
                                         uint32_t alignment, int type, int order) {
    *m = (lt_matrix){rows, columns, type};
    return GM_SUCCESS;
}

GM_API int cusparseLtStructuredDescriptorInit(const void *h, lt_matrix *m, int64_t rows, int64_t columns,
                                              int64_t leading, uint32_t alignment, int type, int order,
                                              int sparsity) {
    *m = (lt_matrix){rows, columns, type};
    return GM_SUCCESS;
}

/* Half of the values, and two bits for the index of each (cuSPARSELt, "structured sparsity"); cudaDataType 0 is float, 3
 * and 8 are 8-bit integers, 28 and 29 8-bit floats, 2 and 14 16-bit ones. */
GM_API int cusparseLtSpMMACompressedSize2(const void *h, const lt_matrix *m, size_t *size, size_t *buffer) {
    size_t values = (size_t)(m->rows * m->columns) / 2;
    *size = values * (size_t)element_size(m->type) + (values + 3) / 4;
    return workspace(buffer, *size);
}

/* A plan, preceded by the descriptor of its product; the caller owns it, like the others. */
typedef struct {
    int64_t elements; /* of the result */
} lt_product;

GM_API int cusparseLtMatmulDescriptorInit(const void *h, lt_product *product, int a_op, int b_op, const void *a,
                                          const void *b, const void *c, const lt_matrix *result, int type) {
    product->elements = result->rows * result->columns;
    return GM_SUCCESS;
}

GM_API int cusparseLtMatmulPlanInit(const void *h, lt_product *plan, const lt_product *product,
                                    const void *selection) {
    *plan = *product;
    return GM_SUCCESS;
}

/* At most the result in float, for partial sums. */
GM_API int cusparseLtMatmulGetWorkspace(const void *h, const lt_product *plan, size_t *size) {
    return workspace(size, (uint64_t)plan->elements * sizeof(float));
}

GM_API int cusparseLtMatmulAlgGetAttribute(const void *h, const void *selection, int attribute, void *data,
                                           size_t size) {
    memset(data, 0, size);
    if (attribute == 1 && size == sizeof(int)) *(int *)data = 1; /* ..._ALG_CONFIG_MAX_ID: one algorithm, 0 */
    return GM_SUCCESS;
}
