"""Blocks that occupy the free blocks of PyTorch's allocator, so that no request gets them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.cuda_graphs import GRAPHS
from pytest_gpumem.devices.memory_cap import device_range
from pytest_gpumem.recording.allocator_log import SMALL
from pytest_gpumem.recording.allocator_view import VIEW, Plug
from pytest_gpumem.recording.collector import Uncounted

if TYPE_CHECKING:
    from collections.abc import Collection


def _reserved(device: int) -> int:
    """Return the bytes that a device's allocator has reserved."""
    stats = VIEW.stats(device)
    return int(stats["reserved_bytes"]["all"]["current"]) if "segment" in stats else 0


def _lies_in(ranges: Collection[tuple[int, int, int]] | None, device: int, address: int) -> bool:
    return ranges is None or any(
        number == device and start <= address < end for number, start, end in ranges
    )


class Plugs:
    """Blocks that fill the free blocks of foreign segments.

    A tensor that an earlier test left alive keeps its whole segment reserved, and the next step
    would get memory from the rest of that segment: it would reserve less than it does alone. With
    the free blocks filled, a step gets all its memory from segments of its own.
    """

    def __init__(self, devices: int | range) -> None:
        self._devices = device_range(devices)
        self.sizes = [0] * len(self._devices)
        """bytes of plugs on each device; the allocator counts them as allocated"""
        self.blocks: set[tuple[int, int]] = set()
        """(device, address) of each plug"""
        self.unfilled = False
        """whether a free block could not be filled: a step that uses it may reserve less"""

    def fill(self, ranges: Collection[tuple[int, int, int]] | None = None) -> None:
        """Fill every free block; given ranges (device, start, end), only those inside."""
        if not any(_reserved(device) for device in self._devices):
            return
        import torch

        with VIEW.hidden(self._devices):
            for (device, stream, pool), requests in self._rooms(ranges).items():
                misplaced: list[int] = []
                # Request the largest first, over all segments: the allocator's best fit is then the
                # block that the request is meant to fill.
                for size, fills in sorted(requests, reverse=True):
                    plug = self._taken(size, device, stream, ranges, misplaced)
                    if plug is None:
                        self.unfilled = True
                        continue
                    VIEW.add_plug(Plug(device, plug, size, pool, fills))
                    self.blocks.add((device, plug))
                    self.sizes[self._devices.index(device)] += size
                for address in misplaced:
                    torch.cuda.caching_allocator_delete(address)

    def _rooms(
        self, ranges: Collection[tuple[int, int, int]] | None
    ) -> dict[tuple[int, int, str], list[tuple[int, bool]]]:
        """Return the requests that fill the free blocks, by device, stream and pool.

        A request is a pair: its bytes, and whether it fills the rest of the block.
        """
        rooms: defaultdict[tuple[int, int, str], list[tuple[int, bool]]] = defaultdict(list)
        for segment in VIEW.segments():
            device, private = segment["device"], tuple(segment.get("segment_pool_id", (0, 0)))
            if device not in self._devices or private != (0, 0):
                continue
            pool = "small_pool" if segment["segment_type"] == "small" else "large_pool"
            end = segment["address"]
            for block in segment["blocks"]:
                address, size = end, block["size"]
                end += size
                if block["state"] != "inactive" or not _lies_in(ranges, device, address):
                    continue
                if pool == "large_pool" and size <= SMALL:  # the small pool serves such a request
                    self.unfilled |= bool(segment.get("is_expandable"))
                    continue
                # The small pool serves no larger request.
                most = SMALL if pool == "small_pool" else size
                parts = [most] * (size // most) + [size % most] * bool(size % most)
                rooms[device, segment["stream"], pool] += [
                    (part, number == len(parts)) for number, part in enumerate(parts, 1)
                ]
        return rooms

    @staticmethod
    def _taken(
        size: int,
        device: int,
        stream: int,
        ranges: Collection[tuple[int, int, int]] | None,
        misplaced: list[int],
    ) -> int | None:
        """Return the address of a new block inside the ranges; None if there is no such free block.

        Blocks that the allocator placed outside of the ranges are added to ``misplaced``.
        """
        import torch

        while True:
            reserved = _reserved(device)
            try:
                address = torch.cuda.caching_allocator_alloc(size, device, stream)
            except torch.OutOfMemoryError:
                return None
            if _reserved(device) > reserved:  # served from a new segment
                torch.cuda.caching_allocator_delete(address)
                VIEW.empty_cache()
                return None
            if _lies_in(ranges, device, address):
                return int(address)
            misplaced.append(address)

    def release(self, ranges: Collection[tuple[int, int, int]] | None = None) -> None:
        """Free the plugs; given ranges, only those inside."""
        released = [place for place in self.blocks if _lies_in(ranges, *place)]
        if not released:
            return
        import torch

        with VIEW.hidden(self._devices):
            for device, address in released:
                torch.cuda.caching_allocator_delete(address)
                self.blocks.remove((device, address))
                size = VIEW.remove_plug(device, address).size
                self.sizes[self._devices.index(device)] -= size

    def transfer(self) -> dict[tuple[int, int], int]:
        """Transfer the plugs to the caller: return the bytes of each by (device, address)."""
        sizes = {place: VIEW.remove_plug(*place).size for place in self.blocks}
        self.blocks.clear()
        self.sizes = [0] * len(self.sizes)
        return sizes


class GraphWorkspaces:
    """The cuBLAS workspaces that PyTorch has freed, but that a live CUDA graph may still write to.

    Their blocks stay allocated as long as such a graph lives, so that a replay writes to no other
    test's memory. They belong to the test, or the fixture, that captured the graph.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], int] = {}
        """bytes of each block by (device, address)"""

    def clear(self, devices: range) -> None:
        """Free all workspaces; keep the blocks of those that existed when a graph was captured."""
        import torch

        graph_blocks = GRAPHS.blocks
        for device, address in [place for place in self._kept if place not in graph_blocks]:
            torch.cuda.caching_allocator_delete(address)
            del self._kept[device, address]
        if not graph_blocks:
            VIEW.backend.clear_workspaces()
            return
        rooms, freed = Plugs(devices), Plugs(devices)
        with Uncounted():  # a collection's freed blocks would be mistaken for workspaces
            rooms.fill()  # then only the workspaces' blocks become free
            VIEW.backend.clear_workspaces()
            freed.fill()
        for (device, address), size in freed.transfer().items():
            if any(
                number == device and address <= start < address + size
                for number, start in graph_blocks
            ):
                self._kept[device, address] = size
            else:
                torch.cuda.caching_allocator_delete(address)
        rooms.release()


WORKSPACES: Final = GraphWorkspaces()
