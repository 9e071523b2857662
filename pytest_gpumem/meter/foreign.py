"""Foreign memory while a step runs: frees of it are found in the allocator's history.

A figure is the allocator's less foreign memory. PyTorch's peak does not tell how much of that was
still held at the moment of the peak, so the step's own peak is replayed from the history once a
foreign block has been freed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.allocator_view import MOST_EVENTS, VIEW
from pytest_gpumem.attribution.history_replay import Replay
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.peaks import NOTHING, minus
from pytest_gpumem.sizes import MIB, format_size
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pytest_gpumem.attribution.history_replay import Block

CLEARED_AT: Final = 20_000
"""events of which the history begins anew: reading it takes time for each"""


def segments_for(sizes: Iterable[int]) -> int:
    """Return the bytes of the segments that PyTorch's allocator takes for blocks of these sizes.

    Blocks up to 1 MiB share segments of 2 MiB, those below 10 MiB share segments of 20 MiB, each
    larger one has its own; see get_allocation_size in c10/cuda/CUDACachingAllocator.cpp. The blocks
    of a kind are taken to fill their segments.
    """
    small = medium = large = 0
    for size in sizes:
        if size <= MIB:
            small += size
        elif size < 10 * MIB:
            medium += size
        else:
            large += -(-size // (2 * MIB)) * 2 * MIB
    return large + -(-small // (2 * MIB)) * 2 * MIB + -(-medium // (20 * MIB)) * 20 * MIB


class _DeviceState:
    """One device's foreign blocks, and its state when the history was last read."""

    def __init__(self, foreign: Peak, blocks: dict[int, int]) -> None:
        self.foreign = foreign
        self.blocks = blocks
        """bytes of each foreign block, by its address"""
        self.segments: list[dict[str, Any]] = []
        self.allocated = 0
        self.events_read = 0
        self.ranges: list[tuple[int, int]] = []
        """addresses of the foreign segments, from and to"""
        self.freed = False
        self.borrowed: dict[int, int] = {}
        """bytes of the step's blocks in foreign segments"""
        self.most_borrowed = 0

    def rebase(self, segments: list[dict[str, Any]]) -> None:
        """Take these segments as the state from which the next events are replayed."""
        self.segments = segments
        blocks = [block for segment in segments for block in segment["blocks"]]
        self.allocated = sum(
            block["size"] for block in blocks if block["state"] == "active_allocated"
        )

    def is_foreign(self, address: int) -> bool:
        """Return whether an address lies in a segment that held foreign blocks at first."""
        return any(start <= address < end for start, end in self.ranges)

    def replay(self, events: Sequence[dict[str, Any]], settings: dict[str, Any], plug: int) -> Peak:
        """Return the step's peak over some events, and forget the foreign blocks freed in them.

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
        foreign = self.foreign
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
                if freed.start < 0 and freed.address in self.blocks:
                    foreign = minus(foreign, Peak(self.blocks.pop(freed.address), 0))
                else:
                    allocated -= freed.size
            action = event["action"]
            if action in {"segment_free", "segment_unmap"} and self.is_foreign(event["addr"]):
                foreign = minus(foreign, Peak(0, event["size"]))
                # These addresses are no foreign segments' any more: others may come to lie there.
                start, end = event["addr"], event["addr"] + event["size"]
                pieces = [
                    piece
                    for low, high in self.ranges
                    for piece in ((low, min(high, start)), (max(low, end), high))
                ]
                self.ranges = [(low, high) for low, high in pieces if low < high]
            own_reserved = reserved + held + self.foreign.reserved - foreign.reserved
            peak = Peak(
                max(peak.allocated, allocated),
                max(peak.reserved, own_reserved + self.most_borrowed),
            )
        self.foreign = foreign
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
        self.overflowed = False
        if self.follows:
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

    def own(self, blocks: Collection[tuple[int, int]], peaks: Iterable[Peak]) -> None:
        """Take some foreign blocks and their memory for the step's own."""
        for (number, device), peak in zip(self._devices.items(), peaks, strict=True):
            device.foreign = minus(device.foreign, peak)
            for address in [address for address in device.blocks if (number, address) in blocks]:
                del device.blocks[address]

    def read(self, plugs: Sequence[int]) -> list[Peak | None]:
        """Read the history; return each device's own peak since the last reading.

        It is None where no foreign block has been freed so far: PyTorch's own peak serves then.

        Args:
            plugs: bytes of plugs on each device.
        """
        if not self.follows:
            return [None] * len(self._devices)
        # Reading makes thousands of objects: a collection that they cause would free the step's own
        # garbage earlier than without foreign memory.
        with without_collections():
            return self._read(plugs)

    def _read(self, plugs: Sequence[int]) -> list[Peak | None]:
        snapshot = VIEW.snapshot()
        if self._history_number != VIEW.history_number:
            self._history_number = VIEW.history_number
            for device in self._devices.values():
                device.events_read = 0
        peaks: list[Peak | None] = []
        for (number, device), plug in zip(self._devices.items(), plugs, strict=True):
            all_events = snapshot["device_traces"][number]
            events = all_events[device.events_read :]
            device.events_read = len(all_events)
            self.overflowed |= len(all_events) >= MOST_EVENTS
            device.freed |= any(
                event["action"] == "free_requested" and event["addr"] in device.blocks
                for event in events
            )
            peak = None
            if device.freed:
                peak = device.replay(events, snapshot.get("allocator_settings", {}), plug)
            segments = snapshot["segments"]
            device.rebase([segment for segment in segments if segment["device"] == number])
            peaks.append(peak)
        events_in_all = sum(device.events_read for device in self._devices.values())
        if events_in_all > CLEARED_AT and VIEW.clearable:
            VIEW.clear_history()
            self._history_number = VIEW.history_number
            for device in self._devices.values():
                device.events_read = 0
        return peaks

    def skip(self, plugs: Sequence[int]) -> None:
        """Read the history of the measurement's own work: no figure of the step's changes by it."""
        states = [(device, dict(device.borrowed)) for device in self._devices.values()]
        highest = self.borrowed()
        self.read(plugs)
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
