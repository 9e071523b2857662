"""``torch.compile`` on the virtual GPU: as on a GPU, but no kernel is selected by timing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.virtual.compilation import (
    compiled_code,
    compiled_values,
    kernel_timing,
    max_autotune,
    numbers_before_torch_2_13,
    padded_products,
    triton_launches,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from pytest_gpumem.devices.virtual.gpu_choices import GpuChoices
    from pytest_gpumem.patches import Patch


class Compilation:
    """Watches compilation and the compiled code that runs."""

    def __init__(
        self, computing: Callable[[], AbstractContextManager[None]], gpu_choices: GpuChoices
    ) -> None:
        """Create the objects that watch the compiler.

        Args:
            computing: returns a context manager in which values are computed.
            gpu_choices: collects the extra blocks that a GPU may allocate.
        """
        self._computing = computing
        self._max_autotune = max_autotune.MaxAutotuneSwitch()
        self._kernel_timing = kernel_timing.KernelTiming(gpu_choices)
        self._products = padded_products.PaddedProducts(gpu_choices)
        self._compiled_code = compiled_code.CompiledCode()

    def install(self) -> None:
        """Register hooks for the imports of PyTorch's compiler."""
        IMPORTS.call_after(max_autotune.COMPILATION.module, self._max_autotune.install)
        IMPORTS.call_after(
            numbers_before_torch_2_13.TRACED.module, numbers_before_torch_2_13.trace_numbers
        )
        wrappers: tuple[tuple[Patch, Callable[[Any], Any]], ...] = (
            *self._kernel_timing.wrappers(),
            *self._compiled_code.wrappers(),
            *compiled_values.WRAPPERS,
            *self._products.wrappers(),
            (compiled_values.FOLDING, partial(compiled_values.with_constants, self._computing)),
            (triton_launches.LAUNCHES, triton_launches.launch_tracked),
        )
        for patch, make in wrappers:
            IMPORTS.call_after(patch.module, partial(patch.wrap, make=make))

    def begin(self) -> None:
        """Start recording a run."""
        for part in (self._max_autotune, self._kernel_timing, self._products, self._compiled_code):
            part.begin()

    def notes(self) -> list[str]:
        """Return sentences on the run: what was skipped, and that its figures are less certain."""
        return [*self._max_autotune.notes(), *self._compiled_code.notes()]

    def timing_notes(self) -> list[str]:
        """Return sentences on kernels that a GPU times."""
        return [*self._kernel_timing.notes(), *self._products.notes()]
