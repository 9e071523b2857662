/* Shared by the parts of cuDNN. Numbers are those of cudnn_graph.h (cuDNN's public headers). */
#ifndef GPUMEM_CUDNN_H
#define GPUMEM_CUDNN_H

#include "base/base.h"

enum {
    GM_CUDNN_NOT_INITIALIZED = 1001,
    GM_CUDNN_BAD_PARAM = 2000,
    GM_CUDNN_NOT_SUPPORTED = 3000,
    /* of cudnnBackendDescriptorType_t */
    GM_ENGINE = 2,
    GM_ENGINEHEUR = 4,
    GM_EXECUTION_PLAN = 5,
    /* of cudnnBackendAttributeType_t */
    GM_TYPE_HANDLE = 0,
    GM_TYPE_INT64 = 3,
    GM_TYPE_DOUBLE = 5,
    GM_TYPE_BACKEND_DESCRIPTOR = 15,
    GM_TYPE_BEHAVIOR_NOTE = 19,
    GM_TYPE_CHAR = 24,
};

/* installed.c: the functions of the installed cuDNN, with its arguments and statuses. */
int gm_installed_version(void); /* 91002 for cuDNN 9.10.2; 0: none is available */
bool gm_asks_another_cudnn(void); /* $GPUMEM_CUDNN is not the one that PyTorch was linked with */
const char *gm_installed_error_string(int status);
bool gm_installed_last_error(char *message, size_t size);
int gm_installed_create(int type, void **out);
int gm_installed_destroy(void *descriptor);
int gm_installed_set(void *descriptor, int name, int type, int64_t count, const void *elements);
int gm_installed_finalize(void *descriptor);
int gm_installed_get(void *descriptor, int name, int type, int64_t room, int64_t *count, void *elements);

/* cublaslt.c: lets the engines of the cuDNN that `function` belongs to plan with cuBLASLt; false: they cannot */
bool gm_lend_cublaslt(void *function);

/* rnn.c: a tensor's size in a dimension; 0 if it has fewer dimensions */
int gm_tensor_size(const void *descriptor, int dimension);

/* Returns the card's device property descriptor. NULL: no cuDNN can plan for this card. */
void *gm_installed_card(void);

#endif
