"""Replaces the timing of kernels in Inductor and Triton, because kernels compute nothing here.

A GPU's first run, without Inductor's caches, times the configurations of each kernel: with a buffer
that flushes the GPU's cache, and with copies of what the kernel writes. A later run loads the
choice from a cache and allocates neither. Here all times are equal, so the first configuration is
selected and nothing is allocated: a step has the peak of a run with warm caches. The upper bound of
the step's range includes what a GPU would allocate. This holds for each test that runs such a
kernel, whether or not it is the first in its process, with cold and with warm caches.

In a server's profiling run this memory is allocated, because the server reads its peak from
PyTorch: vLLM 0.19's first start of CodeLlama-7b on an H100 takes 0.77 GiB of activations, and 0.72
without the buffer. Inductor's kernels are timed there only if this process has compiled them: a GPU
finds the choices of an earlier start in the cache.

Each kernel's blocks are reported with the time at which a GPU would allocate them, because the
allocator's cache reuses one kernel's memory for the next: the sum of all blocks is hundreds of
times what a GPU reserves in addition.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from time import time_ns
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet

from pytest_gpumem.devices.servers import WATCH
from pytest_gpumem.devices.virtual.compilation.compiled_code import preceded_by
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.devices.virtual.gpu_choices import GpuChoices

BENCHMARKS: Final = Patch(
    "torch._inductor.runtime.benchmarking",
    "*.benchmark_gpu",
    reason="kernels that compute nothing are not timed: all get the same time",
)
CHOICES: Final = Patch(
    "torch._inductor.runtime.triton_heuristics",
    "CachingAutotuner.autotune_to_one_config",
    reason="the memory that a GPU takes to time a kernel's configurations is in the range of peaks",
)
LAUNCHES: Final = Patch(
    CHOICES.module,
    "CachingAutotuner.run",
    reason="a run that has the choice from a cache has the same range of peaks",
)
COPIED: Final = Patch(
    CHOICES.module,
    "CachingAutotuner.copy_args_to_cpu_if_needed",
    reason="arguments need no copies, because the kernels that would overwrite them do not run",
)
GENERATED: Final = Patch(
    "torch._inductor.compile_fx",
    "fx_codegen_and_compile",
    reason="a server's start that finds all compiled code in a cache times no kernels",
)
BENCHES: Final = Patch(
    "triton.runtime.autotuner",
    "Autotuner._bench",
    reason="each configuration of a Triton kernel is called once, and all get the same time",
)
BENCH: Final = Patch(
    BENCHES.module,
    *("Autotuner.do_bench", "Autotuner.restore_value"),
    reason="nothing is written by a kernel that does not run, so nothing is restored",
)
TUNED_CALLS: Final = Patch(
    BENCHES.module,
    "Autotuner.run",
    reason="a run that calls a kernel which Triton times has a range of peaks",
)
TIME: Final = 1.0
"""milliseconds reported for each kernel"""
FLUSHED: Final = 256 << 20
"""bytes of the cache-flushing buffer in triton.testing.do_bench"""
L2_SIZE: Final = "L2_cache_size"
"""property of a GPU whose value newer versions of PyTorch use instead of FLUSHED; the benchmarking
class of these versions has an attribute of this name"""
KERNELS_TIMED: Final = "kernels that torch.compile or Triton times in a first run"
NOT_TIMED: Final = (
    "a GPU's first run times kernels: a buffer of up to 256.00 MiB and copies of what the kernels "
    "write are not counted, because runs with warm caches have none"
)


class KernelTiming:
    """Returns equal times for all kernels, and reports what a GPU allocates to measure them."""

    def __init__(self, gpu_choices: GpuChoices) -> None:
        self._gpu_choices = gpu_choices
        self._was_timed = False
        self._has_compiled = False
        """whether Inductor has generated code in this process"""
        self._timed: WeakSet[Any] = WeakSet()
        """Inductor kernels for which this process requested times"""
        self._reported: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """for each kernel that a GPU would time in this run: the most bytes reported for its
        copies"""

    def begin(self) -> None:
        """Reset what the last run recorded."""
        self._was_timed = False
        self._reported.clear()

    def notes(self) -> list[str]:
        """Return sentences on timing that a reader of the figures needs."""
        return [NOT_TIMED] * self._was_timed

    def wrappers(self) -> Iterator[tuple[Patch, Callable[[Any], Any]]]:
        """Yield the functions to wrap, with their wrappers."""
        yield BENCHMARKS, wrapped_by(self._benchmark)
        yield CHOICES, preceded_by(self._see_choice)
        yield LAUNCHES, preceded_by(self._see_launch)
        yield GENERATED, preceded_by(self._see_code)
        yield COPIED, wrapped_by(self._copy_to_host)
        yield BENCHES, wrapped_by(self._bench_once)
        yield TUNED_CALLS, preceded_by(self._see_tuned_call)

    def _benchmark(self, method: Any, *arguments: Any, **options: Any) -> Any:
        if not is_shown():
            return method(*arguments, **options)
        if self._allocates():
            _, call, *_ = arguments
            call_with_buffer(call, flushed())
        else:
            self._was_timed = True
        return [TIME] if options.get("return_mode") == "all" else TIME

    def _copy_to_host(self, copy: Any, *arguments: Any, **options: Any) -> Any:
        return copy(*arguments, **options) if self._allocates() or not is_shown() else {}

    # -- Inductor's kernels --

    def _see_code(self, *_args: Any, **_kwargs: Any) -> None:
        self._has_compiled = True

    def _allocates(self) -> bool:
        """Return whether to allocate what a GPU takes to time kernels, or only to report it."""
        return WATCH.is_profiling and self._has_compiled

    def _see_choice(self, tuner: Any, *args: Any, **kwargs: Any) -> None:
        if is_shown() and not self._allocates():
            self._timed.add(tuner)
            self._see_launch(tuner, *args, **kwargs)

    def _see_launch(self, tuner: Any, *args: Any, **kwargs: Any) -> None:
        """Report the memory for timing a kernel, once per run, if its times were requested."""
        if tuner in self._timed and tuner not in self._reported and is_shown():
            self._report(tuner, inductors_copies(tuner, args, kwargs), flushed())

    # -- kernels that Triton's own autotuner times --

    @staticmethod
    def _bench_once(bench: Any, tuner: Any, *arguments: Any, **options: Any) -> Any:
        """Call each configuration once, so that one with too much shared memory is not selected."""

        def call_once(kernel_call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
            if WATCH.is_profiling:
                call_with_buffer(kernel_call, FLUSHED)
            else:
                kernel_call()
            return [TIME] * len(quantiles)

        with ExitStack() as stack:
            if is_shown():
                BENCH.on(tuner, "do_bench", call_once, stack)
                if not WATCH.is_profiling:
                    # Nothing is written, so there is nothing to restore, and the copies would stay
                    # in the cache.
                    BENCH.on(tuner, "restore_value", [], stack)
            return bench(tuner, *arguments, **options)

    def _see_tuned_call(self, tuner: Any, *args: Any, **kwargs: Any) -> None:
        if len(getattr(tuner, "configs", ())) > 1 and is_shown() and not WATCH.is_profiling:
            # Triton times the kernel at the first call with these arguments. Report each call, as
            # if it were that one: the choice may be cached from an earlier test.
            self._report(tuner, tritons_copies(tuner, args, kwargs), FLUSHED)

    # -- both --

    def _report(self, tuner: Any, copies: list[int], buffer: int) -> None:
        """Report the memory for timing a kernel, unless this run has reported as much for it."""
        if sum(copies) > self._reported.get(tuner, -1):
            self._reported[tuner] = sum(copies)
            self._was_timed = True
            add_timed(self._gpu_choices, copies, buffer)


def add_timed(
    gpu_choices: GpuChoices, called: Sequence[int], buffer: int, held: Sequence[int] = ()
) -> None:
    """Add the blocks that a GPU allocates to time a call.

    Args:
        gpu_choices: collects the blocks.
        called: bytes of each block that the call allocates.
        buffer: bytes of the buffer that flushes the GPU's cache.
        held: bytes of blocks that exist during the whole timing.
    """
    # The first call, a trial, comes before the buffer is allocated.
    time = time_ns() / 1000
    gpu_choices.add_blocks(KERNELS_TIMED, [*held, *called], (time, time), counted=False)
    gpu_choices.add_blocks(
        KERNELS_TIMED, [*held, buffer, *called], (time + 1, time + 1), counted=False
    )


def call_with_buffer(call: Callable[[], object], nbytes: int) -> None:
    """Call a kernel as if to time it: once for trial, once while the flushing buffer exists."""
    import torch

    call()
    buffer = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    call()
    del buffer


def inductors_copies(tuner: Any, args: Any, kwargs: Any) -> list[int]:
    """Return the bytes of each copy that Inductor may make of a kernel's outputs.

    To save memory in inference and in backward passes, Inductor copies outputs to the host instead,
    if copies on the GPU would raise the process's peak, which includes the buffers of kernels timed
    earlier.
    """
    import torch

    named = [*zip(tuner.fn.arg_names, args, strict=False), *kwargs.items()]
    return [
        extent(tensor.shape, tensor.stride()) * tensor.element_size()
        for name, tensor in named
        if name in tuner.mutated_arg_names and isinstance(tensor, torch.Tensor) and tensor.is_cuda
    ]


def tritons_copies(tuner: Any, args: Any, kwargs: Any) -> list[int]:
    """Return the bytes of each tensor that Triton restores after each timed call."""
    import torch

    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    tensors = [named.get(name) for name in getattr(tuner, "restore_value", ())]
    return [
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda
    ]


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements that a strided tensor spans."""
    if not all(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def flushed() -> int:
    """Return the bytes of the buffer with which Inductor flushes a GPU's cache."""
    import torch

    benchmarker = getattr(sys.modules.get(BENCHMARKS.module), "benchmarker", None)
    if not hasattr(type(benchmarker), L2_SIZE):
        return FLUSHED
    return int(getattr(torch.cuda.get_device_properties(), L2_SIZE, 0)) // 4 * 4 or FLUSHED


def is_shown() -> bool:
    """Return whether the virtual GPU is visible: then no real GPU is timed in this process."""
    import torch

    return torch.cuda.is_available()
