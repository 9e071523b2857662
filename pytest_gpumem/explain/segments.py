"""List the requests that made the allocator reserve new segments: why peak reserved grew.

A request takes a new segment if no cached piece of memory is large enough. Each record has the
sizes of the cached pieces at that time, and the source lines of the live blocks in the segment that
was closest to serving the request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Final

from pytest_gpumem.measurement import SegmentRequest
from pytest_gpumem.recording.allocator_log import RELEASING, RESERVING, SEGMENT, SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.explain.categories import Blocks
    from pytest_gpumem.recording.allocator_log import Block

MAX_REQUESTS: Final = 30
"""maximum number of requests to report: the last ones, which made the peak"""
MAX_PLACES: Final = 2
"""maximum number of source lines of live blocks to name"""


def segment_requests(
    device: Blocks,
    indices: Sequence[int],
    foreign: int,
    place_of: Callable[[Block], tuple[str, int, str, str]],
) -> tuple[SegmentRequest, ...]:
    """Return the requests that raised reserved memory to a new maximum, in order.

    ``foreign`` are reserved bytes that are not the test's.
    """
    events = device.history.events
    heights: list[tuple[int, int]] = []
    highest = device.reserved(indices[0])
    for index in indices:
        reserved = device.reserved(index)
        if index >= 0 and events[index]["action"] in RESERVING and reserved > highest:
            highest = reserved
            heights.append((index, reserved))
    allocations = list(device.history.allocated)
    requests = []
    for index, reserved in heights[-MAX_REQUESTS:]:
        following = bisect_right(allocations, index)
        block = (
            device.history.allocated[allocations[following]]
            if following < len(allocations)
            else None
        )
        if block is None or block not in device.categories:  # this package's own request
            continue
        requested = events[allocations[following]]["size"]
        pieces, around = _cache(device, index, requested)
        held: Counter[str] = Counter()
        for neighbour in filter(device.categories.__contains__, around):
            path, line, *_ = place_of(neighbour)
            held[f"{path}:{line}" if path else "no line of Python"] += neighbour.size
        path, line, function, code = place_of(block)
        requests.append(
            SegmentRequest(
                path,
                line,
                function,
                code,
                requested=requested,
                nbytes=events[index]["size"],
                reserved=reserved - foreign,
                cached=sum(pieces),
                pieces=len(pieces),
                largest=max(pieces, default=0),
                held_by=tuple(name for name, _ in held.most_common(MAX_PLACES)),
            )
        )
    return tuple(requests)


def _cache(device: Blocks, index: int, requested: int) -> tuple[list[int], list[Block]]:
    """Return the cached pieces before an event, and the live blocks in the best segment.

    The best segment is the one with most cached memory among those at least as large as the
    request.
    """
    alive = sorted(
        (block for block in device.history.blocks if block.alive(index)),
        key=lambda block: block.address,
    )
    pieces: list[int] = []
    best = 0
    around: list[Block] = []
    segments = {
        segment["address"]: segment["total_size"]
        for segment in device.recording.initial_segments
        if segment["device"] == device.index
    }
    for event in device.history.events[:index]:
        if event["action"] in RESERVING:
            segments[event["addr"]] = event["size"]
        elif event["action"] in RELEASING:
            segments.pop(event["addr"], None)
    for start, size in segments.items():
        if (size <= SEGMENT) != (requested <= SMALL):  # of the other pool: small or large blocks
            continue
        inside = [block for block in alive if start <= block.address < start + size]
        edge = start
        gaps = []
        for block in inside:
            gaps.append(block.address - edge)
            edge = block.address + block.size
        gaps.append(start + size - edge)
        free = [gap for gap in gaps if gap > 0]
        pieces += free
        if size >= requested and sum(free) > best:
            best, around = sum(free), inside
    return pieces, around
