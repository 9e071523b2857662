"""Memory in use after each step of a test, and memory that garbage in reference cycles holds.

Python's collector runs by the number of Python objects that were made, and that depends on the
modules and caches that earlier code loaded. So the moment at which such memory is freed, and with
it a peak, may differ between a test alone and the same test in a session.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
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
    """Measures how much device memory each of Python's collections frees while a step runs.

    What the first collection after the step frees is no garbage of the step's: a module in a
    reference cycle, say, is in use until its function returns.
    """

    def __init__(self, requested: Callable[[], list[int]]) -> None:
        """Watch; ``requested`` returns the bytes of live tensors now, one figure a device."""
        self._requested = requested
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
        if self._see not in gc.callbacks:
            gc.callbacks.append(self._see)

    def stop(self) -> None:
        """Watch no longer."""
        if self._see in gc.callbacks:  # the step's code may have cleared the list
            gc.callbacks.remove(self._see)

    def _see(self, phase: str, info: dict[str, int]) -> None:
        with Uncounted():
            if phase == "start":
                self._at_start = self._requested()
            else:
                freed = [*map(sub, self._at_start, self._requested())]
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
    requested: tuple[int, ...]
    """of live tensors"""
    freed: tuple[int, ...]
    """by Python's garbage collector since the test began"""


class Steps:
    """The ends of a test's steps.

    A step ends where the test marks its end; in a test that marks none, with a step of an
    optimizer: of the first one that steps twice. If each optimizer steps once, as where each
    iteration makes a new one, a step ends with each. Noting an end frees nothing. The end that a
    test marks is noted with ``steady`` or not: lists that were freed serve later ones, which
    Python's garbage collector does not count. So the collector runs at the same places, and the
    peak is the program's.
    """

    def __init__(self, requested: Callable[[], list[int]], garbage: GarbageWatch) -> None:
        """Watch; ``requested`` returns the bytes of live tensors now, one figure a device."""
        self._requested_now = requested
        self._garbage = garbage
        self.search: Callable[[int], None] | None = None
        """of a second run: is called with the number of each possible end; garbage is collected
        before"""
        self._devices = 1
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._noted: list[float] = []
        """of each possible end the time, the optimizer's number, and the figures of all devices: a
        list of lists would be counted by Python's garbage collector, which then would run earlier
        than without ``steady``"""
        self._marked_by_test = False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        """by their numbers"""

    def mark(self) -> None:
        """End a step where the test marks its end."""
        if not self._marked_by_test:
            self.forget()
            self._marked_by_test = True
        self._note(0)

    def stepped(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        if not self._marked_by_test:
            self._note(self._number_of(optimizer))

    def _number_of(self, optimizer: Optimizer) -> int:
        """Return an optimizer's number: that of a deleted one, which it replaces, or a new one."""
        with Uncounted():
            known = [ref() for ref in self._optimizers]
            for number, other in enumerate(known):
                if other is optimizer:
                    return number
            number = known.index(None) if None in known else len(known)
            self._optimizers[number : number + 1] = [weakref.ref(optimizer)]
            return number

    def _note(self, optimizer: int) -> None:
        if self.search is not None:
            collect_garbage()
        with Uncounted():
            requested = self._requested_now()
            self._devices = len(requested)
            freed = self._garbage.freed or [0] * self._devices
            self._noted += (now(), optimizer, *requested, *freed)
        if self.search is not None:
            self.search(len(self._rows()))

    def _rows(self) -> list[list[float]]:
        width = 2 + 2 * self._devices
        return [self._noted[at : at + width] for at in range(0, len(self._noted), width)]

    @property
    def each_optimizer_stepped_once(self) -> bool:
        """Whether several optimizers ended the steps, each one: a step may have several of them."""
        return len(self._optimizers) == len(self._rows()) > 1

    def _ends(self) -> list[tuple[int, list[float]]]:
        """Return the steps' ends, each with its number among the possible ones."""
        rows = self._rows()
        counts = Counter(optimizer for _, optimizer, *_ in rows)
        lead = next((optimizer for optimizer, steps in counts.items() if steps > 1), None)
        return [(number, row) for number, row in enumerate(rows, 1) if lead in {None, row[1]}]

    @property
    def last_noted(self) -> int:
        """The number of the last step's end among the possible ones; 0: there is none."""
        return max((number for number, _ in self._ends()), default=0)

    @property
    def ends(self) -> list[StepEnd]:
        """The ends so far."""
        figures = [(row[0], [int(number) for number in row[2:]]) for _, row in self._ends()]
        return [
            StepEnd(time, tuple(numbers[: self._devices]), tuple(numbers[self._devices :]))
            for time, numbers in figures
        ]

    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """Return the bytes of live tensors after each step, for each device."""
        return tuple(zip(*(end.requested for end in self.ends), strict=True))
