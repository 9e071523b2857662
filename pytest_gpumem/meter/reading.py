"""The allocators' figures at one moment, and the step's own share of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.meter.peaks import Held, Highest, minus
from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from collections.abc import Sequence

PINNED: Final = "pinned"
"""key of the pinned host memory's statistics, among the first device's statistics only"""
Stats = dict[str, Any]
"""one device's statistics, in the form of ``memory_stats_as_nested_dict``"""


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of all measured devices at one moment; each tuple has one item per device.

    Figures named ``own_...`` are the step's: the allocator's, less foreign memory (of earlier
    tests, say) and the plugs that fill the free blocks of its segments.
    """

    held: tuple[Held, ...]
    """what the allocators hold"""
    highest: tuple[Held, ...]
    """the allocators' peaks since they were last reset"""
    own_held: tuple[Held, ...]
    own_highest: Highest
    unrequested: tuple[int, ...]
    """bytes of live blocks in excess of what was requested"""
    retries: int
    """how often the allocators have emptied their caches and retried a request"""
    segments: int
    """number of the allocators' segments, foreign ones included; expandable ones are not counted"""

    @classmethod
    def of(cls, all_stats: Sequence[Stats], others: Sequence[Held]) -> Reading:
        """Make a reading from statistics; ``others`` is the memory that is not the step's own."""
        held = tuple(map(current_in, all_stats))
        highest = tuple(map(peak_in, all_stats))
        return cls(
            held,
            highest,
            own_held=tuple(map(minus, held, others)),
            own_highest=Highest.of(highest).above(others),
            unrequested=tuple(map(_unrequested_in, all_stats)),
            retries=sum(stats.get("num_alloc_retries", 0) for stats in all_stats),
            segments=sum(
                stats["segment"]["all"]["current"] for stats in all_stats if "segment" in stats
            ),
        )


def current(device: int) -> Held:
    """Return what a device's allocator holds now."""
    return current_in(VIEW.stats(device))


def current_in(stats: Stats) -> Held:
    """Return the current figures in these statistics."""
    return _figures(stats, "current")


def peak_in(stats: Stats) -> Held:
    """Return the peak figures in these statistics."""
    return _figures(stats, "peak")


def _figures(stats: Stats, column: str) -> Held:
    pinned = stats[PINNED][column] if PINNED in stats else 0
    if "segment" not in stats:  # nothing was allocated on this device yet
        return Held(pinned=pinned)
    return Held(
        allocated=stats["allocated_bytes"]["all"][column],
        reserved=stats["reserved_bytes"]["all"][column],
        pinned=pinned,
        active=stats["active_bytes"]["all"][column],
    )


def _unrequested_in(stats: Stats) -> int:
    """Return the bytes of live blocks in excess of what was requested.

    PyTorch rounds requests up, and does not split a small remainder off a free block. The excess
    depends on the free blocks, and so on everything that ran before.
    """
    if "segment" not in stats:
        return 0
    allocated, requested = stats["allocated_bytes"]["all"], stats["requested_bytes"]["all"]
    return int(allocated["current"] - requested["current"])
