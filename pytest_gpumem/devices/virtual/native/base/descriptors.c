/* Shared by NVIDIA's libraries: descriptors, and functions whose results are in device memory. */
#include "base/base.h"

#include <stdlib.h>

int gm_new_descriptor(void **out, int failed) {
    *out = calloc(1, GM_DESCRIPTOR);
    return *out ? GM_SUCCESS : failed;
}

int gm_delete_descriptor(void *descriptor) {
    free(descriptor);
    return GM_SUCCESS;
}

int gm_computed(int not_initialized) {
    gm_forget_all();
    return gm_visible() ? GM_SUCCESS : not_initialized;
}
