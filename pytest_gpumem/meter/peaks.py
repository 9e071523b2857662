"""Tally the highest memory so far of a step, or of a part of it, from allocator statistics.

A recording's log gives the same peaks (to the byte, in all 43 examples), and also the live blocks
at that time. Tallies are still needed: a first run on a real GPU is not recorded, a recorded
step takes longer (benchmarks/results/attribution-virtual.txt), the log ends after MAX_EVENTS, and
it has no pinned memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.measurement import Peak
from pytest_gpumem.recording.allocator_log import SEGMENT
from pytest_gpumem.recording.recording import Span
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.notes import Note
    from pytest_gpumem.recording.recording import Recording

MIN_PINNED: Final = MIB
"""Less pinned memory is ignored: PyTorch itself pins a little, for ``Tensor.item()`` say."""
MIN_SHARE: Final = 1000
"""Ignore compiler leftovers below 1/N of the peak: they are within the default tolerance."""


class Held(NamedTuple):
    """What one device holds at a moment, or the highest of each figure in a stretch of a step.

    To measure another figure, add a field here, read it in ``meter/reading.py``, and compute it in
    ``Pins.update``: :func:`plus`, :func:`minus` and :func:`maximum` combine all fields.
    """

    allocated: int = 0
    reserved: int = 0
    pinned: int = 0
    """pinned host memory of the whole process; set for the first of a test's devices only"""
    active: int = 0
    """bytes of blocks in use, including freed ones that wait for a stream"""

    @classmethod
    def blocks(cls, nbytes: int) -> Held:
        """Return the figures of ``nbytes`` of blocks; their segments are counted elsewhere."""
        return cls(allocated=nbytes, active=nbytes)


NOTHING: Final = Held()


def plus(left: Held, right: Held) -> Held:
    """Add figure by figure."""
    return Held(*map(operator.add, left, right))


def minus(left: Held, right: Held) -> Held:
    """Subtract figure by figure, with zero as the minimum."""
    return Held(*(max(0, mine - other) for mine, other in zip(left, right, strict=True)))


def maximum(left: Held, right: Held) -> Held:
    """Return the larger value of each figure."""
    return Held(*map(max, left, right))


def fullest(peaks: Sequence[Peak | Held]) -> Peak:
    """Return the largest of each figure over the devices, without pinned memory."""
    return Peak(max(peak.allocated for peak in peaks), max(peak.reserved for peak in peaks))


def reported(held: Sequence[Held]) -> tuple[Peak, ...]:
    """Return the figures for a measurement: pinned memory below MIN_PINNED is zero."""
    return tuple(
        Peak(one.allocated, one.reserved, one.pinned if one.pinned >= MIN_PINNED else 0)
        for one in held
    )


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest figures of a stretch of a step; each tuple has one item per device."""

    all: tuple[Held, ...]
    passes: tuple[Held, ...]
    """the highest figures outside of optimizer steps: mostly of forward and backward passes"""

    @classmethod
    def of(cls, held: Sequence[Held]) -> Highest:
        """Return the figures of a stretch in which at most ``held`` was held."""
        return cls(tuple(held), tuple(held))

    def in_optimizer_step(self) -> Highest:
        """Return these figures as those of an optimizer step: zero in ``passes``."""
        return replace(self, passes=(NOTHING,) * len(self.passes))

    def or_higher(self, other: Highest) -> Highest:
        """Return the larger value of each figure."""
        return self._each(maximum, other.all, other.passes)

    def on_top_of(self, held: Sequence[Held]) -> Highest:
        """Add ``held`` to each figure."""
        return self._each(plus, held, held)

    def above(self, held: Sequence[Held]) -> Highest:
        """Subtract ``held`` from each figure, with zero as the minimum."""
        return self._each(minus, held, held)

    def _each(
        self, combine: Callable[[Held, Held], Held], all_: Sequence[Held], passes: Sequence[Held]
    ) -> Highest:
        return Highest(
            tuple(map(combine, self.all, all_)), tuple(map(combine, self.passes, passes))
        )


class Tally:
    """The highest memory so far of the whole step, or of a part of it."""

    def __init__(self, start: Sequence[Held]) -> None:
        self.begin(start)
        self.windows: list[Span] = []
        """the time spans in which the tally was open; a span is added when it ends"""
        self.notes: list[Note] = []
        """notes about a part's inexact figures, set when it ends"""
        self.recording: Recording | None = None
        """the recording of a run outside of the step, such as a search's probe"""

    def begin(self, start: Sequence[Held]) -> None:
        """Reset the figures to ``start``, the memory that each device holds now."""
        self.start = start
        self.ends = start, start
        """what the devices held when the step or the part began, and when it ended"""
        self.highest = Highest.of(start)

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The peaks to report, one per device."""
        return reported(self.highest.all)

    def raise_to(self, highest: Highest) -> None:
        """Raise each figure to that of ``highest``, unless it is higher already."""
        self.highest = self.highest.or_higher(highest)


def outside(spans: Sequence[Span], holes: Sequence[Span]) -> Iterator[Span]:
    """Subtract holes, which are sorted, from spans; yield the remaining pieces."""
    for span in spans:
        start = span.start
        for hole in holes:
            if hole.end > start and hole.start < span.end:
                yield Span(start, hole.start)
                start = hole.end
        yield Span(start, span.end)


class CompilerMemory:
    """The memory that the compiler used in a step."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._highest: Highest | None = None
        self._left: list[int] = []
        """bytes that the compiler added to the allocators' caches, one figure per device"""

    def add(
        self, span: Span, highest: Highest, before: Sequence[Held], after: Sequence[Held]
    ) -> None:
        """Record a stretch of work by its highest figures and its memory before and after."""
        self.spans.append(span)
        left = [max(0, free(end) - free(start)) for start, end in zip(before, after, strict=True)]
        self._highest = self._highest.or_higher(highest) if self._highest else highest
        self._left = list(map(sum, zip(self._left or [0] * len(left), left, strict=True)))

    def notes(self, highest: Highest) -> list[str]:
        """Return sentences about the compiler's memory if it is large relative to the step's."""
        if self._highest is None:
            return []
        more = fullest(self._highest.above(highest.all).all).allocated
        left, peak = max(self._left), fullest(highest.all).reserved
        sentences = []
        if more >= MIB:
            sentences.append(
                f"while torch.compile compiled or timed kernels, {format_size(more)} more than the "
                "peak were allocated: they are not counted, because runs with warm caches have none"
            )
        if left >= SEGMENT and left * MIN_SHARE >= peak:
            sentences.append(
                f"torch.compile left {format_size(left)} in PyTorch's cache of free memory: peak "
                "reserved may be less with warm caches (warmup=1 leaves compilation out)"
            )
        return sentences


def free(held: Held) -> int:
    """Return the bytes in an allocator's cache."""
    return held.reserved - held.allocated
