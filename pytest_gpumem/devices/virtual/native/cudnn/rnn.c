/* cuDNN's recurrent networks (RNN, LSTM, GRU): the layout of their weights is documented, and exact here; the sizes of
 * the workspace, and of the reserve space that training keeps from forward to backward, are not documented, and are
 * estimated. */
#include "cudnn/cudnn.h"

#include <string.h>

enum { MAX_DIMENSIONS = 8 };

/* ---- tensor descriptors ---- */

typedef struct {
    int type, count;
    int sizes[MAX_DIMENSIONS], strides[MAX_DIMENSIONS];
} tensor;

_Static_assert(sizeof(tensor) <= GM_DESCRIPTOR, "a descriptor has room for it");

static void tensor_set(tensor *t, int type, int rows, int columns) {
    if (!t) return;
    *t = (tensor){.type = type, .count = 3, .sizes = {1, rows, columns}, .strides = {rows * columns, columns, 1}};
}

GM_API int cudnnSetTensorNdDescriptor(tensor *t, int type, int count, const int *sizes, const int *strides) {
    if (count < 0 || count > MAX_DIMENSIONS) return GM_CUDNN_BAD_PARAM;
    t->type = type;
    t->count = count;
    memcpy(t->sizes, sizes, (size_t)count * sizeof *sizes);
    memcpy(t->strides, strides, (size_t)count * sizeof *strides);
    return GM_SUCCESS;
}

GM_API int cudnnGetTensorNdDescriptor(const tensor *t, int room, int *type, int *count, int *sizes, int *strides) {
    int count_given = room < t->count ? room : t->count;
    *type = t->type;
    *count = t->count;
    memcpy(sizes, t->sizes, (size_t)count_given * sizeof *sizes);
    memcpy(strides, t->strides, (size_t)count_given * sizeof *strides);
    return GM_SUCCESS;
}

int gm_tensor_size(const void *descriptor, int dimension) {
    const tensor *t = descriptor;
    return dimension < t->count ? t->sizes[dimension] : 0;
}

/* ---- networks ---- */

typedef struct {
    int mode, biases, directions, skip_input, type;
    int input_size, hidden_size, projection_size, layers;
} network;

typedef struct {
    int time, batch;
} sequences;

/* cudnnRNNMode_t: 0 ReLU, 1 tanh, 2 LSTM, 3 GRU; cudnnRNNBiasMode_t: 0 none, 1 input, 2 both, 3 recurrent;
 * cudnnDirectionMode_t: 0 one, 1 two; cudnnRNNInputMode_t: 0 linear, 1 skip. */
GM_API int cudnnSetRNNDescriptor_v8(network *n, int algorithm, int mode, int biases, int direction, int input_mode,
                                    int type, int precision, int math, int32_t input_size, int32_t hidden_size,
                                    int32_t projection_size, int32_t layers, void *dropout, uint32_t flags) {
    *n = (network){mode, biases, direction == 1 ? 2 : 1, input_mode == 1, type,
                   input_size, hidden_size, projection_size, layers};
    return GM_SUCCESS;
}

GM_API int cudnnSetRNNDataDescriptor(sequences *s, int type, int layout, int time, int batch, int size,
                                     const int *lengths, void *fill) {
    *s = (sequences){time, batch};
    return GM_SUCCESS;
}

/* cudnnDataType_t: 1 is double; 2 half, 9 bfloat16; 0 float. */
static size_t element(const network *n) { return n->type == 1 ? 8 : n->type == 2 || n->type == 9 ? 2 : 4; }

static int gates(const network *n) { return n->mode == 2 ? 4 : n->mode == 3 ? 3 : 1; }

static int output_size(const network *n) { return n->projection_size ? n->projection_size : n->hidden_size; }

static bool projects(const network *n) { return n->projection_size && n->projection_size != n->hidden_size; }

/* Columns of an input (half 0) or recurrent (half 1) matrix of a pseudo-layer (one layer in one direction). */
static int columns(const network *n, int pseudo_layer, int half) {
    if (half) return output_size(n);
    if (pseudo_layer < n->directions) return n->skip_input ? 0 : n->input_size;
    return output_size(n) * n->directions;
}

static size_t matrices_of(const network *n, int pseudo_layer) {
    size_t rows = (size_t)gates(n) * (size_t)n->hidden_size;
    size_t projection = projects(n) ? (size_t)n->projection_size * (size_t)n->hidden_size : 0;
    return rows * (size_t)(columns(n, pseudo_layer, 0) + columns(n, pseudo_layer, 1)) + projection;
}

static size_t biases_of(const network *n) {
    size_t vectors = n->biases == 0 ? 0 : n->biases == 2 ? 2 : 1;
    return vectors * (size_t)gates(n) * (size_t)n->hidden_size;
}

static int pseudo_layers(const network *n) { return n->layers * n->directions; }

/* All matrices of all layers come first, then all biases (cuDNN API, cudnnGetRNNWeightParams). */
static size_t weights(const network *n, int upto, bool with_biases) {
    size_t total = 0;
    for (int layer = 0; layer < (with_biases ? pseudo_layers(n) : upto); layer++) total += matrices_of(n, layer);
    return total + (with_biases ? (size_t)upto * biases_of(n) : 0);
}

GM_API int cudnnGetRNNWeightSpaceSize(void *handle, const network *n, size_t *size) {
    *size = weights(n, pseudo_layers(n), true) * element(n);
    return GM_SUCCESS;
}

GM_API int cudnnGetRNNWeightParams(void *handle, const network *n, int32_t layer, size_t size, char *space,
                                   int32_t id, tensor *matrix, void **matrix_at, tensor *bias, void **bias_at) {
    int count = gates(n), half = id / count, gate = id % count;
    if (layer < 0 || layer >= pseudo_layers(n) || id < 0 || (half > 1 && !projects(n))) return GM_CUDNN_BAD_PARAM;
    size_t at = weights(n, layer, false);
    int rows = n->hidden_size, wide = half > 1 ? n->hidden_size : columns(n, layer, half);
    if (half > 1) rows = n->projection_size;
    if (half >= 1) at += (size_t)count * (size_t)n->hidden_size * (size_t)columns(n, layer, 0);
    if (half > 1) at += (size_t)count * (size_t)n->hidden_size * (size_t)columns(n, layer, 1);
    else at += (size_t)gate * (size_t)n->hidden_size * (size_t)wide;
    tensor_set(matrix, n->type, rows, wide);
    if (matrix_at) *matrix_at = space ? space + at * element(n) : NULL;
    bool biased = half < 2 && (n->biases == 2 || (n->biases == 1 && half == 0) || (n->biases == 3 && half == 1));
    size_t skipped = n->biases == 2 ? (size_t)id : (size_t)gate;
    tensor_set(bias, n->type, biased ? n->hidden_size : 0, 1);
    size_t bias_offset = weights(n, layer, true) + skipped * (size_t)n->hidden_size;
    if (bias_at) *bias_at = biased && space ? space + bias_offset * element(n) : NULL;
    return GM_SUCCESS;
}

/* Returns the values per time step that training keeps for every layer, in units of the hidden state's size.
 * pytorch/pytorch#2895 has 864,000,000 bytes for a GRU and 736,000,000 for an LSTM of four layers on a P100: for
 * 8,000,000 values of four bytes that is 6 and 5 per layer, and one between two layers. For a plain RNN no size was
 * published: the gate and the output are assumed, which its equations need. */
static size_t values_kept(const network *n) {
    size_t layers = (size_t)n->layers;
    size_t values = n->mode == 3 ? 7 * layers - 1 : n->mode == 2 ? 6 * layers - 1 : 2 * layers;
    return values * (size_t)n->directions;
}

/* Returns the values per time step in the workspace, in units of the hidden state's size: without training the gates'
 * pre-activations of all layers, and an output between two layers. Published for an LSTM of four layers on an RTX A6000
 * are 350 MiB in float32, 0.5 % more than this, and 208 in half precision, 19 % more (benchmarks/data/README.md). What
 * training needs besides its reserve space is not published: assumed are the pre-activations of one layer. */
static size_t values_passed(const network *n, int training) {
    size_t layers = training ? 1 : (size_t)n->layers;
    return (layers * (size_t)gates(n) + layers - 1) * (size_t)n->directions;
}

/* Not documented: estimates. */
GM_API int cudnnGetRNNTempSpaceSizes(void *handle, const network *n, int training, const sequences *data,
                                     size_t *workspace, size_t *reserve) {
    size_t steps = (size_t)data->time * (size_t)data->batch, hidden = (size_t)n->hidden_size;
    gm_note_sizes(GM_RNN);
    size_t bytes = steps * hidden * values_passed(n, training) * element(n);
    size_t kept = training ? steps * hidden * values_kept(n) * element(n) : 0;
    if (workspace) *workspace = gm_size_between(GM_PASSING, 0, bytes, 2 * bytes);
    if (reserve) *reserve = gm_size_between(GM_KEPT, kept / 2, kept, 2 * kept);
    return GM_SUCCESS;
}

/* ---- dropout: its state is that of one random generator per thread (estimated by the card's threads) ---- */

GM_API int cudnnDropoutGetStatesSize(void *handle, size_t *size) {
    gm_note_sizes(GM_RNN);
    *size = (size_t)gm_profile.sm_count * (size_t)gm_profile.max_threads_per_sm * 16;
    return GM_SUCCESS;
}

/* Kernels write the generator's states, and nothing else. */
GM_API int cudnnSetDropoutDescriptor(void *dropout, void *handle, float share, void *states, size_t size) {
    gm_forget(states, size);
    return gm_visible() ? GM_SUCCESS : GM_CUDNN_NOT_INITIALIZED;
}

GM_API int cudnnRestoreDropoutDescriptor(void) { return gm_visible() ? GM_SUCCESS : GM_CUDNN_NOT_INITIALIZED; }
