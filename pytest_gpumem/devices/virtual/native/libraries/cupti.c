/* CUPTI: a profiler may enable records; no kernel runs here, so no record is ever written.
 *
 * No buffer is ever requested or delivered, which is how CUPTI behaves for a program that uses no GPU. */
#include "base/base.h"

enum { CUPTI_INVALID_PARAMETER = 1, CUPTI_MAX_LIMIT_REACHED = 12, CUPTI_QUEUE_EMPTY = 18 };

static char subscriber; /* a token */

GM_API int cuptiGetResultString(int status, const char **message) {
    *message = status == GM_SUCCESS               ? "CUPTI_SUCCESS"
            : status == CUPTI_MAX_LIMIT_REACHED ? "CUPTI_ERROR_MAX_LIMIT_REACHED: there are no records"
            : status == CUPTI_QUEUE_EMPTY       ? "CUPTI_ERROR_QUEUE_EMPTY"
                                                : "CUPTI_ERROR_INVALID_PARAMETER";
    return GM_SUCCESS;
}

/* CUPTI_API_VERSION: CUDA's version with two digits for a patch release, such as 130200 for CUDA 13.2. */
GM_API int cuptiGetVersion(uint32_t *version) {
    *version = (uint32_t)(gm_cuda_version() * 10);
    return GM_SUCCESS;
}

GM_API int cuptiGetTimestamp(uint64_t *nanoseconds) {
    *nanoseconds = gm_now();
    return GM_SUCCESS;
}

GM_API int cuptiActivityGetNextRecord(uint8_t *buffer, size_t size, void **record) {
    if (record) *record = NULL;
    return CUPTI_MAX_LIMIT_REACHED;
}

GM_API int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped) {
    *dropped = 0;
    return GM_SUCCESS;
}

/* The profiler's own identifiers, which it pushes and pops around its operators, but does not read. */
GM_API int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last) {
    if (last) *last = 0;
    return GM_SUCCESS;
}

GM_API int cuptiSubscribe(void **out, void *callback, void *data) { *out = &subscriber; return GM_SUCCESS; }
GM_API int cuptiUnsubscribe(void *handle) { return handle == &subscriber ? GM_SUCCESS : CUPTI_INVALID_PARAMETER; }

GM_API int cuptiGetCallbackName(int domain, uint32_t id, const char **name) {
    *name = "unknown";
    return GM_SUCCESS;
}
