"""Computes values on the virtual GPU, and reports branches on values that are not computed."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from pytest_gpumem.devices.base import ValueEngine, Values
from pytest_gpumem.devices.virtual.compilation.recompile_limits import RecompileLimits
from pytest_gpumem.devices.virtual.decisions import Decisions
from pytest_gpumem.devices.virtual.uncertain_numbers import watching

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_gpumem.devices.virtual import GuessRows
    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.values.mode import ValueMode


class VirtualValues(ValueEngine):
    """Computes values on the host, as each run requests."""

    initial: Values = "off"
    """which values are computed from the start of a run"""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._decisions = Decisions(library.set_endless)
        self._recompile_limits = RecompileLimits()
        self._mode: ValueMode | None = None
        """the mode that computes values; None if none are computed"""
        self._kept_mode: ValueMode | None = None
        """the process's only mode, kept because it knows the values of fixtures that several tests
        share; None before any values have been computed"""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch runs in the block; ``restart`` begins each run."""
        with watching(self._decisions, self._library):
            try:
                yield
            finally:
                self.compute("off")
                self._recompile_limits.end()

    def restart(self) -> None:
        """Begin a run: compute the values that ``initial`` selects."""
        self._recompile_limits.end()
        self.compute(self.initial)

    def guesses(self) -> tuple[GuessRows, Sequence[str]]:
        """Return the uncomputed values that a program branched on, and why they are unknown."""
        return self._decisions.rows(), self._mode.notes() if self._mode else ()

    @staticmethod
    def guess_notes(processes: Iterable[GuessRows], root: Path) -> list[str]:
        """Return sentences on the unknown and assumed values that child processes branched on."""
        decisions = Decisions()
        for rows in processes:
            decisions.add(rows)
        return decisions.notes(root)

    @property
    def all_computed(self) -> bool:
        """See :attr:`pytest_gpumem.devices.base.ValueEngine.all_computed`."""
        return self._mode is not None and self._mode.host.full

    @property
    def lost_to_kernels(self) -> bool:
        """See :attr:`pytest_gpumem.devices.base.ValueEngine.lost_to_kernels`."""
        return self._mode is not None and self._mode.host.lost_to_kernels

    def compute(self, scope: Values) -> None:
        """See :meth:`pytest_gpumem.devices.base.ValueEngine.compute`."""
        if self._mode is not None:
            self._mode.__exit__()
            self._mode = None
        self._decisions.clear()
        self._recompile_limits.begin(values=scope != "off")
        if scope != "off":
            self._mode = self._lasting_mode()
            self._mode.host.full = scope == "full"
            self._mode.__enter__()

    def _lasting_mode(self) -> ValueMode:
        if self._kept_mode is None:
            from pytest_gpumem.devices.virtual.values.mode import ValueMode

            self._kept_mode = ValueMode(self._library, decisions=self._decisions)
        return self._kept_mode

    @contextmanager
    def computing_separately(self) -> Iterator[None]:
        """Compute values in a block of PyTorch's own code, outside of any test's budget.

        Values are computed even if a run requests none, and even while PyTorch traces.
        """
        from pytest_gpumem.devices.virtual.values.interception import seen_while_tracing

        with ExitStack() as stack:
            if self._mode is not None:
                stack.enter_context(self._mode.host.separately())
            else:
                mode = self._lasting_mode()
                mode.host.full = False
                stack.enter_context(mode)
            stack.enter_context(seen_while_tracing())
            yield

    def renew(self) -> None:
        """See :meth:`pytest_gpumem.devices.base.ValueEngine.renew`."""
        if self._mode is not None:
            self._mode.host.renew()

    def separately(self) -> AbstractContextManager[None]:
        """See :meth:`pytest_gpumem.devices.base.ValueEngine.separately`."""
        return nullcontext() if self._mode is None else self._mode.host.separately()

    def has_guessed(self, *, failed: bool = False) -> bool:
        """See :meth:`pytest_gpumem.devices.base.ValueEngine.has_guessed`."""
        return any(self._decisions.counts) or (failed and self._decisions.any_read)

    def bounds(self, root: Path) -> str:
        """See :meth:`pytest_gpumem.devices.base.ValueEngine.bounds`."""
        return self._decisions.bounds_named(root)

    @contextmanager
    def least_sizes(self) -> Iterator[None]:
        """See :meth:`pytest_gpumem.devices.base.ValueEngine.least_sizes`."""
        assert self._mode is not None  # noqa: S101 - upper bounds come from the mode
        assumptions = self._mode.host.assumptions
        assumptions.least_sizes = True
        try:
            yield
        finally:
            assumptions.least_sizes = False

    def assume_masks(self, share: float) -> None:
        """See :meth:`pytest_gpumem.devices.base.ValueEngine.assume_masks`."""
        if self._mode is not None:
            assumptions = self._mode.host.assumptions
            assumptions.masks, assumptions.masks_declared = share, True

    def notes(self, root: Path) -> list[str]:
        """Return sentences on unknown values that a program read, and on why they are unknown.

        File names are relative to ``root``.
        """
        of_mode = self._mode.notes() if self._mode else ()
        return [*self._decisions.notes(root), *of_mode]
