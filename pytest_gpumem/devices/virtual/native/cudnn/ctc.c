/* cuDNN's CTC loss. Its workspace is not documented, and estimated as the values that the algorithm stores: for every
 * time step and sequence the forward and the backward variable of each position in the label, including blanks. */
#include "cudnn/cudnn.h"

typedef struct {
    int longest_label;
} ctc_loss;

GM_API int cudnnSetCTCLossDescriptorEx(ctc_loss *d, int type, int normalization, int gradients) {
    d->longest_label = 0;
    return GM_SUCCESS;
}

GM_API int cudnnSetCTCLossDescriptor_v9(ctc_loss *d, int type, int normalization, int gradients, int longest_label) {
    if (longest_label < 0) return GM_CUDNN_BAD_PARAM;
    d->longest_label = longest_label;
    return GM_SUCCESS;
}

/* `scores` are time x sequences x classes. */
static int workspace(const void *scores, int longest_label, size_t *size) {
    size_t steps = (size_t)gm_tensor_size(scores, 0) * (size_t)gm_tensor_size(scores, 1);
    gm_note_sizes(GM_CTC);
    size_t bytes = 2 * steps * (2 * (size_t)longest_label + 1) * sizeof(float);
    *size = gm_size_between(GM_PASSING, 0, bytes, 4 * bytes);
    return GM_SUCCESS;
}

/* The labels' lengths are in host memory here, and in device memory in the newer function. */
GM_API int cudnnGetCTCLossWorkspaceSize(void *h, const void *scores, const void *gradients, const int *labels,
                                        const int *label_lengths, const int *input_lengths, int algorithm,
                                        ctc_loss *d, size_t *size) {
    int longest = 0;
    for (int i = 0; i < gm_tensor_size(scores, 1); i++)
        if (label_lengths[i] > longest) longest = label_lengths[i];
    return workspace(scores, longest, size);
}

GM_API int cudnnGetCTCLossWorkspaceSize_v8(void *h, int algorithm, const ctc_loss *d, const void *scores,
                                           const void *gradients, size_t *size) {
    return workspace(scores, d->longest_label, size);
}
