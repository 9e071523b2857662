"""PyTorch's caching allocator as it would be if the step had been alone: by the step's requests.

Blocks that earlier tests left and free during a step leave rooms in which the allocator serves the
step. Alone it would have taken segments of its own. The requests in the allocator's history, served
anew by the allocator's rules, tell its figures then; see c10/cuda/CUDACachingAllocator.cpp
(get_free_block, alloc_block, should_split, release_cached_blocks).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.attribution.history_replay import BLOCK, SMALL, rounded_size
from pytest_gpumem.measurement import Peak
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

SMALL_SEGMENT: Final = 2 * MIB
"""bytes: the segments of requests up to SMALL (kSmallBuffer)"""
LARGE_SEGMENT: Final = 20 * MIB
"""bytes: the segments of requests below LARGE (kLargeBuffer)"""
LARGE: Final = 10 * MIB
"""bytes: requests from this on have segments of their own (kMinLargeAlloc)"""
ROUNDED_TO: Final = 2 * MIB
"""bytes: such segments are multiples of it (kRoundLarge)"""
FLOOR: Final = 1 << 45
"""where small blocks' segments begin in a step that has had none so far: any page will do"""


def segment_size(size: int) -> int:
    """Return the bytes of the segment that the allocator takes for a block of that size."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE:
        return LARGE_SEGMENT
    return -(-size // ROUNDED_TO) * ROUNDED_TO


@dataclass(eq=False)
class _Piece:
    """A piece of a segment: a block, or a room between blocks."""

    address: int
    size: int
    segment: _Segment
    free: bool = True
    plug: bool = False
    counted: bool = False
    """whether it counts as allocated"""
    previous: _Piece | None = None
    following: _Piece | None = None

    @property
    def rank(self) -> tuple[int, int, int]:
        """Its place among the free rooms of a pool (BlockComparatorSize)."""
        return self.size, self.segment.number, self.address


@dataclass(eq=False)
class _Segment:
    size: int
    pool: tuple[int, bool]
    """its stream, and whether it is for small requests"""
    number: int
    """in the order in which segments were made; 0 where that does not count"""


class LoneAllocator:
    """The caching allocator of one device with nothing but the step's own memory.

    It serves the requests of :meth:`run`. Where it chooses between free rooms of one size in
    segments that two threads made, PyTorch may choose another one.
    """

    def __init__(
        self,
        segments: Iterable[dict[str, Any]],
        plugs: Collection[int],
        settings: dict[str, Any],
        *,
        oldest_first: bool,
    ) -> None:
        """Begin with the step's segments as they are.

        Args:
            segments: the step's own, as in a snapshot, in the order in which they were made.
            plugs: addresses of blocks that fill rooms.
            settings: the allocator's.
            oldest_first: of free rooms of one size the allocator takes that of the oldest segment;
                else, as older versions of PyTorch, that of the lowest address.
        """
        self._oldest_first = oldest_first
        self._made = 0
        divisions = settings.get("roundup_power2_divisions") or {}
        self._divisions = [int(value) for value in divisions.values()]
        limit = settings.get("max_split_size", -1)
        self._most_split = limit if isinstance(limit, int) and limit > 0 else None
        rounding = settings.get("max_round_threshold", -1)
        self._most_rounding = rounding if isinstance(rounding, int) and rounding > 0 else 20 * MIB
        self._rooms: dict[tuple[int, bool], list[tuple[int, int, int]]] = {}
        """of each pool, its free rooms in the order in which they serve requests"""
        self._free: dict[int, _Piece] = {}
        """free rooms by their address here"""
        self._blocks: dict[int, _Piece] = {}
        """the step's live blocks, by their address in the history"""
        self._plugs: list[_Piece] = []
        self._segments: list[tuple[int, int]] = []
        """addresses of its segments, from and to, sorted"""
        self.ceiling = 0
        """the address below which its segments lie"""
        self._floor = FLOOR
        """the address from which those of small blocks lie upwards"""
        self.limit: int | None = None
        """bytes that the step may reserve"""
        self.held = Peak(0, 0)
        self.held_at_refusal: Peak | None = None
        """the memory held when a request was last refused"""
        for segment in segments:
            self.add(segment, plugs)

    def add(self, segment: dict[str, Any], plugs: Collection[int]) -> None:
        """Take a segment as it is for the step's own."""
        record = self._map(
            segment["address"],
            segment["total_size"],
            (segment["stream"], segment["segment_type"] == "small"),
        )
        address, previous = segment["address"], None
        for block in segment["blocks"]:
            piece = _Piece(address, block["size"], record, previous=previous)
            if previous is not None:
                previous.following = piece
            previous = piece
            if block["state"] == "inactive":
                self._add_room(piece)
            else:
                self._take(piece)
                if address in plugs:
                    piece.plug = True
                    self._plugs.append(piece)
                else:
                    self._blocks[address] = piece
                    if block["state"] == "active_allocated":
                        piece.counted = True
                        self._count(piece.size, 0)
            address += block["size"]

    # -- the history --

    def run(self, events: Iterable[dict[str, Any]]) -> Peak:
        """Serve the requests of one device's history; return the highest figures."""
        peak = self.held
        released = False
        for event in events:
            action = event["action"]
            if action == "alloc":
                self._allocate(event, released=released)
                peak = Peak(
                    max(peak.allocated, self.held.allocated),
                    max(peak.reserved, self.held.reserved),
                )
            elif action in {"free_requested", "free_completed"}:
                self._free_block(event["addr"], completed=action == "free_completed")
            elif action == "oom":
                self.release()
                self.held_at_refusal = self.held
            released = action == "segment_free" or (released and action == "segment_alloc")
        return peak

    def settle(self, events: Iterable[dict[str, Any]]) -> None:
        """Take the frees of a history of the measurement's own work, which settled the device."""
        self._unplug()
        for event in events:
            if event["action"] in {"free_requested", "free_completed"}:
                self._free_block(event["addr"], completed=event["action"] == "free_completed")
        self.release()

    def _allocate(self, event: dict[str, Any], *, released: bool) -> None:
        """Serve a request; ``released``: the allocator emptied its cache in order to serve it."""
        size = rounded_size(event["size"], self._divisions)
        pool = event["stream"], size <= SMALL
        piece = self._best_fit(pool, size)
        if piece is None:
            needed = segment_size(size)
            full = self.limit is not None and self.held.reserved + needed > self.limit
            if released or full:
                self.release()
            piece = self._new_segment(pool, needed)
        self._take(piece)
        rest = piece.size - size
        if self._splits(pool, size, rest):
            room = _Piece(
                piece.address + size,
                rest,
                piece.segment,
                previous=piece,
                following=piece.following,
            )
            if piece.following is not None:
                piece.following.previous = room
            piece.following, piece.size = room, size
            self._add_room(room)
        piece.counted = True
        self._count(piece.size, 0)
        self._blocks[event["addr"]] = piece

    def _splits(self, pool: tuple[int, bool], size: int, rest: int) -> bool:
        _, small = pool
        if small:
            return rest >= BLOCK
        return rest > SMALL and (self._most_split is None or size < self._most_split)

    def _best_fit(self, pool: tuple[int, bool], size: int) -> _Piece | None:
        rooms = self._rooms.get(pool, [])
        at = bisect_left(rooms, (size, 0, 0))
        if at == len(rooms):
            return None
        room_size, _, address = rooms[at]
        if self._most_split is not None:
            if size < self._most_split <= room_size:
                return None
            if size >= self._most_split and room_size >= size + self._most_rounding:
                return None
        return self._free[address]

    def _new_segment(self, pool: tuple[int, bool], size: int) -> _Piece:
        # As CUDA's driver has them on Linux: those of small blocks at the lowest free addresses,
        # larger ones at the upper end of the highest.
        if size == SMALL_SEGMENT:
            address = self._floor
            for low, high in self._segments:
                if address < high and low < address + size:
                    address = high
        else:
            end = self.ceiling
            for low, high in reversed(self._segments):
                if end - high >= size:
                    break
                end = low
            address = end - size
        piece = _Piece(address, size, self._map(address, size, pool))
        self._add_room(piece)
        return piece

    def _map(self, address: int, size: int, pool: tuple[int, bool]) -> _Segment:
        insort(self._segments, (address, address + size))
        if size == SMALL_SEGMENT:
            self._floor = min(self._floor, address)
        self.ceiling = max(self.ceiling, address + size)
        self._count(0, size)
        self._made += 1
        return _Segment(size, pool, self._made if self._oldest_first else 0)

    def _free_block(self, address: int, *, completed: bool) -> None:
        piece = self._blocks.get(address)
        if piece is None:
            return  # foreign memory, or the measurement's own
        if piece.counted:
            piece.counted = False
            self._count(-piece.size, 0)
        if completed:
            del self._blocks[address]
            self._join(piece)

    def _join(self, piece: _Piece) -> None:
        """Make a piece a free room, with the free ones beside it."""
        for beside in (piece.previous, piece.following):
            if beside is None or not beside.free:
                continue
            self._take(beside)
            first, second = (beside, piece) if beside is piece.previous else (piece, beside)
            first.size += second.size
            first.following = second.following
            if second.following is not None:
                second.following.previous = first
            piece = first
        self._add_room(piece)

    def release(self) -> None:
        """Give every segment back that has no block, as ``empty_cache`` does."""
        for address, piece in list(self._blocks.items()):
            if not piece.counted:  # it waits for a stream, which is synchronized first
                del self._blocks[address]
                self._join(piece)
        for piece in list(self._free.values()):
            if piece.size == piece.segment.size:
                self._take(piece)
                self._segments.remove((piece.address, piece.address + piece.size))
                self._count(0, -piece.size)

    def plug(self) -> None:
        """Fill all rooms, which serve nothing until :meth:`settle`."""
        for piece in list(self._free.values()):
            self._take(piece)
            piece.plug = True
            self._plugs.append(piece)

    def _unplug(self) -> None:
        for piece in self._plugs:
            piece.plug = False
        plugs, self._plugs = self._plugs, []
        for piece in plugs:
            self._join(piece)

    # -- bookkeeping --

    def _add_room(self, piece: _Piece) -> None:
        piece.free = True
        insort(self._rooms.setdefault(piece.segment.pool, []), piece.rank)
        self._free[piece.address] = piece

    def _take(self, piece: _Piece) -> None:
        piece.free = False
        if self._free.pop(piece.address, None) is not None:
            rooms = self._rooms[piece.segment.pool]
            del rooms[bisect_left(rooms, piece.rank)]

    def _count(self, allocated: int, reserved: int) -> None:
        self.held = Peak(self.held.allocated + allocated, self.held.reserved + reserved)
