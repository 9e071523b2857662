"""Foreign memory while a step runs: frees of it are found in the allocator's history.

A figure is the allocator's less foreign memory. PyTorch's peak does not tell how much of that was
still held at the moment of the peak, and rooms that foreign blocks leave serve the step. So once a
foreign block has been freed, an allocator without foreign memory serves the history's requests.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.allocator_view import MOST_EVENTS, VIEW
from pytest_gpumem.attribution.history_replay import Replay
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.lone_allocator import (
    LARGE,
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    LoneAllocator,
    segment_size,
)
from pytest_gpumem.meter.peaks import NOTHING, minus
from pytest_gpumem.sizes import MIB, format_size
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pytest_gpumem.attribution.history_replay import Block

    _Serve = Callable[[LoneAllocator, Sequence[dict[str, Any]]], Peak | None]

FIRST_ADDRESS: Final = 1 << 46
"""below it lie the segments of a step that has had none so far: any address that is high enough"""
CLEARED_AT: Final = 20_000
"""events of which the history begins anew: reading it takes time for each"""


def segments_for(sizes: Iterable[int]) -> int:
    """Return the bytes of the segments that PyTorch's allocator takes for blocks of these sizes.

    The small blocks are taken to fill their segments, and so are those that share larger ones.
    """
    shared = {SMALL_SEGMENT: 0, LARGE_SEGMENT: 0}
    alone = 0
    for size in sizes:
        if size < LARGE:
            shared[segment_size(size)] += size
        else:
            alone += segment_size(size)
    return alone + sum(-(-nbytes // segment) * segment for segment, nbytes in shared.items())


@cache
def takes_oldest_first() -> bool:
    """Return whether PyTorch's allocator takes the oldest of free segments of one size: try it.

    Older versions take the one at the lowest address.
    """
    import torch

    def take() -> int:
        return int(torch.cuda.caching_allocator_alloc(12 * MIB, 0))

    blocks: list[int] = []
    with VIEW.hidden([0]):
        try:
            blocks = [take(), take()]
        except torch.OutOfMemoryError:
            return True
        finally:
            for block in blocks:
                torch.cuda.caching_allocator_delete(block)
        first = take()
        torch.cuda.caching_allocator_delete(first)
        VIEW.empty_cache()
    return first == blocks[0]


class _DeviceState:
    """One device's foreign blocks, and its state when the history was last read."""

    def __init__(self, foreign: Peak, blocks: dict[int, int]) -> None:
        self.foreign = foreign
        self.at_refusal: Peak | None = None
        """the foreign memory when a request was last refused"""
        self.blocks = blocks
        """bytes of each foreign block, by its address"""
        self.segments: list[dict[str, Any]] = []
        self.plugs: set[int] = set()
        """addresses of plugs in them"""
        self.allocated = 0
        self.made: dict[int, float] = {}
        """when the step's segments were made, by their addresses"""
        self.highest = 0
        """the end of the highest of the step's segments so far"""
        self.events_read = 0
        self.ranges: list[tuple[int, int]] = []
        """addresses of the foreign segments, from and to"""
        self.freed = False
        self.alone: LoneAllocator | None = None
        """the allocator as it would be without foreign memory, once some of that is freed"""
        self.borrowed: dict[int, int] = {}
        """bytes of the step's blocks in foreign segments, where ``alone`` cannot tell"""
        self.most_borrowed = 0

    def rebase(self, segments: list[dict[str, Any]], plugs: set[int]) -> None:
        """Take these segments as the state from which the next events are replayed."""
        self.segments, self.plugs = segments, plugs
        blocks = [block for segment in segments for block in segment["blocks"]]
        self.allocated = sum(
            block["size"] for block in blocks if block["state"] == "active_allocated"
        )

    def is_foreign(self, address: int) -> bool:
        """Return whether an address lies in a segment that held foreign blocks at first."""
        return any(start <= address < end for start, end in self.ranges)

    def adopt(self, addresses: Collection[int], peak: Peak) -> None:
        """Take some foreign blocks, and their segments, for the step's own."""
        self.foreign = minus(self.foreign, peak)
        adopted = [address for address in addresses if self.blocks.pop(address, None) is not None]
        for segment in self.segments:
            start, end = segment["address"], segment["address"] + segment["total_size"]
            if any(start <= address < end for address in adopted):
                self._cut(start, end)
                if self.alone is not None:
                    self.alone.add(segment, self.plugs.union(self.blocks))

    def free(self, event: dict[str, Any]) -> None:
        """Forget the foreign memory that an event ends; note it at a refusal."""
        action, address = event["action"], event.get("addr", 0)
        if action == "oom":
            self.at_refusal = self.foreign
        elif action == "free_requested":
            self.foreign = minus(self.foreign, Peak(self.blocks.pop(address, 0), 0))
        elif action in {"segment_free", "segment_unmap"} and self.is_foreign(address):
            self.foreign = minus(self.foreign, Peak(0, event["size"]))
            # These addresses are no foreign segments' any more: others may come to lie there.
            self._cut(address, address + event["size"])

    def _cut(self, start: int, end: int) -> None:
        pieces = [
            piece
            for low, high in self.ranges
            for piece in ((low, min(high, start)), (max(low, end), high))
        ]
        self.ranges = [(low, high) for low, high in pieces if low < high]

    def follow(
        self,
        events: Sequence[dict[str, Any]],
        snapshot: dict[str, Any],
        plug: int,
        serve: _Serve,
    ) -> Peak | None:
        """Return the step's peak over some events; None where no foreign block was freed so far.

        Args:
            events: the history since the last reading.
            snapshot: as of now.
            plug: bytes of plugs.
            serve: has the lone allocator serve events.
        """
        if self.alone is None:
            for event in events:
                if event["action"] == "segment_alloc":
                    self.made[event["addr"]] = event["time_us"]
                    self.highest = max(self.highest, event["addr"] + event["size"])
        begins = not self.freed and any(
            event["action"] == "free_requested" and event["addr"] in self.blocks for event in events
        )
        self.freed |= begins
        if not self.freed:
            if any(event["action"] == "oom" for event in events):
                self.at_refusal = self.foreign
            return None
        settings = snapshot.get("allocator_settings", {})
        # Of expandable segments and graphs' pools the lone allocator does not know the rules.
        exact = not any(
            segment.get("is_expandable") or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
            for segment in [*self.segments, *snapshot["segments"]]
        )
        if begins and exact:
            own = [segment for segment in self.segments if not self.is_foreign(segment["address"])]
            # A driver lays older segments above younger ones, as long as none is freed.
            own.sort(
                key=lambda segment: (self.made.get(segment["address"], 0), -segment["address"])
            )
            self.alone = LoneAllocator(
                own,
                self.plugs.union(self.blocks),
                settings,
                oldest_first=takes_oldest_first(),
            )
            self.alone.ceiling = max(self.alone.ceiling, self.highest or FIRST_ADDRESS)
        if self.alone is None or not exact:
            self.alone = None
            return self.replay(events, settings, plug)
        peak = serve(self.alone, events)
        for event in events:
            self.free(event)
        return peak

    def replay(self, events: Sequence[dict[str, Any]], settings: dict[str, Any], plug: int) -> Peak:
        """Return the step's peak over some events, and forget the foreign blocks freed in them.

        Its reserved figure is an estimate.

        Args:
            events: the history since the last reading.
            settings: the allocator's.
            plug: bytes of plugs.
        """
        history = Replay(self.segments, settings).run(events, ())
        allocated = minus(Peak(self.allocated, 0), Peak(self.foreign.allocated + plug, 0)).allocated
        reserved = sum(segment["total_size"] for segment in self.segments) - self.foreign.reserved
        starts = {block.start: block for block in history.blocks if block.start >= 0}
        ends: defaultdict[int, list[Block]] = defaultdict(list)
        for block in history.blocks:
            if block.end is not None:
                ends[block.end].append(block)
        peak = Peak(allocated, reserved + self.most_borrowed)
        foreign_reserved = self.foreign.reserved
        for index, (event, held) in enumerate(zip(events, history.reserved, strict=True)):
            allocation = starts.get(index)
            if allocation is not None:
                allocated += allocation.size
                if self.is_foreign(allocation.address):
                    self.borrowed[allocation.address] = allocation.size
                    borrowed = segments_for(self.borrowed.values())
                    self.most_borrowed = max(self.most_borrowed, borrowed)
            for freed in ends.get(index, ()):
                self.borrowed.pop(freed.address, None)
                if freed.start >= 0 or freed.address not in self.blocks:
                    allocated -= freed.size
            self.free(event)
            own_reserved = reserved + held + foreign_reserved - self.foreign.reserved
            peak = Peak(
                max(peak.allocated, allocated),
                max(peak.reserved, own_reserved + self.most_borrowed),
            )
        return peak


class ForeignMemory:
    """The foreign memory of some devices, followed until ``stop``."""

    def __init__(
        self,
        devices: range,
        foreign: Sequence[Peak],
        blocks: dict[tuple[int, int], int],
        plugs: Sequence[int],
    ) -> None:
        """Follow foreign memory; where none is allocated, this costs nothing.

        Args:
            devices: their numbers.
            foreign: the foreign memory of each.
            blocks: bytes of each foreign block, by device and address.
            plugs: bytes of plugs on each device.
        """
        self._devices = {
            device: _DeviceState(
                peak,
                {address: size for (number, address), size in blocks.items() if number == device},
            )
            for device, peak in zip(devices, foreign, strict=True)
        }
        self.follows = any(device.blocks for device in self._devices.values())
        self._history_number = -1
        self._releases = VIEW.releases
        self.overflowed = False
        self.limit: int | None = None
        """bytes that the step may reserve on each device"""
        if self.follows:
            takes_oldest_first()  # tried before the step, once a process
            VIEW.begin_history(frames=False)
            self.read(plugs)
            for device in self._devices.values():
                device.ranges = [
                    (segment["address"], segment["address"] + segment["total_size"])
                    for segment in device.segments
                    if any(
                        segment["address"] <= address < segment["address"] + segment["total_size"]
                        for address in device.blocks
                    )
                ]

    @property
    def peaks(self) -> list[Peak]:
        """The foreign memory of each device as of the last reading."""
        return [device.foreign for device in self._devices.values()]

    @property
    def alone(self) -> list[LoneAllocator | None]:
        """Each device's allocator as it would be without foreign memory, where some was freed."""
        return [device.alone for device in self._devices.values()]

    @property
    def at_refusal(self) -> list[Peak | None]:
        """Each device's foreign memory when it last refused a request that was read."""
        return [device.at_refusal for device in self._devices.values()]

    def adopt(self, blocks: Collection[tuple[int, int]], peaks: Iterable[Peak]) -> None:
        """Take some foreign blocks and their memory for the step's own."""
        for (number, device), peak in zip(self._devices.items(), peaks, strict=True):
            device.adopt([address for place, address in blocks if place == number], peak)

    def read(self, plugs: Sequence[int]) -> list[Peak | None]:
        """Read the history; return each device's own peak since the last reading.

        It is None where no foreign block has been freed so far: PyTorch's own peak serves then.

        Args:
            plugs: bytes of plugs on each device.
        """
        if not self.follows:
            return [None] * len(self._devices)
        return self._read(plugs, self._run)

    def _run(self, alone: LoneAllocator, events: Sequence[dict[str, Any]]) -> Peak:
        if self._releases != VIEW.releases:  # the history was read just before the call
            alone.release()
        alone.limit = self.limit
        return alone.run(events)

    def _read(self, plugs: Sequence[int], serve: _Serve) -> list[Peak | None]:
        # Reading makes thousands of objects: a collection that they cause would free the step's own
        # garbage earlier than without foreign memory.
        with without_collections():
            snapshot = VIEW.snapshot()
            if self._history_number != VIEW.history_number:
                self._history_number = VIEW.history_number
                for device in self._devices.values():
                    device.events_read = 0
            peaks = []
            for (number, device), plug in zip(self._devices.items(), plugs, strict=True):
                all_events = snapshot["device_traces"][number]
                self.overflowed |= len(all_events) >= MOST_EVENTS
                events = all_events[device.events_read :]
                peaks.append(device.follow(events, snapshot, plug, serve))
                device.rebase(
                    [segment for segment in snapshot["segments"] if segment["device"] == number],
                    {address for index, address in VIEW.plugs if index == number},
                )
                device.events_read = len(all_events)
            self._releases = VIEW.releases
            events_in_all = sum(device.events_read for device in self._devices.values())
            if events_in_all > CLEARED_AT and VIEW.clearable:
                VIEW.clear_history()
                self._history_number = VIEW.history_number
                for device in self._devices.values():
                    device.events_read = 0
        return peaks

    def settle(self, plugs: Sequence[int]) -> None:
        """Read the history of a settling, before which plugs were released.

        No figure of the step's changes by it.
        """
        self._read_own_work(plugs, LoneAllocator.settle)

    def plug(self, plugs: Sequence[int]) -> None:
        """Read the history of filling the rooms."""
        self._read_own_work(plugs, lambda alone, _events: alone.plug())

    def _read_own_work(self, plugs: Sequence[int], serve: _Serve) -> None:
        """Read the history of the measurement's own work."""
        states = [(device, dict(device.borrowed)) for device in self._devices.values()]
        highest = self.borrowed()
        if self.follows:
            self._read(plugs, serve)
        for (device, borrowed), most_borrowed in zip(states, highest, strict=True):
            # frees of the step's blocks count, allocations of the measurement's own do not
            device.borrowed = {
                address: size for address, size in borrowed.items() if address in device.borrowed
            }
            device.most_borrowed = most_borrowed

    def begin_anew(self) -> None:
        """Forget the foreign segments that earlier runs of the step used."""
        for device in self._devices.values():
            device.most_borrowed = segments_for(device.borrowed.values())

    def borrowed(self) -> list[int]:
        """Return the bytes of each device's reserved figure that foreign segments served."""
        return [device.most_borrowed for device in self._devices.values()]

    def notes(self) -> list[str]:
        """Return sentences about figures that frees of foreign memory make inexact."""
        sentences = []
        if self.overflowed:
            sentences.append(
                f"more than {MOST_EVENTS:,} allocations: peaks may be too low by as much as "
                "earlier tests' memory that was freed during the test"
            )
        borrowed = max(self.borrowed(), default=0)
        if borrowed:
            sentences.append(
                "memory of earlier tests was freed during the test and used again by it: up to "
                f"{format_size(borrowed)} of the peak reserved are an estimate"
            )
        return sentences

    def stop(self) -> None:
        """Follow no longer."""
        if self.follows:
            self.follows = False
            VIEW.end_history(frames=False)


def no_foreign_memory(devices: range) -> ForeignMemory:
    """Return the state of devices without foreign memory."""
    return ForeignMemory(devices, [NOTHING] * len(devices), {}, [0] * len(devices))
