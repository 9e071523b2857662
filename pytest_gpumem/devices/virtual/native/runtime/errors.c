/* Errors: the last one, and the names and messages of all. */
#include "runtime/runtime.h"

#include <stdio.h>

static char endless[1024] = "the launch timed out and was terminated"; /* the last message that Python set */

GM_API int cudaGetLastError(void) { return gm_last_error(true); }
GM_API int cudaPeekAtLastError(void) { return gm_last_error(false); }

static const struct {
    int status;
    const char *name, *message;
} errors[] = {
    {GM_SUCCESS, "cudaSuccess", "no error"},
    {GM_INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {GM_OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {GM_INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {GM_NO_DEVICE, "cudaErrorNoDevice",
     "no GPU here: the virtual GPU is visible only in tests marked gpu_memory; --gpumem-visible=session shows it to all code"},
    {GM_INVALID_DEVICE, "cudaErrorInvalidDevice",
     "invalid device ordinal (a test marked gpu_memory sees as many devices as its marker says: devices=N)"},
    {GM_DEVICE_UNINITIALIZED, "cudaErrorDeviceUninitialized",
     "invalid device context (shared memory can be opened in other processes only)"},
    {GM_ILLEGAL_STATE, "cudaErrorIllegalState", "the operation cannot be done in the present state"},
    {GM_SYMBOL_NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {GM_NOT_READY, "cudaErrorNotReady", "device not ready"},
    {GM_CONTEXT_IS_CURRENT, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {GM_HOST_ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered", "this host memory is registered already"},
    {GM_HOST_NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered", "this host memory is not registered"},
    {GM_NOT_SUPPORTED, "cudaErrorNotSupported", "the virtual GPU does not support this (standard error names it)"},
    {GM_STREAM_CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {GM_LAUNCH_TIMEOUT, "cudaErrorLaunchTimeout", endless},
    {GM_CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated", "the stream's capture was invalidated"},
    {GM_CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched", "the capture began on another stream"},
    {GM_CAPTURED_EVENT, "cudaErrorCapturedEvent", "operation not permitted on an event that a capture has recorded"},
    {GM_CAPTURE_WRONG_THREAD, "cudaErrorStreamCaptureWrongThread",
     "the capture began in another thread, and not in the relaxed mode"},
};

static const char *describe(int status, bool name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status) return name ? errors[i].name : errors[i].message;
    return name ? "cudaErrorUnknown" : "unknown error";
}

GM_API const char *cudaGetErrorName(int status) { return describe(status, true); }
GM_API const char *cudaGetErrorString(int status) { return describe(status, false); }

GM_API int cuGetErrorString(int status, const char **message) {
    *message = describe(status, false);
    return GM_SUCCESS;
}

GM_API int cuGetErrorName(int status, const char **message) {
    *message = describe(status, true);
    return GM_SUCCESS;
}

/* ---- a function that Python calls ---- */

/* Sets the message of cudaErrorLaunchTimeout, which a copy in an endless loop fails with. */
GM_API void gpumem_set_endless(const char *text) { snprintf(endless, sizeof endless, "%s", text); }
