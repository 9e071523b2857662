"""Memory allocated after each step of a test, and memory that garbage in reference cycles holds.

Python's collector runs by the number of Python objects that were made, and that depends on the
modules and caches that earlier code loaded. So the moment at which such memory is freed, and with
it a peak, may differ between a test alone and the same test in a session.
"""

from __future__ import annotations

import gc
import weakref
from operator import add, sub
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.meter.allocator import collect_garbage
from pytest_gpumem.recording.collector import Uncounted, keep_for_reuse
from pytest_gpumem.recording.recording import now
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

FULL: Final = 2
"""the collector's oldest generation"""
MIN_SHARE: Final = 1000
"""garbage below this part of the peak, or below 1 MiB, is within the default tolerance"""


class GarbageWatch:
    """Sees how much device memory each collection frees."""

    def __init__(self, allocated: Callable[[], list[int]]) -> None:
        """Watch; ``allocated`` returns the bytes that are allocated now, one figure a device."""
        self._allocated = allocated
        self._at_start: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Forget the collections until now."""
        self.most = 0
        """bytes that the collection that freed most did free"""
        self.freed: list[int] = []
        """bytes that all collections freed, one figure a device; empty before the first one"""

    def start(self) -> None:
        """Watch from now on."""
        gc.callbacks.append(self._see)

    def stop(self) -> None:
        """Watch no longer."""
        if self._see in gc.callbacks:  # the step's code may have cleared the list
            gc.callbacks.remove(self._see)

    def _see(self, phase: str, info: dict[str, int]) -> None:
        with Uncounted():
            if phase == "start":
                self._at_start = self._allocated()
            else:
                freed = [*map(sub, self._at_start, self._allocated())]
                self.most = max(self.most, sum(freed))
                self.freed = [*map(add, self.freed or [0] * len(freed), freed)]
                if info["generation"] == FULL:
                    keep_for_reuse()

    def notes(self, peaks: Sequence[int]) -> list[str]:
        """Return a sentence about garbage that matters beside the peaks, in bytes."""
        if self.most < MIB or self.most * MIN_SHARE < max(peaks):
            return []
        sentence = (
            f"garbage in reference cycles kept {format_size(self.most)} until Python's "
            "garbage collector ran: the time of its run depends on all earlier code, so "
            "the peak may differ by this amount (break the cycle, or call gc.collect())"
        )
        return [sentence]


class StepEnd(NamedTuple):
    """The end of a step; bytes, one figure a device."""

    time: float
    """microseconds since 1970"""
    allocated: tuple[int, ...]
    freed: tuple[int, ...]
    """by Python's garbage collector since the test began"""


class Steps:
    """The ends of a test's steps.

    A step ends with a step of the optimizer that stepped first; in a test that marks the ends
    itself, only at its marks. Noting an end frees nothing. The end that a test marks is noted with
    ``steady`` or not: lists that were freed serve later ones, which Python's garbage collector does
    not count. So the collector runs at the same places, and the peak is the program's.
    """

    def __init__(self, allocated: Callable[[], list[int]], garbage: GarbageWatch) -> None:
        """Watch; ``allocated`` returns the bytes that are allocated now, one figure a device."""
        self._allocated_now = allocated
        self._garbage = garbage
        self.search: Callable[[int], None] | None = None
        """of a second run: is called with the number of each step as it ends; garbage is collected
        before"""
        self._devices = 1
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._noted: list[float] = []
        """of each end the time, and the figures of all devices: a list of pairs would be counted by
        Python's garbage collector, which then would run earlier than without ``steady``"""
        self._marked_by_test = False
        self._first: weakref.ref[Optimizer] | None = None

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
        if self.search is not None:
            collect_garbage()
        with Uncounted():
            allocated = self._allocated_now()
            self._devices = len(allocated)
            freed = self._garbage.freed or [0] * self._devices
            self._noted += (now(), *allocated, *freed)
        if self.search is not None:
            self.search(len(self._noted) // self._width)

    @property
    def _width(self) -> int:
        return 1 + 2 * self._devices

    @property
    def ends(self) -> list[StepEnd]:
        """The ends so far."""
        starts = range(0, len(self._noted), self._width)
        rows = [self._noted[at : at + self._width] for at in starts]
        figures = [(time, [int(number) for number in numbers]) for time, *numbers in rows]
        return [
            StepEnd(time, tuple(numbers[: self._devices]), tuple(numbers[self._devices :]))
            for time, numbers in figures
        ]

    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """Return the bytes allocated after each step, for each device."""
        return tuple(zip(*(end.allocated for end in self.ends), strict=True))
