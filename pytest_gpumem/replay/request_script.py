"""A run's requests to PyTorch's allocator, read from the allocator's log to be repeated.

Repeating them with other sizes measures a run with those sizes: the allocator itself rounds, splits
and releases segments as it does in a run.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.meter.out_of_memory import is_out_of_memory
from pytest_gpumem.recording.allocator_log import RELEASING, RESERVING, AllocatorLog

if TYPE_CHECKING:
    from collections.abc import Collection

    from pytest_gpumem.devices.base import Alternative, RangeEnd
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Recording, Span

Pool = tuple[int, int]
"""PyTorch's id of the memory pool of a CUDA graph, or of a ``torch.cuda.MemPool``"""
SHARED: Final[Pool] = (0, 0)
"""the default pool"""
Step = tuple[float, str, int]
MAX_REQUESTS: Final = 200_000
"""A device with more events than this is not replayed: each takes some microseconds."""


@dataclass
class Request:
    """A request to the allocator."""

    size: int
    stream: int
    pool: Pool = SHARED
    block: Alternative | None = None
    """the alternative sizes; None if a GPU makes the same request"""

    def size_at(self, end: RangeEnd, without: Collection[str]) -> int:
        """Return the bytes at an end of the range; the run's if ``without`` has the reason."""
        if self.block is None or end == "usual" or self.block.reason in without:
            return self.size
        return self.block.least if end == "least" else self.block.most


@dataclass
class RequestScript:
    """The requests to one device's allocator, in order."""

    log: AllocatorLog
    requests: list[Request] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """time, action, and number of a request. "free late" frees a block that another stream used;
    "release" empties the cache; "settle" also fills the remaining free blocks, as this package does
    before it measures; "end pool" has an index in ``pools``"""
    pools: list[Pool] = field(default_factory=list)
    """private pools that released their memory"""
    late: dict[int, float] = field(default_factory=dict)
    """by request number: the latest time at which a GPU frees a block that another stream uses"""
    numbers: dict[Block, int] = field(default_factory=dict)
    """for each block of the run: the number of its request"""
    refused: bool = False
    """whether a request was refused: the run caught an out-of-memory error"""

    @classmethod
    def read(
        cls, recording: Recording, device: int, *, retried: bool = False
    ) -> RequestScript | None:
        """Read a device's script; return None if it has too many requests.

        With ``retried``, releases by which the allocator made room for the next request are left
        out: the replay's allocator decides itself.
        """
        if device < len(recording.events) and len(recording.events[device]) > MAX_REQUESTS:
            return None
        log = AllocatorLog.of(recording, device)
        script = cls(log)
        left = sorted(
            (segment["address"], segment["address"] + segment["total_size"], pool)
            for segment in recording.snapshot.get("segments", ())
            if segment["device"] == device
            and (pool := tuple(segment.get("segment_pool_id", SHARED))) != SHARED
        )
        """(start, end, pool) of private pools' segments that existed at the end"""
        spans = list(recording.own_work)
        for at, event in enumerate(log.events):
            time, action = event["time_us"], event["action"]
            while spans and spans[0].end < time:
                script._end_own_work(spans.pop(0), recording)
            pool = _pool_of(event, left) if action in RELEASING else SHARED
            if pool not in {SHARED, *script.pools[-1:]}:  # a private pool released its memory
                script.steps.append((time, "end pool", len(script.pools)))
                script.pools.append(pool)
            if (block := log.completed_frees.get(at)) in script.numbers:
                script.steps.append((time, "free", script.numbers[block]))
            elif spans and spans[0].start <= time:  # this package's own work
                continue
            elif action == "alloc":
                number = script.numbers[log.allocated[at]] = len(script.requests)
                request = Request(event["size"], event["stream"], _pool_of(event, left))
                script.requests.append(request)
                script.steps.append((time, "allocate", number))
            elif action in RELEASING and not (retried and _is_retry(log, at)):
                release = (time, "release", 0)  # one step for all segments released at this time
                script.steps += [release] * (script.steps[-1:] != [release])
            script.refused |= action == "oom"
        for span in spans:
            script._end_own_work(span, recording)
        return script

    def _end_own_work(self, span: Span, recording: Recording) -> None:
        action = "release" if span in recording.emptied else "settle"
        self.steps.append((span.end, action, 0))

    def steps_with_waits(self, share: float) -> list[Step]:
        """Return the steps with late frees of the blocks that other streams use.

        ``share``, from 0 to 1, is the fraction of the longest possible delay, in steps.
        """
        times = [time for time, _, _ in self.steps]
        given = {
            number: at for at, (_, action, number) in enumerate(self.steps) if action == "free"
        }
        ends: list[Step] = []
        for number, latest in self.late.items():
            began = given[number]
            last = max(bisect_right(times, latest) - 1, began)
            ends.append((times[began + int(share * (last - began))], "free late", number))
        return sorted([*self.steps, *ends], key=lambda step: step[0])


def _pool_of(event: dict[str, Any], left: list[tuple[int, int, Pool]]) -> Pool:
    """Return the pool of an event's memory.

    The history of torch 2.10 and older does not name the pool: then look for the pool with memory
    at this address at the end of the run.
    """
    if "pool_id" in event:
        return tuple(event["pool_id"])
    at = bisect_right(left, (event["addr"], inf)) - 1
    return left[at][2] if at >= 0 and event["addr"] < left[at][1] else SHARED


def _is_retry(log: AllocatorLog, at: int) -> bool:
    """Return whether the allocator emptied its cache for the next request."""
    following = (log.events[index]["action"] for index in range(at, len(log.events)))
    return next((action for action in following if action not in RELEASING), "") in RESERVING


class ServedRequests:
    """Live blocks of a script's repeated requests on a device, by request number."""

    def __init__(self, device: int) -> None:
        import torch

        self._allocator = torch.cuda
        self._device = device
        self.living: dict[int, int] = {}
        """the address of each block"""

    def allocate(self, number: int, size: int, stream: int) -> bool:
        """Allocate a block for a request; return whether it fitted."""
        try:
            address = self._allocator.caching_allocator_alloc(size, self._device, stream)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return False
            raise
        self.living[number] = int(address)
        return True

    def free(self, number: int) -> None:
        """Free a request's block."""
        self._allocator.caching_allocator_delete(self.living.pop(number))

    def free_all(self) -> None:
        """Free all blocks."""
        for number in list(self.living):
            self.free(number)
