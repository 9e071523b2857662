"""The highest memory so far, of a whole step or of what has figures of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.attribution.recording import Span
from pytest_gpumem.measurement import Peak

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.attribution.recording import Recording

NOTHING: Final = Peak(0, 0)


def plus(one: Peak, other: Peak) -> Peak:
    """Return the sum."""
    return Peak(one.allocated + other.allocated, one.reserved + other.reserved)


def minus(one: Peak, other: Peak) -> Peak:
    """Return the difference, never below zero."""
    return Peak(max(0, one.allocated - other.allocated), max(0, one.reserved - other.reserved))


def most(one: Peak, other: Peak) -> Peak:
    """Return the larger of each figure."""
    return Peak(max(one.allocated, other.allocated), max(one.reserved, other.reserved))


def fullest(peaks: Sequence[Peak]) -> Peak:
    """Return the largest of each figure."""
    return Peak(max(it.allocated for it in peaks), max(it.reserved for it in peaks))


class Tally:
    """The highest memory so far of the whole step, or of a part of it; one Peak a device."""

    def __init__(self, start: Sequence[Peak]) -> None:
        self.begin(start)
        self.windows: list[Span] = []
        """when it was open, as far as it has ended"""

    def begin(self, start: Sequence[Peak]) -> None:
        """Forget all but what is held now."""
        self.peaks = list(start)
        self.passes = list(start)
        """the same without the steps of optimizers: of forward and backward passes, mostly"""

    def raise_to(self, peaks: Sequence[Peak], *, stepping: bool = False) -> None:
        """Take what is higher; ``stepping``: reached in an optimizer's step."""
        self.peaks = [most(old, new) for old, new in zip(self.peaks, peaks, strict=True)]
        if not stepping:
            self.passes = [most(old, new) for old, new in zip(self.passes, peaks, strict=True)]

    def add(self, more: Sequence[Peak]) -> None:
        """Count something as from the beginning."""
        self.peaks = [plus(old, new) for old, new in zip(self.peaks, more, strict=True)]
        self.passes = [plus(old, new) for old, new in zip(self.passes, more, strict=True)]


class Apart(Tally):
    """The tally of what is not part of the step."""

    recording: Recording | None = None
    events: list[list[dict[str, Any]]]
    """the allocator's, of each device"""


def outside(spans: Sequence[Span], holes: Sequence[Span]) -> Iterator[Span]:
    """Yield what of spans lies in none of the holes, which are in order."""
    for span in spans:
        start = span.start
        for hole in holes:
            if hole.end > start and hole.start < span.end:
                yield Span(start, hole.start)
                start = hole.end
        yield Span(start, span.end)
