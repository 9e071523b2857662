"""What is allocated after each step of a test, and who refers to what makes it grow."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.attribution.recording import now
from pytest_gpumem.attribution.referrers import holders, live_tensors, place_of
from pytest_gpumem.step_growth import WARM, growth

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from pytest_gpumem.measurement import Holder

LOOKS: Final = 2
"""how often it is asked who refers to what grows, at most"""


class Steps:
    """The ends of a test's steps.

    A step ends with a step of the optimizer that stepped first, or where the test says so: then
    only there. Garbage is collected each time, so that only what somebody refers to is counted.
    """

    def __init__(self, allocated: Callable[[], list[int]]) -> None:
        """Read what is allocated, in bytes, one figure a device, by a call."""
        self._read = allocated
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.allocated: list[list[int]] = []
        """after each step, one figure a device"""
        self.times: list[float] = []
        """when each ended: microseconds since 1970"""
        self.holders: tuple[Holder, ...] = ()
        """who refers to tensors that came with a step and outlived the next"""
        self._told = False
        self._first: weakref.ref[Optimizer] | None = None
        self._known: dict[int, weakref.ref[Tensor]] = {}
        """tensors that there were after the first steps"""
        self._fresh: list[tuple[int, weakref.ref[Tensor]]] = []
        """tensors that came later, with the number of the step"""
        self._looks = 0

    def mark(self) -> None:
        """End a step, as the test says."""
        if not self._told:
            self.forget()
            self._told = True
        self._end()

    def stepped(self, optimizer: Optimizer) -> None:
        """End a step, if this is the optimizer that stepped first."""
        if self._told:
            return
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self._end()

    def _end(self) -> None:
        gc.collect()
        self.allocated.append(self._read())
        self.times.append(now())
        number = len(self.allocated) - 1
        if number < WARM or self._looks == LOOKS:
            return
        if number == WARM:
            self._known = {id(it): weakref.ref(it) for it in live_tensors()}
            return
        if not self.grows:
            return
        stayed = [it for born, ref in self._fresh if born < number and (it := ref()) is not None]
        self._note_fresh(number)  # before the look, which has the collector forget them
        blocks = {place_of(it): it.untyped_storage().nbytes() for it in stayed}
        stayed.clear()
        if blocks:
            self.holders = holders(blocks)
            self._looks += 1

    @property
    def grows(self) -> bool:
        """Whether any device's memory has grown so far."""
        return any(growth(one) is not None for one in self.by_device())

    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """Return what was allocated after each step, for each device."""
        return tuple(zip(*self.allocated, strict=True))

    def _note_fresh(self, number: int) -> None:
        seen = {id(it) for _, ref in self._fresh if (it := ref()) is not None}
        for tensor in live_tensors():
            known: Any = self._known.get(id(tensor))
            if id(tensor) not in seen and (known is None or known() is not tensor):
                self._fresh.append((number, weakref.ref(tensor)))
