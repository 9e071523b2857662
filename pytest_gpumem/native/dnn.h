/* What the parts of cuDNN share. Numbers are those of cudnn_graph.h (cuDNN's public headers). */
#ifndef GPUMEM_DNN_H
#define GPUMEM_DNN_H

#include "gpumem.h"

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
    GM_TYPE_BACKEND_DESCRIPTOR = 15,
    GM_TYPE_CHAR = 24,
};

/* dnn_asked.c: cuDNN's own functions. Theirs are the arguments and the statuses. */
bool gm_asking(void); /* this thread is in one of them: who calls is cuDNN itself */
int gm_ask_version(void); /* 91002 for cuDNN 9.10.2; 0: there is none at hand */
const char *gm_ask_error_string(int status);
bool gm_ask_last_error(char *message, size_t size);
int gm_ask_create(int type, void **out);
int gm_ask_destroy(void *descriptor);
int gm_ask_set(void *descriptor, int name, int type, int64_t count, const void *elements);
int gm_ask_finalize(void *descriptor);
int gm_ask_get(void *descriptor, int name, int type, int64_t wanted, int64_t *count, void *elements);

/* The card's device property descriptor. NULL: there is no cuDNN that can be asked of this card. */
void *gm_ask_card(void);

#endif
