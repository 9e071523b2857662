/* Kernels, which never run: their attributes and occupancy, which PyTorch's host code queries before a launch. */
#include "runtime/runtime.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    size_t shared_size, const_size, local_size;
    int max_threads_per_block, registers, ptx_version, binary_version, cache_mode;
    int max_dynamic_shared_size, preferred_carveout;
    int clusters_and_reserved[23];
} func_attributes;

_Static_assert(sizeof(func_attributes) == 144, "cudaFuncAttributes has 144 bytes in CUDA 12 and 13");

enum { MAX_ARCHITECTURES = 32 };
static int architectures[MAX_ARCHITECTURES], architecture_count; /* 86 is compute capability 8.6 */

/* Sets the architectures that PyTorch's kernels were compiled for. */
GM_API void gpumem_set_architectures(const int *values, int count) {
    architecture_count = count < MAX_ARCHITECTURES ? count : MAX_ARCHITECTURES;
    memcpy(architectures, values, sizeof *values * (size_t)architecture_count);
}

/* Returns the architecture whose kernels the driver would load on this card: the nearest one of the card's major
 * version that is not above the card's (CUDA C++ Programming Guide, binary compatibility). If there is none, a driver
 * would refuse: here it is the nearest one of all, because CUB looks its kernels up by it, and has no others. */
static int architecture(void) {
    int capability = gm_profile.major * 10 + gm_profile.minor, best = 0, nearest = 0;
    for (int i = 0; i < architecture_count; i++) {
        int candidate = architectures[i];
        if (candidate / 10 == gm_profile.major && candidate <= capability && candidate > best) best = candidate;
        if (!nearest || abs(candidate - capability) < abs(nearest - capability)) nearest = candidate;
    }
    return best ? best : nearest ? nearest : capability;
}

GM_API int cudaFuncGetAttributes(func_attributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->max_threads_per_block = 1024;
    attributes->registers = 32;
    attributes->ptx_version = attributes->binary_version = architecture();
    attributes->max_dynamic_shared_size = (int)gm_profile.shared_memory_per_block;
    attributes->preferred_carveout = -1;
    return GM_SUCCESS;
}

GM_API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int block_size,
                                                                  size_t shared, unsigned flags) {
    if (block_size <= 0) return gm_error(GM_INVALID_VALUE);
    int count = gm_profile.max_threads_per_sm / block_size;
    if (count > gm_profile.max_blocks_per_sm) count = gm_profile.max_blocks_per_sm;
    if (shared) {
        uint64_t fits = gm_profile.shared_memory_per_sm / (shared + gm_profile.reserved_shared_memory_per_block);
        if (fits < (uint64_t)count) count = (int)fits;
    }
    *blocks = count;
    return GM_SUCCESS;
}

GM_API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                         size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared, 0);
}
