"""Replay the allocator's history: read each event once, and follow each block's life.

The history has only requested sizes. A block is larger: its size is rounded up, and includes the
remainder that the allocator does not split off. The block's size follows from the addresses of
blocks and segments, by the rules of c10/cuda/CUDACachingAllocator.cpp (round_size, should_split).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.recording.recording import Recording, Span, Tag

RESERVING: Final = frozenset({"segment_alloc", "segment_map"})
"""actions of events in which the allocator reserves device memory"""
RELEASING: Final = frozenset({"segment_free", "segment_unmap"})
"""actions of events in which the allocator returns memory to the device"""
BLOCK: Final = 512
"""bytes; sizes are rounded up to its multiples (kMinBlockSize)"""
SMALL: Final = 1 * MIB
"""bytes; requests up to this come from segments for small blocks (kSmallSize)"""
SEGMENT: Final = 2 * MIB
"""bytes; the size of a segment for small blocks, the least that is reserved (kSmallBuffer)"""
INTERVALS: Final = 16
"""number of powers of two, from 1 MiB on, that can each have its own roundup_power2_divisions"""


@dataclass(eq=False)
class Block:
    """A block of memory from its allocation until it is freed."""

    address: int
    size: int
    """bytes, as rounded up by the allocator"""
    start: int
    """index of the event that allocated it; -1: before the history"""
    time: float
    """when it was allocated, in microseconds since 1970; -inf: before the history"""
    frames: Sequence[dict[str, Any]] = ()
    """the Python frames that allocated it, innermost first; empty where they were not recorded"""
    end: int | None = None
    """index of the event that freed it; None while it is allocated"""
    end_time: float = float("inf")
    tags: tuple[Tag, ...] = ()
    requested: int = 0
    """bytes that the program requested"""
    unsplit: int = 0
    """bytes beyond the rounded request that the allocator did not split off"""

    def alive(self, index: int) -> bool:
        """Return whether the block is live just after the event with this index."""
        return self.start <= index and (self.end is None or index < self.end)


class AllocatorLog:
    """One device's history.

    Indices are those of the device's events. A block may start later than its allocation: see
    ``of``.
    """

    def __init__(
        self,
        events: Sequence[dict[str, Any]],
        segments: Iterable[dict[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
        tags: Iterable[Tag] = (),
    ) -> None:
        """Read events and segments of ``torch.cuda.memory._snapshot``, and tags sorted by time."""
        settings = settings or {}
        self.events = events
        self.blocks: list[Block] = []
        self.times: list[float] = []
        """the time of each event, in microseconds since 1970"""
        self.reserved: list[int] = []
        """bytes reserved after each event, relative to the beginning"""
        self.allocated: dict[int, Block] = {}
        """each block of the history, by index of the event that allocated it"""
        self.completed_frees: dict[int, Block | None] = {}
        """the block of each free_completed event, by the event's index; None if the history does
        not show it"""
        self._divisions = [
            int(value) for value in (settings.get("roundup_power2_divisions") or {}).values()
        ]
        self._expandable = bool(settings.get("expandable_segments"))
        limit = settings.get("max_split_size", -1)
        self._max_split = limit if isinstance(limit, int) and limit > 0 else None
        self._bases: list[int] = []
        self._ends: dict[int, int] = {}
        self._addresses: list[int] = []
        """start addresses of the blocks in ``_placed``, sorted"""
        self._placed: dict[int, Block] = {}
        for segment in segments:
            self._map(segment["address"], segment["total_size"])
            address = segment["address"]
            for block in segment["blocks"]:
                address = block.get("address", address)
                if block["state"] != "inactive":
                    frames = block.get("frames") or ()
                    older = Block(address, block["size"], -1, float("-inf"), frames)
                    older.requested = block.get("requested_size", older.size)
                    self._place(older)
                address += block["size"]
        self._read(iter(tags))

    @classmethod
    def of(cls, recording: Recording, index: int) -> AllocatorLog:
        """Build the log of one device of a recording.

        If this run uses a block that an earlier run allocated, the block starts at the time from
        which this run uses it, and has the tensors that the earlier run saw in it.
        """
        events = recording.events[index] if index < len(recording.events) else []
        log = cls(events, recording.segments(index), recording.settings, recording.tags())
        for time, tensors in recording.reused:
            log.begin_later(time, {at[1]: tags for at, tags in tensors.items() if at[0] == index})
        return log

    def events_in(self, span: Span) -> range:
        """Return the indices of a span's events, and of the event before them.

        The memory after that event is the level at which the span begins.
        """
        first = bisect_left(self.times, span.start) - 1
        return range(first, bisect_right(self.times, span.end))

    def begin_later(self, time: float, tags: Mapping[int, tuple[Tag, ...]]) -> None:
        """Start older blocks at the time from which this run uses them.

        ``tags`` has the tensors that an earlier run saw, by address.
        """
        for block in self.blocks:
            if block.start < 0 and block.address in tags:
                block.start, block.time = max(bisect_right(self.times, time) - 1, 0), time
                block.tags = tags[block.address] + block.tags

    def _read(self, waiting: Iterator[Tag]) -> None:
        held = 0
        tag = next(waiting, None)
        for index, event in enumerate(self.events):
            time, action = event["time_us"], event["action"]
            address = event.get("addr", 0)  # an out-of-memory event has none
            while tag is not None and tag.time < time:
                self._tag(tag)
                tag = next(waiting, None)
            if action == "alloc":
                self._allocate(event, index)
            elif action == "free_requested":
                block = self._placed.get(address)
                if block is not None and block.end is None:
                    block.end, block.end_time = index, time
            elif action == "free_completed":
                self.completed_frees[index] = self._placed.get(address)
                self._remove(address)
            elif action in RESERVING:
                held += event["size"]
                self._map(address, event["size"])
            elif action in RELEASING:
                held -= event["size"]
                self._unmap(address, event["size"])
            self.times.append(time)
            self.reserved.append(held)
        while tag is not None:
            self._tag(tag)
            tag = next(waiting, None)

    # -- segments: address ranges; expandable segments grow and shrink --

    def _map(self, address: int, size: int) -> None:
        end = address + size
        at = bisect_left(self._bases, address)
        if self._expandable:
            if at < len(self._bases) and self._bases[at] == end:
                end = self._ends.pop(self._bases.pop(at))
            if at and self._ends[self._bases[at - 1]] == address:
                self._ends[self._bases[at - 1]] = end
                return
        self._bases.insert(at, address)
        self._ends[address] = end

    def _unmap(self, address: int, size: int) -> None:
        at = bisect_right(self._bases, address) - 1
        if at < 0:
            return
        base = self._bases.pop(at)
        end = self._ends.pop(base)
        if base < address:
            insort(self._bases, base)
            self._ends[base] = address
        if address + size < end:
            insort(self._bases, address + size)
            self._ends[address + size] = end

    # -- blocks --

    def _allocate(self, event: dict[str, Any], index: int) -> None:
        """Add a block: a part of a free block, or all of one that the allocator does not split."""
        address = event["addr"]
        size = least = rounded_size(event["size"], self._divisions)
        at = bisect_right(self._bases, address) - 1
        if at >= 0 and address < self._ends[self._bases[at]]:
            # the free block ends at the next block or at the end of its segment
            end = self._ends[self._bases[at]]
            following = bisect_right(self._addresses, address)
            if following < len(self._addresses):
                end = min(end, self._addresses[following])
            room = end - address
            if size <= SMALL or self._expandable:
                splits = room - size >= BLOCK
            else:
                limit = self._max_split
                splits = room - size > SMALL and (limit is None or size < limit)
            size = size if splits else room
        self._remove(address)  # an address is reused once its block is freed
        frames = event.get("frames") or ()
        block = Block(address, size, index, event["time_us"], frames)
        block.requested, block.unsplit = event["size"], size - least
        self.allocated[index] = block
        self._place(block)

    def _place(self, block: Block) -> None:
        self.blocks.append(block)
        self._placed[block.address] = block
        insort(self._addresses, block.address)

    def _remove(self, address: int) -> None:
        if self._placed.pop(address, None) is not None:
            self._addresses.pop(bisect_left(self._addresses, address))

    def _tag(self, tag: Tag) -> None:
        at = bisect_right(self._addresses, tag.address) - 1
        block = self._placed[self._addresses[at]] if at >= 0 else None
        if block is None or block.end is not None or tag.address >= block.address + block.size:
            return
        if all(
            (tag.category, tag.name) != (earlier.category, earlier.name) for earlier in block.tags
        ):
            block.tags += (tag,)


def rounded_size(size: int, divisions: Sequence[int]) -> int:
    """Round a request up to the smallest block that serves it; the allocator may use a larger one.

    ``divisions`` are those of ``roundup_power2_divisions``, one per power of two.
    """
    if size < BLOCK:
        return BLOCK
    if divisions:
        interval = min(max(size.bit_length() - MIB.bit_length(), 0), INTERVALS - 1)
        number = divisions[min(interval, len(divisions) - 1)]
        if number > 1 and size > BLOCK * number:
            return next_division(size, number)
    return -(-size // BLOCK) * BLOCK


def next_division(size: int, divisions: int) -> int:
    """Round up to the next of ``divisions`` equal steps between two powers of two."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return floor * 2 if step == 0 else -(-size // step) * step
