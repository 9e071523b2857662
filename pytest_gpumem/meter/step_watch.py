"""Memory allocated after each step of a test, and the objects that make it grow."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.attribution.plain_tensors import place_of
from pytest_gpumem.attribution.recording import now
from pytest_gpumem.attribution.referrers import holders, live_tensors
from pytest_gpumem.step_growth import WARM, growth

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from pytest_gpumem.measurement import Holder

MAX_SEARCHES: Final = 2
"""searches for the objects that refer to growing memory: each walks all that Python holds"""


class Steps:
    """The ends of a test's steps.

    A step ends with a step of the optimizer that stepped first; in a test that marks the ends
    itself, only there. Garbage is collected each time, so that only memory in use is counted.
    """

    def __init__(self, allocated: Callable[[], list[int]]) -> None:
        """Watch; ``allocated`` returns the bytes that are allocated now, one figure a device."""
        self._allocated_now = allocated
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.allocated: list[list[int]] = []
        """bytes after each step, one figure a device"""
        self.times: list[float] = []
        """the end of each step: microseconds since 1970"""
        self.holders: tuple[Holder, ...] = ()
        """objects that refer to tensors which came with a step and outlived the next"""
        self._marked_by_test = False
        self._first: weakref.ref[Optimizer] | None = None
        self._lasting: dict[int, weakref.ref[Tensor]] = {}
        """tensors alive after the first steps"""
        self._fresh: list[tuple[int, weakref.ref[Tensor]]] = []
        """tensors that came later, with the number of the step"""
        self._searches = 0

    def mark(self) -> None:
        """End a step where the test marks its end."""
        if not self._marked_by_test:
            self.forget()
            self._marked_by_test = True
        self._end()

    def stepped(self, optimizer: Optimizer) -> None:
        """End a step, if this is the optimizer that stepped first."""
        if self._marked_by_test:
            return
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self._end()

    def _end(self) -> None:
        gc.collect()
        self.allocated.append(self._allocated_now())
        self.times.append(now())
        number = len(self.allocated) - 1
        if number < WARM or self._searches == MAX_SEARCHES:
            return
        if number == WARM:
            self._lasting = {id(tensor): weakref.ref(tensor) for tensor in live_tensors()}
            return
        if not self.grows:
            return
        tensors = ((birth, reference()) for birth, reference in self._fresh)
        outlived = [tensor for birth, tensor in tensors if birth < number and tensor is not None]
        # Before the search for holders, which has the collector forget what is fresh.
        self._note_fresh(number)
        blocks = {place_of(tensor): tensor.untyped_storage().nbytes() for tensor in outlived}
        outlived.clear()  # the search must not see this list among the holders
        if blocks:
            self.holders = holders(blocks)
            self._searches += 1

    def _note_fresh(self, number: int) -> None:
        """Note the tensors that this step made."""
        # A function of its own: its local variables end here. Those of a frame that runs while
        # holders are searched would keep a tensor alive, which the next step then counts.
        noted = {id(tensor) for _, reference in self._fresh if (tensor := reference()) is not None}
        for tensor in live_tensors():
            lasting: Any = self._lasting.get(id(tensor))
            if id(tensor) not in noted and (lasting is None or lasting() is not tensor):
                self._fresh.append((number, weakref.ref(tensor)))

    @property
    def grows(self) -> bool:
        """Whether any device's memory has grown so far."""
        return any(growth(allocated) is not None for allocated in self.by_device())

    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """Return the bytes allocated after each step, for each device."""
        return tuple(zip(*self.allocated, strict=True))
