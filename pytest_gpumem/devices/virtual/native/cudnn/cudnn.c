/* cuDNN except its graph API (graph.c), recurrent networks (rnn.c) and CTC loss (ctc.c). */
#include "cudnn/cudnn.h"

#include <stdio.h>

/* Returns the version of the cuDNN that computes plans, because PyTorch decides by it which operations it sends to
 * cuDNN. If that cuDNN is older than the headers PyTorch was compiled with, torch.backends.cudnn.version() would raise:
 * then returns the headers' version. */
static int version_at_hand(void) {
    int installed = gm_installed_version(), compiled = gm_cudnn_version();
    return installed > compiled ? installed : compiled;
}

GM_API size_t cudnnGetVersion(void) { return (size_t)version_at_hand(); }
GM_API size_t cudnnGetCudartVersion(void) { return (size_t)gm_cuda_version(); }

/* libraryPropertyType: 0 major, 1 minor, 2 patch level. */
GM_API int cudnnGetProperty(int type, int *value) {
    int version = version_at_hand();
    if (type < 0 || type > 2) return GM_CUDNN_BAD_PARAM;
    *value = type == 0 ? version / 10000 : type == 1 ? version / 100 % 100 : version % 100;
    return GM_SUCCESS;
}

GM_API const char *cudnnGetErrorString(int status) {
    const char *message = gm_installed_error_string(status);
    if (message) return message;
    switch (status) {
    case GM_SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case GM_CUDNN_NOT_INITIALIZED: return "CUDNN_STATUS_NOT_INITIALIZED";
    case GM_CUDNN_BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
    default: return "CUDNN_STATUS_NOT_SUPPORTED (by the virtual GPU; standard error names the function)";
    }
}

GM_API void cudnnGetLastErrorString(char *message, size_t size) {
    if (!gm_installed_last_error(message, size)) snprintf(message, size, "%s", "");
}

typedef struct {
    void *stream;
} handle;

GM_API int cudnnSetStream(handle *h, void *stream) {
    gm_work_next_on(stream);
    h->stream = stream;
    return GM_SUCCESS;
}

GM_API int cudnnGetStream(handle *h, void **stream) { *stream = h->stream; return GM_SUCCESS; }

/* ---- batch normalisation ---- */

enum { SPATIAL_PERSISTENT = 2 }; /* CUDNN_BATCHNORM_SPATIAL_PERSISTENT, which PyTorch requests with channels last */

/* Per-channel statistics pass through PyTorch's own tensors. cuDNN's documentation requires a workspace and a reserve
 * space for packed channels last in this mode; it reports their sizes only to a handle, which needs a device. The upper
 * bound is that of the kernels for this layout that NVIDIA published (MXNet, nhwc_batch_norm_add_relu.h):
 *
 * - workspace: mean and variance of each channel; for each thread block two partial sums per channel, and a counter for
 *   each group of channels; and counters of finished blocks. A block processes at least 32 pixels: it has 512 threads, of
 *   which 16 share a pixel.
 * - reserve space: one bit per value, padded to 32 pixels and 256 channels. The published kernels need it for an
 *   activation, and here there is none. */
enum { PIXELS = 32, CHANNELS_OF_GROUP = 64, CHANNELS_OF_MASK = 256, DONE_BYTES = 8192 };

static uint64_t divide_up(uint64_t number, uint64_t by) { return (number + by - 1) / by; }

static uint64_t pixels(const void *x) {
    uint64_t count = (uint64_t)gm_tensor_size(x, 0);
    for (int dimension = 2, size; (size = gm_tensor_size(x, dimension)); dimension++) count *= (uint64_t)size;
    return count;
}

static int workspace(int mode, const void *x, size_t *size) {
    *size = 0;
    if (mode != SPATIAL_PERSISTENT) return GM_SUCCESS;
    uint64_t channels = (uint64_t)gm_tensor_size(x, 1), blocks = divide_up(pixels(x), PIXELS);
    uint64_t groups = divide_up(channels, CHANNELS_OF_GROUP);
    gm_note_sizes(GM_BATCH_NORM);
    *size = gm_size_up_to(GM_PASSING, (2 * channels * (blocks + 1) + blocks * groups) * sizeof(float) + DONE_BYTES);
    return GM_SUCCESS;
}

static int reserve_space(int mode, const void *x, size_t *size) {
    *size = 0;
    if (mode != SPATIAL_PERSISTENT) return GM_SUCCESS;
    uint64_t channels = divide_up((uint64_t)gm_tensor_size(x, 1), CHANNELS_OF_MASK) * CHANNELS_OF_MASK;
    gm_note_sizes(GM_BATCH_NORM);
    *size = gm_size_up_to(GM_KEPT, divide_up(pixels(x), PIXELS) * PIXELS * channels / 8);
    return GM_SUCCESS;
}

GM_API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int operations, void *x,
                                                                    void *z, void *y, void *parameters,
                                                                    void *activation, size_t *size) {
    return workspace(mode, x, size);
}

GM_API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int operations, void *x, void *y,
                                                             void *dy, void *dz, void *dx, void *parameters,
                                                             void *activation, size_t *size) {
    return workspace(mode, x, size);
}

GM_API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int operations,
                                                                void *activation, void *x, size_t *size) {
    return reserve_space(mode, x, size);
}
