/* cuSOLVER: every factorisation succeeds (info, in device memory, reads 0); the workspaces, which PyTorch takes from
 * its own allocator, are not documented and estimated as the LAPACK function of the same name documents them, with
 * LAPACK's own block sizes. A function is, where its LAPACK namesake needs none, given one block column.
 */
#include "base/base.h"

#include <limits.h>
#include <string.h>

enum { SOLVER_NOT_INITIALIZED = 1, SOLVER_ALLOC_FAILED = 2, SOLVER_INVALID_VALUE = 3 };

enum { QR_BLOCK = 32, LU_BLOCK = 64 }; /* LAPACK's ilaenv: xGEQRF, xORGQR, xORMQR; xGETRF, xPOTRF, xSYTRF */

static int computed(void) { return gm_computed(SOLVER_NOT_INITIALIZED); }

/* ---- handles and parameters ---- */

static int new_descriptor(void **out) { return gm_new_descriptor(out, 64, SOLVER_ALLOC_FAILED); }

GM_API int cusolverDnCreate(void **out) { return gm_visible() ? new_descriptor(out) : SOLVER_NOT_INITIALIZED; }
GM_API int cusolverDnDestroy(void *handle) { return gm_delete_descriptor(handle); }
GM_API int cusolverDnSetStream(void *handle, void *stream) { gm_work_next_on(stream); return GM_SUCCESS; }
GM_API int cusolverDnCreateParams(void **out) { return new_descriptor(out); }
GM_API int cusolverDnDestroyParams(void *d) { return gm_delete_descriptor(d); }
GM_API int cusolverDnCreateGesvdjInfo(void **out) { return new_descriptor(out); }
GM_API int cusolverDnDestroyGesvdjInfo(void *d) { return gm_delete_descriptor(d); }
GM_API int cusolverDnCreateSyevjInfo(void **out) { return new_descriptor(out); }
GM_API int cusolverDnDestroySyevjInfo(void *d) { return gm_delete_descriptor(d); }
GM_API int cusolverDnXgesvdjSetTolerance(void *d, double tolerance) { return GM_SUCCESS; }
GM_API int cusolverDnXgesvdjSetMaxSweeps(void *d, int sweeps) { return GM_SUCCESS; }
GM_API int cusolverDnXgesvdjSetSortEig(void *d, int sorted) { return GM_SUCCESS; }
GM_API int cusolverDnXsyevjSetSortEig(void *d, int sorted) { return GM_SUCCESS; }

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

enum { MAX_TIMES = 4 }; /* an estimate, as the most that a range has: no manual names one */

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

/* T: S, D, C or Z. The names of some functions differ between real and complex ones. */
#define FOR_EVERY_TYPE(T)                                                                                            \
    GM_API int cusolverDn##T##potrf_bufferSize(void *h, int uplo, int n, void *a, int lda, int *out) {               \
        return answer_elements(out, block_column(n, LU_BLOCK));                                                      \
    }                                                                                                                \
    GM_API int cusolverDn##T##getrf_bufferSize(void *h, int m, int n, void *a, int lda, int *out) {                  \
        return answer_elements(out, block_column(m, LU_BLOCK));                                                      \
    }                                                                                                                \
    GM_API int cusolverDn##T##sytrf_bufferSize(void *h, int n, void *a, int lda, int *out) {                         \
        return answer_elements(out, block_column(n, LU_BLOCK));                                                      \
    }                                                                                                                \
    GM_API int cusolverDn##T##geqrf_bufferSize(void *h, int m, int n, void *a, int lda, int *out) {                  \
        return answer_elements(out, block_column(n, QR_BLOCK));                                                      \
    }                                                                                                                \
    GM_API int cusolverDn##T##gesvd_bufferSize(void *h, int m, int n, int *out) {                                    \
        return answer_elements(out, singular_values(m, n));                                                          \
    }                                                                                                                \
    GM_API int cusolverDn##T##gesvdj_bufferSize(void *h, int jobz, int econ, int m, int n, const void *a, int lda,   \
                                                const void *s, const void *u, int ldu, const void *v, int ldv,       \
                                                int *out, void *parameters) {                                        \
        return answer_elements(out, jacobi(m, n, jobz, 1));                                                          \
    }                                                                                                                \
    GM_API int cusolverDn##T##gesvdjBatched_bufferSize(void *h, int jobz, int m, int n, const void *a, int lda,      \
                                                       const void *s, const void *u, int ldu, const void *v,         \
                                                       int ldv, int *out, void *parameters, int batch) {             \
        return answer_elements(out, jacobi(m, n, jobz, batch));                                                      \
    }                                                                                                                \
    GM_API int cusolverDn##T##gesvdaStridedBatched_bufferSize(                                                       \
        void *h, int jobz, int rank, int m, int n, const void *a, int lda, long long sa, const void *s,              \
        long long ss, const void *u, int ldu, long long su, const void *v, int ldv, long long sv, int *out,          \
        int batch) {                                                                                                 \
        return answer_elements(out, jacobi(m, n, jobz, batch));                                                      \
    }                                                                                                                \
    GM_API int cusolverDn##T##gesvdaStridedBatched(                                                                  \
        void *h, int jobz, int rank, int m, int n, const void *a, int lda, long long sa, void *s, long long ss,      \
        void *u, int ldu, long long su, void *v, int ldv, long long sv, void *work, int lwork, int *info,            \
        double *residuals, int batch) {                                                                              \
        if (residuals) memset(residuals, 0, sizeof *residuals * (size_t)positive(batch)); /* in host memory */       \
        return computed();                                                                                           \
    }                                                                                                                \
    GM_API int cusolverDn##T##geqrf(void) { return computed(); }                                                     \
    GM_API int cusolverDn##T##gesvd(void) { return computed(); }                                                     \
    GM_API int cusolverDn##T##gesvdj(void) { return computed(); }                                                    \
    GM_API int cusolverDn##T##gesvdjBatched(void) { return computed(); }                                             \
    GM_API int cusolverDn##T##getrf(void) { return computed(); }                                                     \
    GM_API int cusolverDn##T##getrs(void) { return computed(); }                                                     \
    GM_API int cusolverDn##T##potrf(void) { return computed(); }                                                     \
    GM_API int cusolverDn##T##potrfBatched(void) { return computed(); }                                              \
    GM_API int cusolverDn##T##potrs(void) { return computed(); }                                                     \
    GM_API int cusolverDn##T##potrsBatched(void) { return computed(); }                                              \
    GM_API int cusolverDn##T##sytrf(void) { return computed(); }

FOR_EVERY_TYPE(S)
FOR_EVERY_TYPE(D)
FOR_EVERY_TYPE(C)
FOR_EVERY_TYPE(Z)

/* EV: Ssyev, Dsyev, Cheev or Zheev; Q: the orthogonal or unitary matrix, Sor, Dor, Cun or Zun. */
#define FOR_EITHER_KIND(EV, Q)                                                                                      \
    GM_API int cusolverDn##EV##d_bufferSize(void *h, int jobz, int uplo, int n, const void *a, int lda,             \
                                            const void *w, int *out) {                                              \
        return answer_elements(out, divide_and_conquer(n, jobz));                                                   \
    }                                                                                                               \
    GM_API int cusolverDn##EV##j_bufferSize(void *h, int jobz, int uplo, int n, const void *a, int lda,             \
                                            const void *w, int *out, void *parameters) {                            \
        return answer_elements(out, jacobi(n, n, jobz, 1));                                                         \
    }                                                                                                               \
    GM_API int cusolverDn##EV##jBatched_bufferSize(void *h, int jobz, int uplo, int n, const void *a, int lda,      \
                                                   const void *w, int *out, void *parameters, int batch) {          \
        return answer_elements(out, jacobi(n, n, jobz, batch));                                                     \
    }                                                                                                               \
    GM_API int cusolverDn##Q##gqr_bufferSize(void *h, int m, int n, int k, const void *a, int lda, const void *tau, \
                                             int *out) {                                                            \
        return answer_elements(out, block_column(n, QR_BLOCK));                                                     \
    }                                                                                                               \
    GM_API int cusolverDn##Q##mqr_bufferSize(void *h, int side, int trans, int m, int n, int k, const void *a,      \
                                             int lda, const void *tau, const void *c, int ldc, int *out) {          \
        return answer_elements(out, block_column(side == 0 ? n : m, QR_BLOCK)); /* CUBLAS_SIDE_LEFT */              \
    }                                                                                                               \
    GM_API int cusolverDn##EV##d(void) { return computed(); }                                                       \
    GM_API int cusolverDn##EV##j(void) { return computed(); }                                                       \
    GM_API int cusolverDn##EV##jBatched(void) { return computed(); }                                                \
    GM_API int cusolverDn##Q##gqr(void) { return computed(); }                                                      \
    GM_API int cusolverDn##Q##mqr(void) { return computed(); }

FOR_EITHER_KIND(Ssyev, Sor)
FOR_EITHER_KIND(Dsyev, Dor)
FOR_EITHER_KIND(Cheev, Cun)
FOR_EITHER_KIND(Zheev, Zun)

/* ---- the 64-bit API: sizes in bytes, of device and of host memory ---- */

GM_API int cusolverDnXpotrf_bufferSize(void *h, void *parameters, int uplo, int64_t n, int type, const void *a,
                                       int64_t lda, int compute, size_t *device, size_t *host) {
    return answer_bytes(device, host, block_column(n, LU_BLOCK), type);
}

GM_API int cusolverDnXgeqrf_bufferSize(void *h, void *parameters, int64_t m, int64_t n, int type, const void *a,
                                       int64_t lda, int tau_type, const void *tau, int compute, size_t *device,
                                       size_t *host) {
    return answer_bytes(device, host, block_column(n, QR_BLOCK), type);
}

GM_API int cusolverDnXsyevd_bufferSize(void *h, void *parameters, int jobz, int uplo, int64_t n, int type,
                                       const void *a, int64_t lda, int w_type, const void *w, int compute,
                                       size_t *device, size_t *host) {
    return answer_bytes(device, host, divide_and_conquer(n, jobz), type);
}

GM_API int cusolverDnXsyevBatched_bufferSize(void *h, void *parameters, int jobz, int uplo, int64_t n, int type,
                                             const void *a, int64_t lda, int w_type, const void *w, int compute,
                                             size_t *device, size_t *host, int64_t batch) {
    return answer_bytes(device, host, jacobi(n, n, jobz, batch), type);
}

/* xGEEV: 4n with eigenvectors, and xGEHRD's block column. */
GM_API int cusolverDnXgeev_bufferSize(void *h, void *parameters, int left, int right, int64_t n, int type,
                                      const void *a, int64_t lda, int w_type, const void *w, int left_type,
                                      const void *vl, int64_t ldvl, int right_type, const void *vr, int64_t ldvr,
                                      int compute, size_t *device, size_t *host) {
    return answer_bytes(device, host, 4 * positive(n) + block_column(n, QR_BLOCK), type);
}

/* xSYTRS2: n. */
GM_API int cusolverDnXsytrs_bufferSize(void *h, int uplo, int64_t n, int64_t columns, int type, const void *a,
                                       int64_t lda, const int64_t *pivots, int b_type, void *b, int64_t ldb,
                                       size_t *device, size_t *host) {
    return answer_bytes(device, host, positive(n), type);
}

GM_API int cusolverDnXpotrf(void) { return computed(); }
GM_API int cusolverDnXpotrs(void) { return computed(); }
GM_API int cusolverDnXgeqrf(void) { return computed(); }
GM_API int cusolverDnXsyevd(void) { return computed(); }
GM_API int cusolverDnXsyevBatched(void) { return computed(); }
GM_API int cusolverDnXgeev(void) { return computed(); }
GM_API int cusolverDnXsytrs(void) { return computed(); }
