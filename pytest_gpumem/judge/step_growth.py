"""Growth of memory from step to step; pure."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_STEPS: Final = 4
"""steps without which nothing can be told: two in the last half, and two before"""


class Growth(NamedTuple):
    """Memory that still grows when the last step ends, in bytes."""

    initial: int
    """after the first half of the steps"""
    final: int
    """after the last step"""
    rises: tuple[int, ...]
    """the change in each step of the last half"""


def last_half(steps: int) -> int:
    """Return the index of the step that the last half of the steps follows."""
    return steps - steps // 2 - 1


def growth(levels: Sequence[int]) -> Growth | None:
    """Return the growth of memory in the last half of the steps; None where it has stopped.

    Memory still grows if it rose in both quarters of that half, each time by more than it fell
    again anywhere in the half. So a cache may fill in the first half, and may fill once later; and
    steps of different sizes are no growth. A leak in each k-th step is one from 4 k steps on.

    ``levels`` has the bytes after each step.
    """
    if len(levels) < MIN_STEPS:
        return None
    half = levels[last_half(len(levels)) :]
    # What a step leaves for good is the lowest level from there on.
    lows = [*accumulate(reversed(half), min)][::-1]
    fall = max(level - low for level, low in zip(half, lows, strict=True))
    middle = len(half) // 2
    if min(lows[middle] - lows[0], lows[-1] - lows[middle]) <= fall:
        return None
    return Growth(half[0], half[-1], tuple(late - early for early, late in pairwise(half)))
