"""Memory in use after each step of a test, and memory that garbage in reference cycles holds.

The number of new Python objects triggers Python's collector, and it depends on the modules and
caches that earlier code loaded. So the moment at which garbage is freed, and with it a peak, may
differ between a test that runs alone and the same test in a session.
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
"""Ignore garbage below 1/N of the peak, or below 1 MiB: it is within the default tolerance."""


class GarbageWatch:
    """Measures how much device memory each of Python's collections frees while a step runs.

    Memory that a collection frees after the step does not count as garbage: a module in a reference
    cycle, say, is in use until its function returns.
    """

    def __init__(self, requested: Callable[[], list[int]]) -> None:
        """Store ``requested``, which returns the live tensors' bytes now, a figure per device."""
        self._requested = requested
        self._at_start: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Reset the figures."""
        self.most = 0
        """the most bytes that one collection freed, over all devices"""
        self.freed: list[int] = []
        """bytes that all collections freed, one figure per device; empty before the first one"""

    def start(self) -> None:
        """Register the callback with Python's garbage collector."""
        if self._see not in gc.callbacks:
            gc.callbacks.append(self._see)

    def stop(self) -> None:
        """Unregister the callback."""
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
        """Return a sentence if the garbage is large compared with the peaks (in bytes); else []."""
        if self.most < MIB or self.most * MIN_SHARE < max(peaks):
            return []
        sentence = (
            f"garbage in reference cycles kept {format_size(self.most)} until Python's "
            "garbage collector ran: the time of its run depends on all earlier code, so "
            "the peak may differ by this amount (break the cycle, or call gc.collect())"
        )
        return [sentence]


class StepEnd(NamedTuple):
    """The end of a step; bytes, one figure per device."""

    time: float
    """microseconds since 1970"""
    requested: tuple[int, ...]
    """bytes of live tensors"""
    freed: tuple[int, ...]
    """bytes that Python's garbage collector has freed since the test began"""


class Steps:
    """The ends of a test's steps.

    A step ends where the test marks its end. If the test marks none, it ends with each step of one
    optimizer: the first that steps twice. If each optimizer steps only once (each iteration creates
    a new one, say), it ends with the step of any of them. Recording an end frees nothing. Ends that
    a test marks are recorded without ``steady`` too: Python's garbage collector then runs at the
    same points with and without ``steady``, and the peak is the same.
    """

    def __init__(self, requested: Callable[[], list[int]], garbage: GarbageWatch) -> None:
        """Store ``requested``, which returns the live tensors' bytes now, a figure per device."""
        self._requested_now = requested
        self._garbage = garbage
        self.search: Callable[[int], None] | None = None
        """called in a second run with each possible end's number, after a garbage collection; None
        in a first run"""
        self._devices = 1
        self.forget()

    def forget(self) -> None:
        """Forget all recorded ends, whether marked by the test or not, and the optimizers."""
        self._noted: list[float] = []
        """flat: for each possible end its time, the optimizer's number, and the figures of all
        devices. Python's garbage collector would count a list of lists, and run earlier than
        without ``steady``."""
        self._marked_by_test = False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        """indexed by their numbers"""

    def mark(self) -> None:
        """Record an end that the test marks."""
        if not self._marked_by_test:
            self.forget()
            self._marked_by_test = True
        self._note(0)

    def stepped(self, optimizer: Optimizer) -> None:
        """Record a possible end of a step: an optimizer has stepped.

        Nothing is recorded if the test marks the ends of its steps.
        """
        if not self._marked_by_test:
            self._note(self._number_of(optimizer))

    def _number_of(self, optimizer: Optimizer) -> int:
        """Return an optimizer's number; a new optimizer reuses the number of a deleted one."""
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
        """Whether several optimizers stepped once each: that may be a single training step."""
        return len(self._optimizers) == len(self._rows()) > 1

    def _ends(self) -> list[tuple[int, list[float]]]:
        """Return the steps' ends, each with its number among the possible ends."""
        rows = self._rows()
        counts = Counter(optimizer for _, optimizer, *_ in rows)
        lead = next((optimizer for optimizer, steps in counts.items() if steps > 1), None)
        return [(number, row) for number, row in enumerate(rows, 1) if lead in {None, row[1]}]

    @property
    def last_noted(self) -> int:
        """The number of the last step's end among the possible ends; 0 if there is none."""
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
