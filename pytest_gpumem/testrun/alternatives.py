"""The requests of a run to PyTorch's allocator, read from its history.

Some of it a GPU decides: the sizes of workspaces, where a library names none, how long other
streams use tensors, and whether kernels are timed. The requests have the ends of these ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.attribution.recording import Recording, Span
    from pytest_gpumem.devices.base import AllocatorEvent, Alternative

Pool = tuple[int, int]
"""a pool of memory as PyTorch names it: a CUDA graph's, or that of a ``torch.cuda.MemPool``"""
SHARED: Final[Pool] = (0, 0)
"""that of all other memory"""
Step = tuple[float, str, int]
MAX_REQUESTS: Final = 200_000
"""requests and frees of a device that are still served once more: each takes some microseconds"""
TOO_MANY: Final = "the range is unknown: the run has too many allocations"
UNITS: Final = (1, 4, 8, 16)
"""bytes of an element, where a library is asked for a number of elements"""
CLOCKS: Final = 2
"""microseconds by which the allocator's clock and the system's may differ"""


class NoRangeError(Exception):
    """The ends of a run's peaks cannot be told; the message says why."""


class Sizes(NamedTuple):
    """Bytes of a block at the ends of its range."""

    least: int
    usual: int
    most: int
    replaceable: bool = False
    """PyTorch goes on with the usual one where the most finds no room"""
    reason: str = ""
    """as an :class:`~pytest_gpumem.devices.base.Alternative` has it"""
    counted: bool = True
    """as an alternative has it"""


@dataclass
class Request:
    """A request of a script."""

    size: int
    stream: int
    pool: Pool = SHARED
    sizes: Sizes | None = None
    """of one that a GPU may make with another size"""


@dataclass
class AllocatorScript:
    """The requests to one device's allocator, in their order."""

    requests: list[Request] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """each with its time, what is done, and the number of a request: "take", "give"; "give late"
    one that another stream used; "release" the cache, "settle" as the measurement does it;
    "end pool", by its number in ``pools``"""
    pools: list[Pool] = field(default_factory=list)
    """those of their own whose memory was given back"""
    late: dict[int, float] = field(default_factory=dict)
    """requests that a GPU may give back late, as another stream uses them: when at the latest"""

    def steps_with_waits(self, share: float) -> list[Step]:
        """Return the steps, where a GPU gives back late what other streams use.

        Args:
            share: of the steps that it may take at most, from 0 to 1.
        """
        times = [time for time, _, _ in self.steps]
        given = {
            number: at for at, (_, action, number) in enumerate(self.steps) if action == "give"
        }
        ends: list[Step] = []
        for number, latest in self.late.items():
            began = given[number]
            last = max(bisect_right(times, latest) - 1, began)
            ends.append((times[began + int(share * (last - began))], "give late", number))
        return sorted([*self.steps, *ends], key=lambda step: step[0])


class Free(NamedTuple):
    """A block that was given back; times are those of the history."""

    number: int | None
    """of its request; None: it was there before the run"""
    dropped: float
    """when the program dropped it"""
    given: float
    """when the allocator had it back"""
    place: int
    """of the drop in the history"""
    waited: bool | None
    """whether it waited for other streams; None: the history does not tell"""


class ScriptReader:
    """Reads one device's script from a recording."""

    def __init__(self, recording: Recording, device: int, *, retried: bool) -> None:
        self._events = recording.events[device] if device < len(recording.events) else []
        self._ours: Sequence[Span] = recording.ours
        self._emptied = recording.emptied
        self._retried = retried
        if len(self._events) > MAX_REQUESTS:
            raise NoRangeError(TOO_MANY)
        self._by_address: dict[int, list[tuple[float, int]]] = {}
        """by address: when it was given, and to which request"""
        self._dropped: dict[int, int] = {}
        """by address: the event with which the program dropped its block"""
        self._frees: list[Free] = []
        self._device = device
        self._left = sorted(
            (segment["address"], segment["address"] + segment["total_size"], pool)
            for segment in recording.snapshot.get("segments", ())
            if segment["device"] == device
            and (pool := tuple(segment.get("segment_pool_id", SHARED))) != SHARED
        )
        """memory of pools of their own that was left at the end: from, to, and the pool"""
        self._addresses = {event.get("addr") for event in self._events}

    def has(self, block: Alternative, first: int) -> bool:
        """Return whether a block is this device's; one whose place is not known is the first's."""
        if block.place is not None:
            return block.place[0] == self._device
        return block.address in self._addresses if block.address else self._device == first

    def script(
        self, blocks: Sequence[Alternative], awaited: Sequence[AllocatorEvent]
    ) -> AllocatorScript:
        """Return the script, with the sizes that blocks may have, and late frees."""
        script = self._plain()
        if awaited:
            _give_late(script, self._frees, awaited)
        _add_alternatives(script, self._by_address, blocks)
        return script

    def _plain(self) -> AllocatorScript:
        script = AllocatorScript()
        living: dict[int, int] = {}
        spans = list(self._ours)
        for at, event in enumerate(self._events):
            time = event["time_us"]
            while spans and spans[0].end < time:
                script.steps.append(self._end_of(spans.pop(0)))
            is_ours = bool(spans) and spans[0].start <= time
            self._read(script, living, at, is_ours=is_ours)
        script.steps += [self._end_of(span) for span in spans]
        return script

    def _end_of(self, span: Span) -> Step:
        """Return the steps by the end of this package's own work."""
        return span.end, "release" if span in self._emptied else "settle", 0

    def _read(
        self, script: AllocatorScript, living: dict[int, int], at: int, *, is_ours: bool
    ) -> None:
        """Put an event into a script; ``living`` has the requests by their addresses."""
        event = self._events[at]
        time, action, address = event["time_us"], event["action"], event.get("addr", 0)
        if action in {"segment_free", "segment_unmap"}:
            self._end_pool(script, event)
        if action == "free_requested":
            self._dropped[address] = at
        elif action == "free_completed":
            number = living.pop(address, None)  # None: a block of before, or a plug
            if number is not None:
                script.steps.append((time, "give", number))
            dropped = self._dropped.pop(address, at)
            self._frees.append(
                Free(
                    number,
                    self._events[dropped]["time_us"],
                    time,
                    dropped,
                    self._waited(dropped, at),
                )
            )
        elif is_ours:
            return
        elif action == "alloc":
            living[address] = number = len(script.requests)
            script.requests.append(Request(event["size"], event["stream"], self._pool_of(event)))
            script.steps.append((time, "take", number))
            self._by_address.setdefault(address, []).append((time, number))
        elif action in {"segment_free", "segment_unmap"}:
            if not self._is_retry(at) and script.steps[-1:] != [(time, "release", 0)]:
                script.steps.append((time, "release", 0))
        elif action == "oom":
            raise NoRangeError("the range is unknown: the step caught an out-of-memory error")

    def _end_pool(self, script: AllocatorScript, event: dict[str, Any]) -> None:
        """Put the end of a pool into a script, where memory of one was given back."""
        pool = self._pool_of(event)
        if pool != SHARED and pool not in script.pools[-1:]:
            script.steps.append((event["time_us"], "end pool", len(script.pools)))
            script.pools.append(pool)

    def _pool_of(self, event: dict[str, Any]) -> Pool:
        """Return the pool of an event's memory.

        The history of torch 2.10 and older does not tell: there it is the pool whose memory lies
        at the address at the end.
        """
        if "pool_id" in event:
            return tuple(event["pool_id"])
        at = bisect_right(self._left, (event["addr"], inf)) - 1
        return self._left[at][2] if at >= 0 and event["addr"] < self._left[at][1] else SHARED

    def _waited(self, dropped: int, at: int) -> bool | None:
        """Return whether a block waited for other streams, by where its two events are.

        The allocator takes a block back as it is dropped, or at the beginning of a later request.
        """
        if at - dropped > 1:
            return True
        following = self._events[at + 1]["action"] if at + 1 < len(self._events) else ""
        return False if following in {"", "free_requested"} else None

    def _is_retry(self, at: int) -> bool:
        """Return whether the allocator emptied its cache for the request that comes next."""
        if not self._retried:
            return False
        following = (event["action"] for event in self._events[at:])
        frees = {"segment_free", "segment_unmap"}
        return next((action for action in following if action not in frees), "") in {
            "segment_alloc",
            "segment_map",
        }


def _give_late(
    script: AllocatorScript, frees: Sequence[Free], awaited: Sequence[AllocatorEvent]
) -> None:
    """Put the times into a script at which a GPU gives blocks back that other streams use."""
    for free, event in _of_other_streams(frees, awaited):
        if free.number is not None and event.awaited > event.answered:
            script.late[free.number] = max(script.late.get(free.number, 0), event.awaited)


def _of_other_streams(
    frees: Sequence[Free], awaited: Sequence[AllocatorEvent]
) -> list[tuple[Free, AllocatorEvent]]:
    """Return the blocks that other streams used, each with the event that the allocator asked for.

    The history does not name them. The allocator records an event as such a block is dropped,
    before anything else gets into the history. So the order of both and their times tell the
    blocks.
    """
    candidates = [free for free in frees if free.waited is not False]
    candidates.sort(key=lambda free: free.place)
    pairs = _in_order(candidates, sorted(awaited, key=lambda event: event.recorded))
    if pairs is not None:
        return pairs
    # While a CUDA graph is captured, events are recorded later.
    apart = [free for free in candidates if free.waited]
    drops = [free.dropped for free in apart]
    places = [bisect_right(drops, event.recorded + CLOCKS) - 1 for event in awaited]
    return [(apart[at], event) for at, event in zip(places, awaited, strict=True) if at >= 0]


class _Way(NamedTuple):
    """Events with their blocks, up to one of both."""

    difference: float
    """microseconds by which the times of all pairs differ"""
    pair: tuple[Free, AllocatorEvent] | None
    before: _Way | None


def _in_order(
    frees: Sequence[Free], events: Sequence[AllocatorEvent]
) -> list[tuple[Free, AllocatorEvent]] | None:
    """Return each event with its block, both in their order, or None: there is no such way.

    Each block that is known to have waited has an event, or one for each stream that used it. Of
    the ways that this leaves, the one is returned whose times differ least.
    """
    drops = [free.dropped for free in frees]
    known_before = [-1]
    """for each block, and the end: the last one before it that is known to have waited"""
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
                difference = abs(free.dropped - event.recorded) + abs(free.given - event.answered)
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


def _add_alternatives(
    script: AllocatorScript,
    by_address: dict[int, list[tuple[float, int]]],
    blocks: Sequence[Alternative],
) -> None:
    """Put sizes into a script that blocks may have, and requests for blocks that it has not."""
    takes = [(time, number) for time, action, number in script.steps if action == "take"]
    times = [time for time, _ in takes]
    used: set[int] = set()
    added: list[tuple[Alternative, int, int]] = []
    for block in blocks:
        sizes = Sizes(
            *(block.least, block.usual, block.most),
            replaceable=block.use == "planned",
            reason=block.reason,
            counted=block.counted,
        )
        number = -1
        if block.address:
            requests = by_address.get(block.address, [])
            at = bisect_right(requests, (block.time + CLOCKS, len(script.requests))) - 1
            number = requests[at][1] if at >= 0 else -1
        if block.address and block.use in {"in use", "planned"}:
            if number >= 0:
                script.requests[number].sizes = sizes
        elif block.usual:
            number = _following(script, takes, times, block, used)
            used.add(number)
            unit = script.requests[number].size // block.usual
            script.requests[number].sizes = Sizes(
                unit * block.least, unit * block.usual, unit * block.most
            )
        else:
            last = bisect_right(times, block.time + CLOCKS) - 1
            before = takes[last][1] if last >= 0 else -1
            request = script.requests[before] if before >= 0 else Request(0, 0)
            if block.place is not None:
                request = Request(0, block.place[1])
            added.append(
                (block, len(script.requests), number if block.address else before),
            )
            script.requests.append(replace(request, size=0, sizes=sizes))
    script.steps = _with_added(script.steps, added)


def _with_added(steps: list[Step], added: Sequence[tuple[Alternative, int, int]]) -> list[Step]:
    """Return steps with those of added blocks.

    Args:
        steps: in the order of their times.
        added: each with the number of its request, and that of the block it may be kept with.
    """
    times = [time for time, _, _ in steps]
    given = {number: at for at, (_, action, number) in enumerate(steps) if action == "give"}
    placed = [((at, inf, 2), step) for at, step in enumerate(steps)]
    """steps, each with its place: the old step that it is before, its time, and an order"""
    for block, number, other in added:
        at, until = bisect_right(times, block.time), bisect_right(times, block.ended)
        is_call = block.use in {"in use", "planned"}  # the call has ended before the next one
        placed.append(((at, block.time, 0 if is_call else 1), (block.time, "take", number)))
        if is_call:
            placed.append(((at, block.time, 0), (block.time, "give", number)))
        elif block.use == "kept" and other >= 0 and given.get(other, len(steps)) >= until:
            if other in given:
                end = given[other]
                placed.append(((end + 1, -inf, 1), (times[end], "give", number)))
        elif block.use == "passing":  # the call ends before the next step
            if at < len(steps):
                placed.append(((at, inf, 1), (times[at], "give", number)))
        else:
            placed.append(((until, block.ended, 2), (block.ended, "give", number)))
    placed.sort(key=lambda entry: entry[0])
    return [step for _, step in placed]


def _following(
    script: AllocatorScript,
    takes: Sequence[tuple[float, int]],
    times: Sequence[float],
    block: Alternative,
    used: set[int],
) -> int:
    """Return the number of the request that a question for a workspace led to."""
    at = bisect_right(times, block.time - CLOCKS)
    sizes = {unit * block.usual for unit in UNITS}
    for _, number in takes[at : at + 64]:
        if number not in used and script.requests[number].size in sizes:
            return number
    raise NoRangeError("the range is unknown: a workspace was not found among the run's requests")
