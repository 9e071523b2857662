/* cuSOLVER: every factorisation succeeds (info, in device memory, reads 0). The workspaces, which PyTorch allocates with
 * its own allocator, are not documented. They are estimated as documented for the LAPACK function of the same name, with
 * LAPACK's own block sizes. If that function needs none, one block column is assumed. */
#include "base/base.h"

#include <limits.h>
#include <string.h>

enum { SOLVER_NOT_INITIALIZED = 1, SOLVER_INVALID_VALUE = 3 };

enum { QR_BLOCK = 32, LU_BLOCK = 64 }; /* LAPACK's ilaenv: xGEQRF, xORGQR, xORMQR; xGETRF, xPOTRF, xSYTRF */

GM_API int cusolverDnSetStream(void *handle, void *stream) { gm_work_next_on(stream); return GM_SUCCESS; }

/* ---- workspaces, in elements ---- */

static uint64_t positive(int64_t n) { return n > 0 ? (uint64_t)n : 0; }
static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint64_t block_column(int64_t n, int block) { return positive(n) * (uint64_t)block; }

/* xSYEVD, xHEEVD: 1 + 6n + 2n^2 with eigenvectors, 2n + 1 without. */
static uint64_t divide_and_conquer(int64_t order, bool vectors) {
    uint64_t n = positive(order);
    return vectors ? 1 + 6 * n + 2 * n * n : 2 * n + 1;
}

/* Jacobi's method (LAPACK's xGESVJ: m + n) on a copy, with the rotations gathered in a second matrix. */
static uint64_t jacobi(int64_t rows, int64_t columns, bool vectors, int64_t batch) {
    uint64_t m = positive(rows), n = positive(columns), short_side = smaller(m, n);
    return (m * n + (vectors ? short_side * short_side : 0) + m + n) * positive(batch);
}

/* xGESVD: 3 min(m, n) + max(m, n), of which the last part times the block for the blocked form. */
static uint64_t singular_values(int64_t rows, int64_t columns) {
    uint64_t m = positive(rows), n = positive(columns);
    return larger(3 * smaller(m, n) + (m + n) * QR_BLOCK, 5 * smaller(m, n));
}

enum { MAX_TIMES = 4 }; /* an estimate of the upper bound: no manual documents one */

static int answer_elements(int *out, uint64_t elements) {
    gm_note_sizes(GM_CUSOLVER);
    if (elements > INT_MAX) return SOLVER_INVALID_VALUE;
    *out = (int)gm_size_between(GM_PASSING, 0, elements, smaller(MAX_TIMES * elements, INT_MAX));
    return GM_SUCCESS;
}

/* Bytes of an element by cudaDataType: 0 and 1 are float and double, 4 and 5 the complex ones. */
static int answer_bytes(size_t *device, size_t *host, uint64_t elements, int type) {
    gm_note_sizes(GM_CUSOLVER);
    uint64_t bytes = elements * (type == 0 ? 4 : type == 5 ? 16 : 8);
    *device = gm_size_between(GM_PASSING, 0, bytes, MAX_TIMES * bytes);
    *host = 0;
    return GM_SUCCESS;
}

/* Functions that return the size of a workspace. */
#define ELEMENTS(name, elements, ...) \
    GM_API int cusolverDn##name##_bufferSize(__VA_ARGS__, int *out) { return answer_elements(out, elements); }
#define ELEMENTS_BEFORE(name, elements, rest, ...) \
    GM_API int cusolverDn##name##_bufferSize(__VA_ARGS__, int *out, rest) { return answer_elements(out, elements); }

/* T: S, D, C or Z. The names of some functions differ between real and complex ones. */
#define FOR_EVERY_TYPE(T)                                                                                            \
    ELEMENTS(T##potrf, block_column(n, LU_BLOCK), void *h, int uplo, int n, void *a, int lda)                        \
    ELEMENTS(T##getrf, block_column(m, LU_BLOCK), void *h, int m, int n, void *a, int lda)                           \
    ELEMENTS(T##sytrf, block_column(n, LU_BLOCK), void *h, int n, void *a, int lda)                                  \
    ELEMENTS(T##geqrf, block_column(n, QR_BLOCK), void *h, int m, int n, void *a, int lda)                           \
    ELEMENTS(T##gesvd, singular_values(m, n), void *h, int m, int n)                                                 \
    ELEMENTS_BEFORE(T##gesvdj, jacobi(m, n, jobz, 1), void *parameters, void *h, int jobz, int econ, int m, int n,   \
                    const void *a, int lda, const void *s, const void *u, int ldu, const void *v, int ldv)           \
    GM_API int cusolverDn##T##gesvdjBatched_bufferSize(void *h, int jobz, int m, int n, const void *a, int lda,      \
                                                       const void *s, const void *u, int ldu, const void *v,         \
                                                       int ldv, int *out, void *parameters, int batch) {             \
        return answer_elements(out, jacobi(m, n, jobz, batch));                                                      \
    }                                                                                                                \
    ELEMENTS_BEFORE(T##gesvdaStridedBatched, jacobi(m, n, jobz, batch), int batch, void *h, int jobz, int rank,      \
                    int m, int n, const void *a, int lda, long long sa, const void *s, long long ss, const void *u,  \
                    int ldu, long long su, const void *v, int ldv, long long sv)                                     \
    GM_API int cusolverDn##T##gesvdaStridedBatched(                                                                  \
        void *h, int jobz, int rank, int m, int n, const void *a, int lda, long long sa, void *s, long long ss,      \
        void *u, int ldu, long long su, void *v, int ldv, long long sv, void *work, int lwork, int *info,            \
        double *residuals, int batch) {                                                                              \
        if (residuals) memset(residuals, 0, sizeof *residuals * (size_t)positive(batch)); /* in host memory */       \
        return gm_computed(SOLVER_NOT_INITIALIZED);                                                                  \
    }

FOR_EVERY_TYPE(S)
FOR_EVERY_TYPE(D)
FOR_EVERY_TYPE(C)
FOR_EVERY_TYPE(Z)

/* EV: Ssyev, Dsyev, Cheev or Zheev; Q: the orthogonal or unitary matrix, Sor, Dor, Cun or Zun. */
#define FOR_EITHER_KIND(EV, Q)                                                                                       \
    ELEMENTS(EV##d, divide_and_conquer(n, jobz), void *h, int jobz, int uplo, int n, const void *a, int lda,         \
             const void *w)                                                                                          \
    ELEMENTS_BEFORE(EV##j, jacobi(n, n, jobz, 1), void *parameters, void *h, int jobz, int uplo, int n,              \
                    const void *a, int lda, const void *w)                                                           \
    GM_API int cusolverDn##EV##jBatched_bufferSize(void *h, int jobz, int uplo, int n, const void *a, int lda,       \
                                                   const void *w, int *out, void *parameters, int batch) {           \
        return answer_elements(out, jacobi(n, n, jobz, batch));                                                      \
    }                                                                                                                \
    ELEMENTS(Q##gqr, block_column(n, QR_BLOCK), void *h, int m, int n, int k, const void *a, int lda,                \
             const void *tau)                                                                                        \
    ELEMENTS(Q##mqr, block_column(side == 0 ? n : m, QR_BLOCK) /* CUBLAS_SIDE_LEFT */, void *h, int side, int trans, \
             int m, int n, int k, const void *a, int lda, const void *tau, const void *c, int ldc)

FOR_EITHER_KIND(Ssyev, Sor)
FOR_EITHER_KIND(Dsyev, Dor)
FOR_EITHER_KIND(Cheev, Cun)
FOR_EITHER_KIND(Zheev, Zun)

/* ---- the 64-bit API: sizes in bytes, of device and of host memory ---- */

#define BYTES(name, elements, ...)                                                                 \
    GM_API int cusolverDnX##name##_bufferSize(__VA_ARGS__, size_t *device, size_t *host) {         \
        return answer_bytes(device, host, elements, type);                                         \
    }

BYTES(potrf, block_column(n, LU_BLOCK), void *h, void *parameters, int uplo, int64_t n, int type, const void *a,
      int64_t lda, int compute)
BYTES(geqrf, block_column(n, QR_BLOCK), void *h, void *parameters, int64_t m, int64_t n, int type, const void *a,
      int64_t lda, int tau_type, const void *tau, int compute)
BYTES(syevd, divide_and_conquer(n, jobz), void *h, void *parameters, int jobz, int uplo, int64_t n, int type,
      const void *a, int64_t lda, int w_type, const void *w, int compute)
/* xGEEV: 4n with eigenvectors, and xGEHRD's block column. */
BYTES(geev, 4 * positive(n) + block_column(n, QR_BLOCK), void *h, void *parameters, int left, int right, int64_t n,
      int type, const void *a, int64_t lda, int w_type, const void *w, int left_type, const void *vl, int64_t ldvl,
      int right_type, const void *vr, int64_t ldvr, int compute)
/* xSYTRS2: n. */
BYTES(sytrs, positive(n), void *h, int uplo, int64_t n, int64_t columns, int type, const void *a, int64_t lda,
      const int64_t *pivots, int b_type, void *b, int64_t ldb)

GM_API int cusolverDnXsyevBatched_bufferSize(void *h, void *parameters, int jobz, int uplo, int64_t n, int type,
                                             const void *a, int64_t lda, int w_type, const void *w, int compute,
                                             size_t *device, size_t *host, int64_t batch) {
    return answer_bytes(device, host, jacobi(n, n, jobz, batch), type);
}
