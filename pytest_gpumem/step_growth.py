"""Whether memory stops growing from step to step; pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_STEPS: Final = 4
"""steps without which nothing can be told"""
WARM: Final = 1
"""index of the step after which nothing may grow any more: optimizers' state, workspaces and caches
come to life in the first, and what the first left is freed in the second"""


class Growth(NamedTuple):
    """Memory that grows from step to step, in bytes."""

    before: int
    """allocated after the second step"""
    after: int
    """after the last"""
    rises: tuple[int, ...]
    """by how much each later step made it grow; 0 for one that did not"""


def growth(allocated: Sequence[int]) -> Growth | None:
    """Return how memory grew; None where it stopped growing, or shrank at any later step.

    Args:
        allocated: bytes after each step.
    """
    held = allocated[WARM:]
    rises = tuple(late - early for early, late in pairwise(held))
    if not any(rises) or min(rises) < 0:
        return None
    once = sum(rise > 0 for rise in rises) == 1
    if once and not rises[-1]:
        return None
    return Growth(held[0], held[-1], rises)
