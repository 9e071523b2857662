"""The operators that run on a thread, and those of which the operators inside are seen."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pytest_gpumem.devices.virtual.values.host_tensors import extents_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.values.operators import OperatorCall


class OpenOperator:
    """An operator that runs, of which the operators inside are seen."""

    def __init__(
        self, library: NativeLibrary, call: OperatorCall, outer: OpenOperator | None
    ) -> None:
        self._library = library
        self._outer = outer
        self._in_python = call.traits.in_python
        self._writes = library.thread_writes()
        self._arguments = [*extents_of(call.inputs())]
        self._targets = [*extents_of(call.written())]
        self._written: list[tuple[int, int]] = []
        """addresses that operators inside wrote, from and to, since it ran a kernel of its own"""

    def told(self) -> list[tuple[int, int]]:
        """Return the addresses of sure values, from and to."""
        return self._arguments + self._written

    def begin_inner(self, inputs: Sequence[Tensor] = ()) -> None:
        """Make the values unknown that kernels of its own may have written.

        These are all that were written before, arguments that it changes, and memory that it took
        by itself, where an earlier tensor's values may lie.

        Args:
            inputs: of an operator inside that begins.
        """
        forget = self._library.forget
        if self._library.thread_writes() != self._writes:
            for start, end in (*self._written, *self._targets):
                forget(start, end - start)
            self._written.clear()
            self._writes = self._library.thread_writes()
        for start, end in () if self._in_python else extents_of(inputs):
            if not self._tells(start, end):
                forget(start, end - start)

    def end_inner(self, call: OperatorCall, result: object) -> None:
        """Note the memory that an operator inside has written."""
        self._writes = self._library.thread_writes()
        self._written += extents_of([*tensors_in(result), *call.written()])

    def _tells(self, start: int, end: int) -> bool:
        """Return whether the values of some addresses are sure."""
        if any(first <= start and end <= last for first, last in self.told()):
            return True
        return self._outer is not None and self._outer._tells(start, end)


class RunningHere(threading.local):
    """The operators that run on this thread."""

    def __init__(self) -> None:
        self.compiled: Callable[[OperatorCall], bool] | None = None
        """prepares compiled code that runs for an operator inside (compilation/graph_values.py has
        its values); False: nothing that the operator reads decides"""
        self.opened: OpenOperator | None = None
        """the innermost one that runs of which the operators inside are seen"""
        self.count = -1
        """that such a one will read, where it is known"""
