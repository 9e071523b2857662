"""``torch.compile`` on the virtual GPU: as on a GPU, but for kernels that are picked by time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.virtual.compilation import (
    compiled_code,
    compiled_numbers,
    compiled_values,
    constant_folding,
    earlier_graphs,
    kernel_timing,
    max_autotune,
    padded_products,
    triton_launches,
)
from pytest_gpumem.notes import NoteKind, notes_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import ModuleType

    from pytest_gpumem.devices.virtual.extra_requests import ExtraLog
    from pytest_gpumem.notes import Note


class Compilation:
    """The code that is compiled, and the compiled code that runs."""

    def __init__(
        self, computing: Callable[[], AbstractContextManager[None]], extras: ExtraLog
    ) -> None:
        """Make all that watches the compiler.

        Args:
            computing: makes a context manager in which values are computed.
            extras: is told what a GPU may request besides.
        """
        self._computing = computing
        self._max_autotune = max_autotune.MaxAutotuneSwitch()
        self._kernel_timing = kernel_timing.KernelTiming(extras)
        self._products = padded_products.PaddedProducts(extras)
        self._earlier_graphs = earlier_graphs.EarlierGraphs()
        self._compiled_code = compiled_code.CompiledCode()

    def install(self) -> None:
        """Wait for the imports of PyTorch's compiler."""
        for patch, install in (
            (max_autotune.COMPILATION, self._max_autotune.install),
            (kernel_timing.BENCHMARKS, self._kernel_timing.time_nothing),
            (kernel_timing.CHOICES, self._kernel_timing.watch_inductor),
            (kernel_timing.BENCHES, self._kernel_timing.watch_triton),
            (padded_products.KEYS, self._products.pad_nothing),
            (earlier_graphs.REPLAYS, self._earlier_graphs.install),
            (compiled_code.CALLS, self._compiled_code.install),
            (compiled_numbers.TRACED, compiled_numbers.trace_numbers),
            (compiled_values.COMPILES, compiled_values.keep_graphs),
            (compiled_values.CALLS, compiled_values.compute_graphs),
            (padded_products.COMPILED, self._products.keep_products),
            (padded_products.CODE_CALLS, self._products.watch_code),
            (constant_folding.FOLDING, self._compute_constants),
            (triton_launches.LAUNCHES, triton_launches.tell_launches),
        ):
            IMPORTS.call_after(patch.module, install)

    def _compute_constants(self, module: ModuleType) -> None:
        constant_folding.compute_constants(module, self._computing)

    def begin(self) -> None:
        """Begin to watch a run."""
        self._max_autotune.begin()
        self._kernel_timing.begin()
        self._products.begin()
        self._earlier_graphs.begin()
        self._compiled_code.begin()

    def notes(self) -> list[Note]:
        """Return notes on the run: what was left out, and that its figures are less sure."""
        parts = (self._max_autotune, self._earlier_graphs, self._compiled_code)
        sentences = [sentence for part in parts for sentence in part.notes()]
        of_time = [*self._kernel_timing.notes(), *self._products.notes()]
        return [*notes_of(NoteKind.COMPILATION, sentences), *notes_of(NoteKind.TIMING, of_time)]
