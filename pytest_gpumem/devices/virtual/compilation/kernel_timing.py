"""Inductor's and Triton's choices by time: kernels that compute nothing are not timed.

A GPU's first run, without Inductor's caches, times the configurations of each kernel: with a buffer
that flushes the GPU's cache, and with copies of what the kernel writes. A later run has the choice
from a cache and allocates none of it. Here all times are equal, so the first configuration is taken
and nothing is allocated: a step has the peak of a run with warm caches. What a GPU would allocate
is at the upper end of the step's range, in each test that runs such a kernel: in the first one of a
process and in a later one, with cold caches and with warm ones.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from contextvars import ContextVar
from time import time_ns
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from pytest_gpumem.devices.virtual.extra_requests import ExtraLog

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
    """Answers questions about times, and tells what a GPU allocates to answer them."""

    def __init__(self, extras: ExtraLog) -> None:
        self._extras = extras
        self._asked = False
        self._several: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
        """kernels that were to be timed in this process; of one of Triton's, with which keys"""
        self._told: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
        """those that this run has called"""
        self._key: ContextVar[Hashable] = ContextVar("key of a kernel of Triton's", default=None)

    def begin(self) -> None:
        """Forget the questions of the last run."""
        self._asked = False
        self._told.clear()

    def notes(self) -> list[str]:
        """Return sentences that a reader of the figures has to know about times."""
        return [NOT_TIMED] * self._asked

    def wrappers(self) -> Iterator[tuple[Patch, Callable[[Any], Any]]]:
        """Yield what is wrapped, and in what."""
        yield BENCHMARKS, self._untimed
        yield CHOICES, self._at_first
        yield LAUNCHES, self._at_each_launch
        yield COPIED, _copying_nothing
        yield BENCHES, self._benched_once
        yield TUNED_CALLS, self._at_each_call

    def _untimed(self, method: Any) -> Any:  # noqa: ANN401 - PyTorch's, and in its place
        def benchmark_gpu(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - PyTorch's
            if not is_shown():
                return method(*arguments, **options)
            self._asked = True
            return [TIME] if options.get("return_mode") == "all" else TIME

        return benchmark_gpu

    # -- Inductor's kernels --

    def _at_first(self, choose: Any) -> Any:  # noqa: ANN401 - a method of PyTorch's
        def chosen(tuner: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's
            if is_shown():
                self._several.setdefault(tuner, set())
                self._tell(tuner, lambda: inductors_copies(tuner, args, kwargs), flushed)
            return choose(tuner, *args, **kwargs)

        return chosen

    def _at_each_launch(self, run: Any) -> Any:  # noqa: ANN401 - a method of PyTorch's
        def launched(tuner: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - PyTorch's
            if tuner in self._several and tuner not in self._told and is_shown():
                self._tell(tuner, lambda: inductors_copies(tuner, args, kwargs), flushed)
            return run(tuner, *args, **kwargs)

        return launched

    # -- kernels that a program tunes by Triton --

    def _benched_once(self, bench: Any) -> Any:  # noqa: ANN401 - Triton's, and in its place
        """Have each configuration called once: one with too much shared memory is never picked."""

        def call_once(kernel_call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
            kernel_call()
            return [TIME] * len(quantiles)

        def untimed(tuner: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - Triton's
            if not is_shown():
                return bench(tuner, *arguments, **options)
            key = self._key.get()
            self._several.setdefault(tuner, set()).add(key)
            self._tell(
                tuner, lambda: tritons_copies(tuner, arguments, options), tritons_buffer, key
            )
            with ExitStack() as stack:
                BENCH.on(tuner, "do_bench", call_once, stack)
                # Nothing is written, so nothing is restored: the copies would stay in the cache.
                BENCH.on(tuner, "restore_value", [], stack)
                return bench(tuner, *arguments, **options)

        return untimed

    def _at_each_call(self, run: Any) -> Any:  # noqa: ANN401 - a method of Triton's
        def called(tuner: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Triton's
            if len(getattr(tuner, "configs", ())) < 2 or not is_shown():  # noqa: PLR2004 - a choice
                return run(tuner, *args, **kwargs)
            key = tritons_key(tuner, args, kwargs)
            if key in self._several.get(tuner, ()):
                self._tell(tuner, lambda: tritons_copies(tuner, args, kwargs), tritons_buffer, key)
            token = self._key.set(key)
            try:
                return run(tuner, *args, **kwargs)
            finally:
                self._key.reset(token)

        return called

    # -- both --

    def _tell(
        self,
        tuner: Any,  # noqa: ANN401 - of either
        copies: Callable[[], list[int]],
        buffer: Callable[[], int],
        key: Hashable = None,
    ) -> None:
        """Tell once a run what a GPU allocates to time a kernel."""
        keys = self._told.setdefault(tuner, set())
        if key not in keys:
            keys.add(key)
            self._asked = True
            ended = time_ns() / 1000
            self._extras.add(TIMED, timed(copies(), buffer()), (ended, ended), counted=False)


def timed(called: Sequence[int], buffer: int) -> list[int]:
    """Return the requests by which a call is timed, as :class:`ExtraRequests` has them.

    It is called before there is a buffer: to find out whether it can be.
    """
    blocks = [size for size in called if size]
    given_back = [0] * len(blocks)
    return [*blocks, *given_back, buffer, *blocks, *given_back, 0]


def inductors_copies(tuner: Any, args: Any, kwargs: Any) -> list[int]:  # noqa: ANN401 - a CachingAutotuner, its kernel's arguments
    """Return the bytes of each copy that Inductor makes of a kernel's outputs.

    Where memory matters (in inference and in a backward pass), it makes none that would raise the
    peak of the process, and copies to the host instead.
    """
    import torch

    named = [*zip(tuner.fn.arg_names, args, strict=False), *kwargs.items()]
    budget = float("inf")
    if getattr(tuner, "optimize_mem", False):
        budget = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    copies = []
    for name, tensor in named:
        if name in tuner.mutated_arg_names and isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            size = extent(tensor.shape, tensor.stride()) * tensor.element_size()
            if size <= budget:
                budget -= size
                copies.append(size)
    return copies


def tritons_copies(tuner: Any, args: Any, kwargs: Any) -> list[int]:  # noqa: ANN401 - an Autotuner, its kernel's arguments
    """Return the bytes of each tensor that is to be restored after each time."""
    import torch

    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    tensors = [named.get(name) for name in getattr(tuner, "restore_value", ())]
    return [
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda
    ]


def tritons_key(tuner: Any, args: Any, kwargs: Any) -> Hashable:  # noqa: ANN401 - an Autotuner, its kernel's arguments
    """Return the key of a kernel's choice in Triton's cache: as Autotuner.run has it."""
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    mine = {name: value for name, value in named.items() if name in tuner.arg_names}
    values: Iterator[Any] = (mine[name] for name in tuner.keys if name in mine)
    types = (str(value.dtype) for value in mine.values() if hasattr(value, "dtype"))
    return (*values, *types)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last."""
    if not all(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def tritons_buffer() -> int:
    """Return the bytes of the buffer by which Triton flushes a GPU's cache."""
    return FLUSHED


def flushed() -> int:
    """Return the bytes of the buffer by which Inductor flushes a GPU's cache."""
    import torch

    benchmarker = getattr(sys.modules.get(BENCHMARKS.module), "benchmarker", None)
    if not hasattr(type(benchmarker), L2_SIZE):
        return FLUSHED
    return int(getattr(torch.cuda.get_device_properties(), L2_SIZE, 0)) // 4 * 4 or FLUSHED


def _copying_nothing(copy: Any) -> Any:  # noqa: ANN401 - a method of PyTorch's
    """Save no arguments from kernels that are not run."""
    return lambda *arguments, **options: {} if is_shown() else copy(*arguments, **options)


def is_shown() -> bool:
    """Return whether the virtual GPU is shown: a process that has it times no other."""
    import torch

    return torch.cuda.is_available()
