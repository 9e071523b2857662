"""Tally the highest memory so far of a step, or of a part of it, from allocator statistics.

A recording's log gives the same peaks (all 43 of the examples, to the byte), and also the blocks
held at the time. Tallies are still needed: a first run on a real GPU is not recorded, a recorded
step takes longer (benchmarks/results/attribution-virtual.txt), the log ends after MAX_EVENTS, and
it has no pinned memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest figures of a stretch of a step; each tuple has one item per device.

    A new figure of which the highest counts is a field here, and in the methods. They get the bytes
    that were held beside; a figure that is not in bytes needs that in its own unit.
    """

    peaks: tuple[Peak, ...]
    active: tuple[int, ...]
    """the peak bytes of active blocks, including freed ones that wait for a stream"""
    passes: tuple[Peak, ...]
    """the peaks outside of optimizer steps: mostly of forward and backward passes"""

    @classmethod
    def of(cls, held: Sequence[Peak]) -> Highest:
        """Return the figures of a stretch in which no more than this was held."""
        return cls(tuple(held), tuple(peak.allocated for peak in held), tuple(held))

    def in_optimizer_step(self) -> Highest:
        """Return the figures of a stretch that lies in an optimizer step: they are of no pass."""
        return replace(self, passes=(NOTHING,) * len(self.passes))

    def or_higher(self, other: Highest) -> Highest:
        """Return the larger value of each figure."""
        return Highest(
            tuple(map(maximum, self.peaks, other.peaks)),
            tuple(map(max, self.active, other.active)),
            tuple(map(maximum, self.passes, other.passes)),
        )

    def on_top_of(self, held: Sequence[Peak]) -> Highest:
        """Add the memory that was held beside."""
        return Highest(
            tuple(map(plus, self.peaks, held)),
            tuple(active + peak.allocated for active, peak in zip(self.active, held, strict=True)),
            tuple(map(plus, self.passes, held)),
        )

    def above(self, held: Sequence[Peak]) -> Highest:
        """Subtract the memory that was held beside, with zero as the minimum."""
        return Highest(
            tuple(map(minus, self.peaks, held)),
            tuple(
                max(0, active - peak.allocated)
                for active, peak in zip(self.active, held, strict=True)
            ),
            tuple(map(minus, self.passes, held)),
        )


class Tally:
    """The highest memory so far of the whole step, or of a part of it."""

    def __init__(self, start: Sequence[Peak]) -> None:
        self.begin(start)
        self.windows: list[Span] = []
        """the time spans in which the tally was open; a span is added when it ends"""
        self.notes: list[Note] = []
        """notes about a part's inexact figures, set when it ends"""
        self.recording: Recording | None = None
        """the recording of a run outside of the step, such as a search's probe"""

    def begin(self, start: Sequence[Peak]) -> None:
        """Reset the figures to ``start``, the memory held now, one Peak per device."""
        self.start = start
        self.ends = start, start
        """the memory held when the step or the part began, and when it ended"""
        self.highest = Highest.of(start)

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The peaks, one per device."""
        return self.highest.peaks

    def raise_to(self, highest: Highest) -> None:
        """Raise the figures to these."""
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
