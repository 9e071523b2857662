"""Separating a step's memory from foreign memory, which earlier tests left, say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.allocator_view import VIEW, Plug
from pytest_gpumem.devices.memory_cap import device_range
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.allocator import (
    allocator_stats,
    current,
    current_in,
    live_blocks,
)
from pytest_gpumem.meter.peaks import NOTHING, minus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.meter.allocator import Stats


class Isolation:
    """The memory of some devices, divided: a step's own, foreign memory, and plugs in the latter.

    A figure is the allocator's, less foreign memory and plugs; lists have one item a device.
    """

    def __init__(self, devices: range) -> None:
        self.devices = devices
        self.plugs = Plugs(devices)
        self.foreign = [NOTHING] * len(devices)
        """memory held by earlier tests and the like, without plugs"""

    def stats(self) -> list[Stats]:
        """Return the allocator's statistics of each device: asking takes most of a measurement."""
        return [allocator_stats(device) for device in self.devices]

    def separate(self, owned: Sequence[Peak] | None, *, count_held: bool) -> list[Stats]:
        """Take the memory held now as foreign, on settled devices; return the statistics then.

        Args:
            owned: memory held now that belongs to the step.
            count_held: all of it does.
        """
        all_stats = self.stats()
        held = [current_in(stats) for stats in all_stats]
        full = any(peak.reserved for peak in held)
        if count_held:
            owned = held
        self.foreign = held if owned is None else list(map(minus, held, owned))
        if not full or count_held:  # the free rooms are the step's own
            return all_stats
        self.plugs.fill()
        return self.stats()

    def adopt(self, peaks: Sequence[Peak]) -> None:
        """Count memory that was taken as foreign for the step's own."""
        self.foreign = list(map(minus, self.foreign, peaks))

    def own(self, peaks: Sequence[Peak]) -> list[Peak]:
        """Subtract foreign memory and the plugs from the allocators' figures."""
        return [
            minus(minus(peak, foreign), Peak(plug, 0))
            for peak, foreign, plug in zip(peaks, self.foreign, self.plugs.sizes, strict=True)
        ]

    def own_now(self) -> list[Peak]:
        """Return the step's own memory now."""
        return self.own([current_in(stats) for stats in self.stats()])

    def blocks(self) -> dict[tuple[int, int], int]:
        """Return device, address and bytes of each live block, foreign ones included, no plugs."""
        blocks = live_blocks(self.devices)
        for plug in self.plugs.blocks:
            blocks.pop((plug.device, plug.address), None)
        return blocks


SMALL: Final = 1 << 20
"""bytes: larger requests get no memory of a small segment (kSmallSize of PyTorch's allocator)"""


def _pieces(room: int, largest: int) -> list[int]:
    """Return sizes that fill a room, none above ``largest``."""
    return [largest] * (room // largest) + [room % largest] * (room % largest > 0)


class Plugs:
    """Blocks that fill the free rooms of foreign segments.

    A tensor that an earlier test left alive keeps its whole segment reserved, and the rest of that
    segment would serve the next step: it would reserve less than it does alone. With the rooms
    filled, a step gets all its memory from segments of its own.
    """

    def __init__(self, devices: int | range) -> None:
        """Plug some devices."""
        self._devices = device_range(devices)
        self.sizes = [0] * len(self._devices)
        """bytes of plugs on each device: they count as allocated"""
        self.blocks: list[Plug] = []

    def fill(self) -> None:
        """Fill every free room."""
        if any(current(device).reserved for device in self._devices):
            with VIEW.hidden(self._devices):
                self._fill()
            VIEW.plugs.update(self.blocks)

    def _fill(self) -> None:
        for segment in VIEW.segments():
            device, private = segment["device"], tuple(segment.get("segment_pool_id", (0, 0)))
            if device not in self._devices or private != (0, 0) or segment.get("is_expandable"):
                continue
            rooms = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
            if segment["segment_type"] == "small":  # it serves no more than this at a time
                rooms = [size for room in rooms for size in _pieces(room, SMALL)]
            for size in sorted(rooms, reverse=True):  # the best fit of each is then its own room
                self._take(size, device, segment["stream"])

    def _take(self, size: int, device: int, stream: int) -> None:
        import torch

        unplugged = current(device)
        block = torch.cuda.caching_allocator_alloc(size, device, stream)
        plugged = current(device)
        if plugged.reserved > unplugged.reserved:  # it got a segment of its own, not the room
            torch.cuda.caching_allocator_delete(block)
            torch.cuda.empty_cache()
        else:
            self.blocks.append(Plug(device, block))
            self.sizes[self._devices.index(device)] += plugged.allocated - unplugged.allocated

    def release(self) -> None:
        """Give the rooms back."""
        if not self.blocks:
            return
        import torch

        with VIEW.hidden(self._devices):
            for plug in self.blocks:
                torch.cuda.caching_allocator_delete(plug.address)
        VIEW.plugs.difference_update(self.blocks)
        self.blocks.clear()
        self.sizes = [0] * len(self.sizes)
