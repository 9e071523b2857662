"""Why tests of PyTorch fail on the virtual GPU: a class for each, and the reason."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

CLASSES = {
    "a": "needs kernels' effects on large data, or real time, which are not claimed",
    "b": "needs hardware that is not claimed",
    "c": "the tests are of another version than the torch",
    "d": "ours",
    "e": "fails the same without this package",
    "f": "alone in a process it passes",
}


class Reason(NamedTuple):
    """A failure's class, and why."""

    kind: str
    why: str


REPLAY = Reason("a", "a replay of a CUDA graph computes no values, and the test compares some")
SLEEP = Reason("a", "it waits in a kernel (torch.cuda._sleep, say); work is done at once here")
SLOW = Reason(
    "a", "its values are not computed in time on this machine; with auto they are unknown"
)
COMPILES = Reason(
    "e", "it compiles C++ with headers of CUDA's toolkit; with them in CPATH it passes"
)
REASONS: dict[tuple[str, str], Reason] = {
    ("test_cuda.py", "TestBlockStateAbsorption.test_assigning_back_deleter_*"): REPLAY,
    ("test_cuda.py", "TestCuda.test_graph*"): REPLAY,
    ("test_cuda.py", "TestCudaOptimsCUDA.test_graph_*"): REPLAY,
    ("test_cuda.py", "TestCuda.test_events"): SLEEP,
    ("test_cuda.py", "TestCuda.test_record_stream*"): SLEEP,
    ("test_cuda.py", "TestCuda.test_to_non_blocking"): SLEEP,
    ("test_cuda.py", "TestCuda.test_caching_pinned_memory"): SLEEP,
    ("test_cuda.py", "TestCuda.test_cuda_kernel_loop_overflow_large"): SLOW,
    ("test_cuda.py", "TestCuda.test_cudnn_multiple_threads_same_device"): SLOW,
    ("test_cuda.py", "TestCuda.test_cusparse_multiple_threads_same_device"): SLOW,
    ("test_cuda.py", "TestCudaAutocast.test_autocast_rnn"): Reason(
        "a", "1,152 networks: by hand, without the limit of time, it passed in 256 s"
    ),
    ("test_cuda.py", "TestCudaMallocAsync.test_memory_snapshot"): Reason(
        "e", "after its assertions on frames it downloads a program that draws them"
    ),
    ("test_cuda.py", "TestCuda.test_fixed_cuda_assert_async"): Reason(
        "a", "an assertion within a kernel does not fail: no kernel runs"
    ),
    ("test_cuda_multigpu.py", "TestCudaMultiGPU.*event*"): SLEEP,
    ("test_cuda_multigpu.py", "TestCudaMultiGPU.test_streams_multi_gpu_query"): SLEEP,
    ("test_cuda_multigpu.py", "TestCudaMultiGPU.test_caching_pinned_*"): SLEEP,
    ("test_cuda_nvml_based_avail.py", "TestVisibleDeviceParses.test_ordinal_*"): Reason(
        "d",
        "not mended: in a session's own process CUDA_VISIBLE_DEVICES names GPUs of the machine "
        "(a conftest.py that sets it to none would hide the virtual ones), so "
        "torch.cuda._device_count_nvml does not read it; processes that a test starts read it",
    ),
    ("test_cuda.py", "TestMemPool.test_mempool_with_allocator"): COMPILES,
    ("test_cuda.py", "TestMemPool.test_deleted_mempool_not_used_on_oom"): COMPILES,
    ("test_cuda.py", "TestMemPool.test_mempool_e*"): COMPILES,
    ("test_cuda.py", "TestMemPool.test_mempool_limited_memory_with_allocator"): COMPILES,
    ("test_cuda.py", "TestMemPool.test_tensor_delete_after_allocator_delete"): COMPILES,
    ("test_cuda.py", "TestCudaAllocator.test_cpp_memory_snapshot_pickle"): COMPILES,
    ("test_cuda.py", "TestCudaAllocator.test_memory_snapshot"): Reason(
        "e", "after its assertions on frames it downloads a program that draws them"
    ),
    ("test_cuda.py", "TestCompileKernel.*"): Reason(
        "a", "a kernel that is compiled at run time writes nothing, and the test compares what"
    ),
    ("test_cuda.py", "TestCuda.test_cuda_graph_inference_mode"): REPLAY,
    ("test_cuda.py", "TestCuda.test_cuda_graph_raw_graph_reset*"): REPLAY,
    ("test_cuda.py", "TestMemPool.test_graph_capture_pre_capture_stream_use"): SLEEP,
    ("test_cuda.py", "TestCuda.test_host_memory_stats"): Reason(
        "f", "it expects that nothing was pinned before"
    ),
    ("test_cuda.py", "*.test_graph_external_wait_and_record_*"): SLEEP,
}
"""by file and test's name (a pattern)"""


def reason_of(path: str, name: str) -> Reason | None:
    """Return the reason of a test that fails, or None."""
    path = path.replace("_expandable_segments", "")  # the same tests, with another setting
    for (file, pattern), reason in REASONS.items():
        if file == path and fnmatchcase(name, pattern):
            return reason
    return None
