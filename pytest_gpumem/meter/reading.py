"""The allocators' figures at one moment, and the step's own share of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.peaks import Highest, minus
from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PINNED: Final = "pinned"
"""key of the pinned host memory's statistics, among the first device's statistics only"""
Stats = dict[str, Any]
"""one device's statistics, in the form of ``memory_stats_as_nested_dict``"""


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of all measured devices at one moment; each tuple has one item per device.

    Figures named ``own_...`` are the step's: the allocator's, less foreign memory and plugs.
    """

    held: tuple[Peak, ...]
    """the bytes that the allocators hold"""
    highest: tuple[Peak, ...]
    """the allocators' peaks since they were last reset"""
    own_held: tuple[Peak, ...]
    own_highest: Highest
    """the highest figures since the allocators' peaks were last reset"""
    unrequested: tuple[int, ...]
    """bytes of live blocks in excess of what was requested"""
    retries: int
    """how often the allocators have emptied their caches and retried a request"""
    segments: int
    """number of the allocators' segments, foreign ones included; expandable ones are not counted"""

    @classmethod
    def of(cls, all_stats: Sequence[Stats], others: Sequence[Peak]) -> Reading:
        """Make a reading of statistics; ``others`` is the memory that is not the step's own."""
        held = tuple(map(current_in, all_stats))
        highest = tuple(map(peak_in, all_stats))
        active = tuple(map(_peak_active, all_stats))
        return cls(
            held,
            highest,
            own_held=_less(held, others),
            own_highest=Highest(highest, active, highest).above(others),
            unrequested=tuple(map(_unrequested_in, all_stats)),
            retries=sum(stats.get("num_alloc_retries", 0) for stats in all_stats),
            segments=sum(
                stats["segment"]["all"]["current"] for stats in all_stats if "segment" in stats
            ),
        )


def _less(peaks: Iterable[Peak], others: Sequence[Peak]) -> tuple[Peak, ...]:
    return tuple(map(minus, peaks, others))


def current(device: int) -> Peak:
    """Return the bytes that a device's allocator holds now."""
    return current_in(VIEW.stats(device))


def current_in(stats: Stats) -> Peak:
    """Return the current bytes in these statistics."""
    return _bytes(stats, "current")


def peak_in(stats: Stats) -> Peak:
    """Return the peak bytes in these statistics."""
    return _bytes(stats, "peak")


def _bytes(stats: Stats, figure: str) -> Peak:
    pinned = stats[PINNED][figure] if PINNED in stats else 0
    if "segment" not in stats:  # nothing was allocated on this device yet
        return Peak(0, 0, pinned)
    allocated, reserved = stats["allocated_bytes"], stats["reserved_bytes"]
    return Peak(allocated["all"][figure], reserved["all"][figure], pinned)


def _unrequested_in(stats: Stats) -> int:
    """Return the bytes of live blocks in excess of what was requested.

    PyTorch rounds requests up, and does not split a small remainder off a free block. The excess
    depends on the free blocks, and so on everything that ran before.
    """
    if "segment" not in stats:
        return 0
    allocated, requested = stats["allocated_bytes"]["all"], stats["requested_bytes"]["all"]
    return int(allocated["current"] - requested["current"])


def _peak_active(stats: Stats) -> int:
    return int(stats["active_bytes"]["all"]["peak"]) if "segment" in stats else 0
