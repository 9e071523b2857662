"""Add what a GPU may do differently to the script of a run's requests.

A GPU decides the sizes of workspaces for which the library reports none, how long other streams use
tensors, and whether kernels are timed. The requests get the bounds of these sizes and times.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.replay.request_script import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.base import AllocatorEvent, Alternative
    from pytest_gpumem.replay.request_script import RequestScript, Step

UNITS: Final = (1, 4, 8, 16)
"""possible element sizes in bytes, for libraries that report a number of elements"""
CLOCKS: Final = 2
"""microseconds by which the allocator's clock and the system's may differ"""
NOT_FOUND: Final = "the range is unknown: a workspace was not found among the run's requests"


class NoRangeError(Exception):
    """The range of a run's peaks is unknown; the message says why."""


def add_alternatives(
    script: RequestScript, blocks: Sequence[Alternative], awaited: Sequence[AllocatorEvent]
) -> None:
    """Add blocks' possible sizes, and the times of late frees, to a device's script.

    Raises:
        NoRangeError: no request matches a block.
    """
    for free, event in _of_other_streams(script, awaited):
        if free.number is not None and event.awaited > event.answered:
            script.late[free.number] = max(script.late.get(free.number, 0), event.awaited)
    if blocks:
        _add_blocks(script, blocks)


class Free(NamedTuple):
    """A freed block, whose free may have waited for other streams; the history has the times."""

    number: int | None
    """number of its request; None if it is older than the run"""
    dropped: float
    """when the program dropped it"""
    freed: float
    """when the allocator freed it"""
    drop_index: int
    """index, in the history, of the event in which the program dropped it"""
    waited: bool
    """whether the free is known to have waited"""


def _of_other_streams(
    script: RequestScript, awaited: Sequence[AllocatorEvent]
) -> list[tuple[Free, AllocatorEvent]]:
    """Match each event that the allocator queried to the block that another stream used.

    The history does not name these blocks. The allocator records an event when such a block is
    dropped, before anything else enters the history. So the order and the times of drops and events
    identify the blocks.
    """
    log, candidates = script.log, []
    for at, block in log.completed_frees.items():
        place = at if block is None or block.end is None else block.end
        number = None if block is None else script.numbers.get(block)
        # The allocator frees a block when it is dropped, or at the start of a later request.
        following = log.events[at + 1]["action"] if at + 1 < len(log.events) else ""
        waited = at - place > 1
        if waited or following not in {"", "free_requested"}:
            candidates.append(Free(number, log.times[place], log.times[at], place, waited))
    candidates.sort(key=lambda free: free.drop_index)
    pairs = _in_order(candidates, sorted(awaited, key=lambda event: event.recorded))
    if pairs is not None:
        return pairs
    # While a CUDA graph is captured, events are recorded later, so the order does not match. Then
    # match by time alone, and only blocks that are known to have waited.
    late = [free for free in candidates if free.waited]
    drops = [free.dropped for free in late]
    places = [bisect_right(drops, event.recorded + CLOCKS) - 1 for event in awaited]
    return [(late[at], event) for at, event in zip(places, awaited, strict=True) if at >= 0]


class _Way(NamedTuple):
    """A partial matching of events to blocks, as a linked list that ends with ``pair``."""

    difference: float
    """sum of the time differences of all pairs, in microseconds"""
    pair: tuple[Free, AllocatorEvent] | None
    before: _Way | None


def _in_order(
    frees: Sequence[Free], events: Sequence[AllocatorEvent]
) -> list[tuple[Free, AllocatorEvent]] | None:
    """Match each event to a block, keeping both in order; None if that is impossible.

    A block that is known to have waited has one event for each stream that used it. Of the possible
    matchings, return the one with the smallest sum of time differences.
    """
    drops = [free.dropped for free in frees]
    known_before = [-1]
    """for each block, and for the end: index of the nearest earlier block that is known to have
    waited for other streams; -1 if there is none"""
    for at, free in enumerate(frees):
        known_before.append(at if free.waited else known_before[-1])
    ways = {-1: _Way(0, None, None)}
    for event in events:
        last = bisect_right(drops, event.recorded + CLOCKS) - 1
        first = max(bisect_left(drops, event.recorded - CLOCKS) - 1, 0)
        longer = {}
        for at in range(first, last + 1):
            free = frees[at]
            ends = [way for end, way in ways.items() if known_before[at] <= end <= at]
            if ends:
                best = min(ends, key=lambda way: way.difference)
                difference = abs(free.dropped - event.recorded) + abs(free.freed - event.answered)
                longer[at] = _Way(best.difference + difference, (free, event), best)
        ways = longer
    ends = [way for end, way in ways.items() if end >= known_before[-1]]
    if not ends:
        return None
    way: _Way | None = min(ends, key=lambda way: way.difference)
    pairs = []
    while way is not None and way.pair is not None:
        pairs.append(way.pair)
        way = way.before
    return pairs


def _add_blocks(script: RequestScript, blocks: Sequence[Alternative]) -> None:
    """Add blocks' possible sizes to a script, and requests for blocks that are not in it."""
    allocations = [(time, number) for time, action, number in script.steps if action == "allocate"]
    times = [time for time, _ in allocations]
    by_address: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for own, number in script.numbers.items():
        by_address[own.address].append((own.time, number))
    used: set[int] = set()
    added: list[tuple[Alternative, int, int]] = []
    for block in blocks:
        number = -1
        if block.address:
            requests = by_address[block.address]
            at = bisect_right(requests, (block.time + CLOCKS, len(script.requests))) - 1
            number = requests[at][1] if at >= 0 else -1
        if block.address and block.use in {"in use", "planned"}:
            if number >= 0:
                script.requests[number].block = block
        elif block.usual:
            begin = bisect_right(times, block.time - CLOCKS)
            sizes = {unit * block.usual for unit in UNITS}
            for _, number in allocations[begin : begin + 64]:
                if number not in used and script.requests[number].size in sizes:
                    break
            else:
                raise NoRangeError(NOT_FOUND)
            used.add(number)
            unit = script.requests[number].size // block.usual
            least, most = unit * block.least, unit * block.most
            script.requests[number].block = block._replace(least=least, most=most)
        else:
            last = bisect_right(times, block.time + CLOCKS) - 1
            before = allocations[last][1] if last >= 0 else -1
            request = script.requests[before] if before >= 0 else Request(0, 0)
            if block.place is not None:
                request = Request(0, block.place[1])
            added.append((block, len(script.requests), number if block.address else before))
            script.requests.append(replace(request, size=0, block=block))
    script.steps = _with_added(script.steps, added)


def _with_added(steps: list[Step], added: Sequence[tuple[Alternative, int, int]]) -> list[Step]:
    """Insert the steps of added blocks.

    ``added`` has each block, the number of its request, and the number of the request whose block
    it may be kept with; -1 if there is none.
    """
    times = [time for time, _, _ in steps]
    frees = {number: at for at, (_, action, number) in enumerate(steps) if action == "free"}
    placed = [((at, inf, 2), step) for at, step in enumerate(steps)]
    """steps with sort keys: index of the old step that follows, time, and order at equal times"""
    for block, number, other in added:
        at, until = bisect_right(times, block.time), bisect_right(times, block.ended)
        is_call = block.use in {"in use", "planned"}  # a block for one library call
        placed.append(((at, block.time, 0 if is_call else 1), (block.time, "allocate", number)))
        if is_call:
            placed.append(((at, block.time, 0), (block.time, "free", number)))
        elif block.use == "kept" and other >= 0 and frees.get(other, len(steps)) >= until:
            if other in frees:
                end = frees[other]
                placed.append(((end + 1, -inf, 1), (times[end], "free", number)))
        elif block.use == "passing":  # the library frees it before the program's next request
            if at < len(steps):
                placed.append(((at, inf, 1), (times[at], "free", number)))
        else:
            placed.append(((until, block.ended, 2), (block.ended, "free", number)))
    placed.sort(key=lambda entry: entry[0])
    return [step for _, step in placed]
