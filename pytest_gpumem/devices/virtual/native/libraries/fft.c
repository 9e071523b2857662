/* cuFFT: plans are numbers; the work areas, which PyTorch allocates with its own allocator, are estimated.
 *
 * cuFFT's manual bounds the work area: from 1 to 8 times batch * n[0] * ... * n[rank - 1] complex elements. Sizes whose
 * prime factors are all at most 127 have their own algorithms: the lower bound is assumed. Other sizes use Bluestein's
 * algorithm, which transforms something larger: the upper bound is assumed. A single power of two that fits into a
 * block's shared memory, which the manual calls the best path, is assumed to need none: what PyTorch reserved on an RTX
 * A6000 for transforms of 512 has no room for one (benchmarks/results/published_speech.txt). */
#include "base/base.h"

#include <stdatomic.h>

enum {
    FFT_INVALID_PLAN = 1,
    FFT_INVALID_TYPE = 3,
    FFT_INVALID_VALUE = 4,
    FFT_SETUP_FAILED = 7,
    FFT_NOT_SUPPORTED = 16,
};

enum { LARGEST_PRIME = 127, BLUESTEIN = 8, MAX_RANK = 3, SHARED_BYTES = 48 * 1024 };

static atomic_int plans;

enum { PLANS = 4096 }; /* PyTorch's cache holds fewer per device */
static struct {
    uint64_t usual, most;
} areas[PLANS]; /* by plan number */

GM_API int cufftCreate(int *plan) {
    if (!gm_visible()) return FFT_SETUP_FAILED;
    *plan = 1 + (int)((unsigned)atomic_fetch_add_explicit(&plans, 1, memory_order_relaxed) & 0x3fffffff);
    return GM_SUCCESS;
}

GM_API int cufftDestroy(int plan) { return plan > 0 ? GM_SUCCESS : FFT_INVALID_PLAN; }

/* A plan that allocates its work area itself would use memory that is in none of PyTorch's figures. */
GM_API int cufftSetAutoAllocation(int plan, int automatic) {
    return automatic ? gm_unsupported("cufftSetAutoAllocation (switched on)", FFT_NOT_SUPPORTED) : GM_SUCCESS;
}

GM_API int cufftSetStream(int plan, void *stream) { gm_work_next_on(stream); return GM_SUCCESS; }

GM_API int cufftSetWorkArea(int plan, void *area) {
    unsigned at = (unsigned)plan % PLANS;
    gm_workspace_in_use(GM_IN_USE, area, 0, areas[at].usual, areas[at].most, 0);
    return GM_SUCCESS;
}

/* Returns the bytes of a complex element by cudaDataType: half and bfloat16, single, double; 0: not a type of a
 * transform. */
static size_t element(int type) {
    switch (type) {
    case 2: case 6: case 14: case 15: return 4;
    case 0: case 4: return 8;
    case 1: case 5: return 16;
    default: return 0;
    }
}

static bool factors_are_small(long long size) {
    for (long long factor = 2; factor <= LARGEST_PRIME && size > 1; factor++)
        while (size % factor == 0) size /= factor;
    return size == 1;
}

GM_API int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *inembed, long long istride,
                               long long idist, int input, long long *onembed, long long ostride, long long odist,
                               int output, long long batch, size_t *size, int execution) {
    if (plan <= 0) return FFT_INVALID_PLAN;
    if (rank < 1 || rank > MAX_RANK || batch < 1) return FFT_INVALID_VALUE;
    size_t bytes = element(execution) * (size_t)batch;
    bool bluestein = false;
    if (!bytes) return FFT_INVALID_TYPE;
    for (int i = 0; i < rank; i++) {
        if (n[i] < 1) return FFT_INVALID_VALUE;
        bytes *= (size_t)n[i];
        bluestein |= !factors_are_small(n[i]);
    }
    bool in_shared = rank == 1 && !(n[0] & (n[0] - 1)) && (size_t)n[0] * element(execution) <= SHARED_BYTES;
    size_t usual = bluestein ? bytes * BLUESTEIN : in_shared ? 0 : bytes;
    areas[(unsigned)plan % PLANS].usual = usual;
    areas[(unsigned)plan % PLANS].most = bytes * BLUESTEIN;
    *size = gm_size_between(GM_IN_USE, 0, usual, bytes * BLUESTEIN);
    return GM_SUCCESS;
}

GM_API int cufftXtExec(int plan, void *input, void *output, int direction) {
    gm_note_sizes(GM_CUFFT); /* here: PyTorch caches plans, and allocates the workspace at each execution */
    gm_forget_all();
    return gm_visible() ? GM_SUCCESS : FFT_SETUP_FAILED;
}
