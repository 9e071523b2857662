"""Inductor's and Triton's choices by time: kernels that compute nothing are not timed.

A GPU's first run, without Inductor's caches, times the configurations of each kernel: with a buffer
that flushes the GPU's cache, and with copies of what the kernel writes. A later run has the choice
from a cache and allocates none of it. Here all times are equal, so the first configuration is taken
and nothing is allocated: a step has the peak of a run with warm caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.virtual.compilation.replacement import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

BENCHMARKS: Final = "torch._inductor.runtime.benchmarking"
"""PyTorch's module with the classes that time kernels"""
AUTOTUNER: Final = "torch._inductor.runtime.triton_heuristics"
"""PyTorch's module with the class that picks one of a kernel's configurations"""
TRITON: Final = "triton.runtime.autotuner"
"""Triton's module with the class that picks a configuration of an autotuned kernel"""
PADDING: Final = "torch._inductor.fx_passes.pad_mm"
"""PyTorch's module that pads the operands of matrix products where that was faster"""
TIME: Final = 1.0
"""milliseconds that each kernel takes"""
NOT_TIMED: Final = (
    "a GPU's first run times kernels: a buffer of up to 256.00 MiB and copies of what the kernels "
    "write are not counted, because runs with warm caches have none"
)
NOT_PADDED: Final = (
    "torch.compile pads the operands of a matrix product if a GPU is faster with padding: the "
    "virtual GPU pads none, so the memory of padded copies is not predicted"
)


class KernelTiming:
    """Answers Inductor's questions about times."""

    def __init__(self) -> None:
        self._asked = False
        self._asked_for_padding = False

    def begin(self) -> None:
        """Forget the questions of the last run."""
        self._asked = self._asked_for_padding = False

    def notes(self) -> list[str]:
        """Return sentences that a reader of the figures has to know about times."""
        return [NOT_TIMED] * self._asked + [NOT_PADDED] * self._asked_for_padding

    def time_nothing(self, module: ModuleType) -> None:
        """Have all kernels take as long; ``module`` is :data:`BENCHMARKS`, just imported."""
        for benchmarker in vars(module).values():
            if isinstance(benchmarker, type):
                replace(benchmarker, "benchmark_gpu", self._untimed)

    def _untimed(self, method: Any) -> Any:  # noqa: ANN401 - PyTorch's, and in its place
        def benchmark_gpu(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - PyTorch's
            if not is_shown():
                return method(*arguments, **options)
            self._asked = True
            return [TIME] if options.get("return_mode") == "all" else TIME

        return benchmark_gpu

    def time_no_autotuned_kernel(self, module: ModuleType) -> None:
        """Have configurations that can run take as long; ``module`` is :data:`TRITON`.

        Each is compiled and called once: one that takes too much shared memory is never picked.
        """
        replace(getattr(module, "Autotuner", None), "_bench", self._benched_once)

    def _benched_once(self, bench: Any) -> Any:  # noqa: ANN401 - Triton's, and in its place
        def call_once(kernel_call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
            kernel_call()
            return [TIME] * len(quantiles)

        def untimed(tuner: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - Triton's
            if not is_shown():
                return bench(tuner, *arguments, **options)
            self._asked = True
            own = vars(tuner).get("do_bench")
            tuner.do_bench = call_once
            try:
                return bench(tuner, *arguments, **options)
            finally:
                del tuner.do_bench
                if own is not None:
                    tuner.do_bench = own

        return untimed

    @staticmethod
    def copy_nothing(module: ModuleType) -> None:
        """Save no arguments from kernels that are not run; ``module`` is :data:`AUTOTUNER`."""

        def make(copy: Any) -> Any:  # noqa: ANN401 - a method of PyTorch's
            return lambda *arguments, **options: {} if is_shown() else copy(*arguments, **options)

        replace(getattr(module, "CachingAutotuner", None), "copy_args_to_cpu_if_needed", make)

    def pad_nothing(self, module: ModuleType) -> None:
        """Answer that padding is not faster; ``module`` is :data:`PADDING`, just imported.

        PyTorch asks a cache on the disk first, which may have a real GPU's answers, and makes
        operands of full size next.
        """
        replace(module, "get_cached_should_pad", self._unpadded)

    def _unpadded(self, look_up: Any) -> Any:  # noqa: ANN401 - PyTorch's, and in its place
        def get_cached_should_pad(key: str) -> Any:  # noqa: ANN401 - PyTorch's
            if not is_shown():
                return look_up(key)
            self._asked_for_padding = True
            return False

        return get_cached_should_pad


def is_shown() -> bool:
    """Return whether the virtual GPU is shown: a process that has it times no other."""
    import torch

    return torch.cuda.is_available()
