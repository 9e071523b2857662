"""Inductor's and Triton's choices by time: kernels that compute nothing are not timed.

A GPU's first run, without Inductor's caches, times the configurations of each kernel: with a buffer
that flushes the GPU's cache, and with copies of what the kernel writes. A later run has the choice
from a cache and allocates none of it. Here all times are equal, so the first configuration is taken
and nothing is allocated: a step has the peak of a run with warm caches. What a GPU would allocate
is at the upper end of the step's range, in each test that runs such a kernel: in the first one of a
process and in a later one, with cold caches and with warm ones.

Each kernel's blocks are told with their moment, because the allocator's cache serves one kernel's
after another's: a sum of all of them is hundreds of times what a GPU reserves besides.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from time import time_ns
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet

from pytest_gpumem.devices.virtual.compilation.compiled_code import preceded_by
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.devices.virtual.workspace_sizes import VirtualWorkspaces

BENCHMARKS: Final = Patch(
    "torch._inductor.runtime.benchmarking",
    "*.benchmark_gpu",
    reason="kernels that compute nothing are not timed: all take as long",
)
CHOICES: Final = Patch(
    "torch._inductor.runtime.triton_heuristics",
    "CachingAutotuner.autotune_to_one_config",
    reason="what a GPU takes to time a kernel's configurations is in the range of peaks",
)
LAUNCHES: Final = Patch(
    CHOICES.module,
    "CachingAutotuner.run",
    reason="a run that has the choice from a cache has the same range of peaks",
)
COPIED: Final = Patch(
    CHOICES.module,
    "CachingAutotuner.copy_args_to_cpu_if_needed",
    reason="arguments are not saved from kernels that do not run",
)
BENCHES: Final = Patch(
    "triton.runtime.autotuner",
    "Autotuner._bench",
    reason="each configuration of a Triton kernel is called once, and all take as long",
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
"""milliseconds that each kernel takes"""
FLUSHED: Final = 256 << 20
"""bytes of the buffer in triton.testing.do_bench"""
L2_SIZE: Final = "L2_cache_size"
"""what newer versions of PyTorch take for it: a property of a GPU, and of the class that times"""
TIMED: Final = "kernels that torch.compile or Triton times in a first run"
NOT_TIMED: Final = (
    "a GPU's first run times kernels: a buffer of up to 256.00 MiB and copies of what the kernels "
    "write are not counted, because runs with warm caches have none"
)


class KernelTiming:
    """Answers questions about times, and tells the memory that a GPU allocates for them."""

    def __init__(self, workspaces: VirtualWorkspaces) -> None:
        self._workspaces = workspaces
        self._asked = False
        self._timed: WeakSet[Any] = WeakSet()
        """kernels of Inductor's that were to be timed in this process"""
        self._told: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """kernels to time that this run has called, with the bytes of the largest copies of each"""

    def begin(self) -> None:
        """Forget the questions of the last run."""
        self._asked = False
        self._told.clear()

    def notes(self) -> list[str]:
        """Return sentences that a reader of the figures has to know about times."""
        return [NOT_TIMED] * self._asked

    def wrappers(self) -> Iterator[tuple[Patch, Callable[[Any], Any]]]:
        """Yield the functions that are wrapped, with their wrappers."""
        yield BENCHMARKS, wrapped_by(self._benchmark)
        yield CHOICES, preceded_by(self._see_choice)
        yield LAUNCHES, preceded_by(self._see_launch)
        yield (
            COPIED,
            lambda copy: lambda *args, **options: {} if is_shown() else copy(*args, **options),
        )
        yield BENCHES, wrapped_by(self._bench_once)
        yield TUNED_CALLS, preceded_by(self._see_tuned_call)

    def _benchmark(self, method: Any, *arguments: Any, **options: Any) -> Any:
        if not is_shown():
            return method(*arguments, **options)
        self._asked = True
        return [TIME] if options.get("return_mode") == "all" else TIME

    # -- Inductor's kernels --

    def _see_choice(self, tuner: Any, *args: Any, **kwargs: Any) -> None:
        if is_shown():
            self._timed.add(tuner)
            self._see_launch(tuner, *args, **kwargs)

    def _see_launch(self, tuner: Any, *args: Any, **kwargs: Any) -> None:
        """Tell a kernel's memory by its first call in a run, whose configuration is kept."""
        if tuner in self._timed and tuner not in self._told and is_shown():
            self._tell(tuner, inductors_copies(tuner, args, kwargs), flushed())

    # -- kernels that a program tunes by Triton --

    @staticmethod
    def _bench_once(bench: Any, tuner: Any, *arguments: Any, **options: Any) -> Any:
        """Call each configuration once: one with too much shared memory is never picked."""

        def call_once(kernel_call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
            kernel_call()
            return [TIME] * len(quantiles)

        with ExitStack() as stack:
            if is_shown():
                BENCH.on(tuner, "do_bench", call_once, stack)
                # Nothing is written, so nothing is restored: the copies would stay in the cache.
                BENCH.on(tuner, "restore_value", [], stack)
            return bench(tuner, *arguments, **options)

    def _see_tuned_call(self, tuner: Any, *args: Any, **kwargs: Any) -> None:
        if len(getattr(tuner, "configs", ())) > 1 and is_shown():
            # Triton keeps a choice by arguments of the call: each call may be a first one.
            self._tell(tuner, tritons_copies(tuner, args, kwargs), FLUSHED)

    # -- both --

    def _tell(self, tuner: Any, copies: list[int], buffer: int) -> None:
        """Tell the memory that timing a kernel takes, if a run has told no more of this kernel."""
        if sum(copies) > self._told.get(tuner, -1):
            self._told[tuner] = sum(copies)
            self._asked = True
            add_timed(self._workspaces, copies, buffer)


def add_timed(
    workspaces: VirtualWorkspaces, called: Sequence[int], buffer: int, held: Sequence[int] = ()
) -> None:
    """Add the blocks that a GPU takes to time a call.

    Args:
        workspaces: takes them.
        called: bytes of each block that the call takes.
        buffer: bytes of the one that flushes the GPU's cache.
        held: bytes of blocks that exist meanwhile.
    """
    # The call is made before there is a buffer: to find out whether it can be.
    time = time_ns() / 1000
    workspaces.add(TIMED, [*held, *called], (time, time), counted=False)
    workspaces.add(TIMED, [*held, buffer, *called], (time + 1, time + 1), counted=False)


def inductors_copies(tuner: Any, args: Any, kwargs: Any) -> list[int]:
    """Return the bytes of each copy that Inductor may make of a kernel's outputs.

    Where memory matters (in inference and in a backward pass), it copies to the host what would
    raise the peak of the process: that peak has the buffers of kernels that were timed before.
    """
    import torch

    named = [*zip(tuner.fn.arg_names, args, strict=False), *kwargs.items()]
    return [
        extent(tensor.shape, tensor.stride()) * tensor.element_size()
        for name, tensor in named
        if name in tuner.mutated_arg_names and isinstance(tensor, torch.Tensor) and tensor.is_cuda
    ]


def tritons_copies(tuner: Any, args: Any, kwargs: Any) -> list[int]:
    """Return the bytes of each tensor that is to be restored after each time."""
    import torch

    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    tensors = [named.get(name) for name in getattr(tuner, "restore_value", ())]
    return [
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda
    ]


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last."""
    if not all(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def flushed() -> int:
    """Return the bytes of the buffer by which Inductor flushes a GPU's cache."""
    import torch

    benchmarker = getattr(sys.modules.get(BENCHMARKS.module), "benchmarker", None)
    if not hasattr(type(benchmarker), L2_SIZE):
        return FLUSHED
    return int(getattr(torch.cuda.get_device_properties(), L2_SIZE, 0)) // 4 * 4 or FLUSHED


def is_shown() -> bool:
    """Return whether the virtual GPU is shown: a process that has it times no other."""
    import torch

    return torch.cuda.is_available()
