"""Tally the highest memory so far of a step, or of a part of it, from allocator statistics.

A recording's log gives the same peaks (all 43 of the examples, to the byte), and also the blocks
held at the time. Tallies are still needed: a first run on a real GPU is not recorded, a recorded
step takes longer (benchmarks/results/attribution-virtual.txt), the log ends after MAX_EVENTS, and
it has no pinned memory.
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
"""Less pinned memory is ignored: PyTorch itself pins a little, for ``Tensor.item()`` say."""
MIN_SHARE: Final = 1000
"""Ignore compiler leftovers below 1/N of the peak: they are within the default tolerance."""


def plus(left: Peak, right: Peak) -> Peak:
    """Add two peaks, figure by figure."""
    return _each(operator.add, left, right)


def minus(left: Peak, *others: Peak) -> Peak:
    """Subtract ``others`` figure by figure, with zero as the minimum."""
    less = partial(_each, lambda mine, other: max(0, mine - other))
    return reduce(less, others, left)


def maximum(left: Peak, right: Peak) -> Peak:
    """Return the larger value of each figure."""
    return _each(max, left, right)


def _each(combine: Callable[[int, int], int], left: Peak, right: Peak) -> Peak:
    return Peak(
        combine(left.allocated, right.allocated),
        combine(left.reserved, right.reserved),
        combine(left.pinned, right.pinned),
    )


def fullest(peaks: Sequence[Peak]) -> Peak:
    """Return the largest of each figure over the devices, without pinned memory."""
    return Peak(max(peak.allocated for peak in peaks), max(peak.reserved for peak in peaks))


def without_few_pinned(peaks: Sequence[Peak]) -> tuple[Peak, ...]:
    """Return the peaks with pinned memory below MIN_PINNED set to zero."""
    return tuple(replace(peak, pinned=0) if peak.pinned < MIN_PINNED else peak for peak in peaks)


class Tally:
    """The highest memory so far of the whole step, or of a part of it; one Peak per device."""

    def __init__(self, start: Sequence[Peak]) -> None:
        self.begin(start)
        self.windows: list[Span] = []
        """the time spans in which the tally was open; a span is added when it ends"""
        self.notes: list[Note] = []
        """notes about a part's inexact figures, set when it ends"""
        self.recording: Recording | None = None
        """the recording of a run outside of the step, such as a search's probe"""

    def begin(self, start: Sequence[Peak]) -> None:
        """Reset the figures to ``start``, the memory held now."""
        self.start = start
        self.ends = start, start
        """the memory held when the step or the part began, and when it ended"""
        self.peaks = list(start)
        self.active = [held.allocated for held in start]
        """the peak bytes of active blocks, including freed ones that wait for a stream"""
        self.passes = list(start)
        """the peaks outside of optimizer steps: mostly of forward and backward passes"""

    def raise_to(
        self, peaks: Sequence[Peak], *, active: Sequence[int] = (), stepping: bool = False
    ) -> None:
        """Raise the figures to these peaks; ``stepping``: they occurred in an optimizer step."""
        self.peaks = list(map(maximum, self.peaks, peaks))
        self.active = list(map(max, self.active, active or (peak.allocated for peak in peaks)))
        if not stepping:
            self.passes = list(map(maximum, self.passes, peaks))


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
    """The memory that the compiler used in a step, one Peak per device."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._highest: list[Peak] = []
        self._left: list[int] = []
        """bytes that the compiler added to the allocators' caches, one figure per device"""

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
        """Return sentences about the compiler's memory if it is large relative to the peaks."""
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
    """Return the bytes in an allocator's cache."""
    return held.reserved - held.allocated
