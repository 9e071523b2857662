"""The highest memory so far, of a whole step or of a part of it: by the allocator's statistics.

A recording's log tells the same peaks by its windows (all 43 of the examples, to the byte), and
the blocks held at the time. Tallies stay all the same: a first run is not recorded where kernels
run, a recorded step takes longer (benchmarks/results/attribution-virtual.txt), the log ends after
MAX_EVENTS, and it has no pinned memory.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Final

from pytest_gpumem.measurement import Peak
from pytest_gpumem.recording.allocator_log import SEGMENT
from pytest_gpumem.recording.recording import Span
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.notes import Note
    from pytest_gpumem.recording.recording import Recording

NOTHING: Final = Peak(0, 0)
MIN_PINNED: Final = MIB
"""bytes of pinned memory that count: PyTorch pins a few itself, for ``Tensor.item()`` say"""
MIN_SHARE: Final = 1000
"""memory that the compiler leaves, below this part of the peak is within the default tolerance"""


def plus(left: Peak, right: Peak) -> Peak:
    """Return the sum."""
    return _each(operator.add, left, right)


def minus(left: Peak, *others: Peak) -> Peak:
    """Return what is left without the others, never below zero."""
    less = partial(_each, lambda mine, other: max(0, mine - other))
    return reduce(less, others, left)


def maximum(left: Peak, right: Peak) -> Peak:
    """Return the larger of each figure."""
    return _each(max, left, right)


def _each(combine: Callable[[int, int], int], left: Peak, right: Peak) -> Peak:
    return Peak(
        combine(left.allocated, right.allocated),
        combine(left.reserved, right.reserved),
        combine(left.pinned, right.pinned),
    )


def fullest(peaks: Sequence[Peak]) -> Peak:
    """Return the largest of each figure: those of the fullest device."""
    return Peak(max(peak.allocated for peak in peaks), max(peak.reserved for peak in peaks))


def without_few_pinned(peaks: Sequence[Peak]) -> tuple[Peak, ...]:
    """Return peaks with pinned memory of less than MIN_PINNED left out."""
    return tuple(replace(peak, pinned=0) if peak.pinned < MIN_PINNED else peak for peak in peaks)


class Tally:
    """The highest memory so far of the whole step, or of a part of it; one Peak a device."""

    def __init__(self, start: Sequence[Peak]) -> None:
        self.begin(start)
        self.windows: list[Span] = []
        """the spans of time in which it was open, without one that has not ended"""
        self.notes: list[Note] = []
        """sentences about figures of a part that are not exact, when it ended"""
        self.recording: Recording | None = None
        """of a run that is no part of the step, such as a search's try"""

    def begin(self, start: Sequence[Peak]) -> None:
        """Begin anew with the memory that is held now."""
        self.start = start
        self.ends = start, start
        """the memory that was held when it began, and when it ended"""
        self.peaks = list(start)
        self.active = [held.allocated for held in start]
        """the highest bytes of blocks in use, those included that streams still wait for"""
        self.passes = list(start)
        """the same without the steps of optimizers: of forward and backward passes, mostly"""

    def raise_to(
        self, peaks: Sequence[Peak], *, active: Sequence[int] = (), stepping: bool = False
    ) -> None:
        """Raise the figures to these peaks; ``stepping``: reached in an optimizer's step."""
        self.peaks = list(map(maximum, self.peaks, peaks))
        self.active = list(map(max, self.active, active or (peak.allocated for peak in peaks)))
        if not stepping:
            self.passes = list(map(maximum, self.passes, peaks))


def outside(spans: Sequence[Span], holes: Sequence[Span]) -> Iterator[Span]:
    """Yield the pieces of spans that lie in none of the holes, which are in order."""
    for span in spans:
        start = span.start
        for hole in holes:
            if hole.end > start and hole.start < span.end:
                yield Span(start, hole.start)
                start = hole.end
        yield Span(start, span.end)


class CompilerMemory:
    """The memory that the compiler has taken in a step, one Peak a device."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """the spans of time in which the compiler worked"""
        self._highest: list[Peak] = []
        self._left: list[int] = []
        """bytes of free memory that came into the allocators' caches"""

    def add(
        self, span: Span, highest: Sequence[Peak], before: Sequence[Peak], after: Sequence[Peak]
    ) -> None:
        """Record a stretch of work by its peak and its memory before and after."""
        self.spans.append(span)
        number = len(highest)
        left = [max(0, free(end) - free(start)) for start, end in zip(before, after, strict=True)]
        self._highest = list(map(maximum, self._highest or [NOTHING] * number, highest))
        self._left = list(map(sum, zip(self._left or [0] * number, left, strict=True)))

    def notes(self, peaks: Sequence[Peak]) -> list[str]:
        """Return a sentence about memory that matters beside the step's peaks."""
        if not self.spans:
            return []
        more = fullest(list(map(minus, self._highest, peaks))).allocated
        left, peak = max(self._left), fullest(peaks).reserved
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


def free(held: Peak) -> int:
    """Return the bytes that an allocator holds and has not given to a tensor."""
    return held.reserved - held.allocated
