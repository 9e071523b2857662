"""Growth of memory from step to step; pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_STEPS: Final = 4
"""steps without which nothing can be told"""
WARM: Final = 1
"""index of the step after which nothing may grow any more: optimizers' state, workspaces and caches
come to life in the first, and what the first left is freed in the second"""


class Growth(NamedTuple):
    """Memory that grows from step to step, in bytes."""

    initial: int
    """allocated after the second step"""
    final: int
    """allocated after the last step"""
    rises: tuple[int, ...]
    """the growth of each later step; 0 for a step without growth"""


def growth(allocated: Sequence[int]) -> Growth | None:
    """Return the growth of memory; None where it stopped, or where any later step shrank it.

    Args:
        allocated: bytes after each step.
    """
    levels = allocated[WARM:]
    rises = tuple(late - early for early, late in pairwise(levels))
    # A leak never shrinks; memory that goes up and down is a cache, or the collector's work.
    if not any(rises) or min(rises) < 0:
        return None
    single = sum(rise > 0 for rise in rises) == 1
    # A single rise is a cache that was filled; in the last step alone it may be a leak's first.
    if single and not rises[-1]:
        return None
    return Growth(levels[0], levels[-1], rises)
