"""What of the memory that is held on devices belongs to a step, and what to others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.memory_cap import numbers
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.allocator import current, held_now, live_blocks, stats
from pytest_gpumem.meter.peaks import NOTHING, minus

if TYPE_CHECKING:
    from collections.abc import Sequence


class Holdings:
    """What some devices' allocators hold: a step's own, others', and the plugs between them.

    A figure is what the allocator says, less what others hold; lists have one item a device.
    """

    def __init__(self, devices: range) -> None:
        self.devices = devices
        self.plugs = Plugs(devices)
        self.others = [NOTHING] * len(devices)
        """held by others, without our plugs"""

    def stats(self) -> list[dict[str, Any]]:
        """Return the allocator's statistics of each device: asking takes most of a measurement."""
        return [stats(device) for device in self.devices]

    def separate(self, owned: Sequence[Peak] | None, *, count_held: bool) -> list[dict[str, Any]]:
        """Take what is held now for others', on settled devices; return the statistics then.

        Args:
            owned: what of it belongs to the step.
            count_held: all of it does.
        """
        found = self.stats()
        held = [held_now(it) for it in found]
        full = any(it.reserved for it in held)
        if count_held:
            owned = held
        if owned is not None:
            held = [minus(h, o) for h, o in zip(held, owned, strict=True)]
        self.others = held
        if not full or count_held:  # the rooms are the step's own
            return found
        self.plugs.fill()
        return self.stats()

    def adopt(self, peaks: Sequence[Peak]) -> None:
        """Count for the step's what was taken for others'."""
        self.others = [minus(other, it) for other, it in zip(self.others, peaks, strict=True)]

    def own(self, peaks: Sequence[Peak]) -> list[Peak]:
        """Return what is the step's of what the allocators say."""
        return [
            minus(minus(peak, other), Peak(plug, 0))
            for peak, other, plug in zip(peaks, self.others, self.plugs.sizes, strict=True)
        ]

    def own_now(self) -> list[Peak]:
        """Return what is the step's of what is held now."""
        return self.own([held_now(it) for it in self.stats()])

    def blocks(self) -> dict[tuple[int, int], int]:
        """Return device, address and bytes of each live block, others' included, plugs not."""
        plugs = set(self.plugs.blocks)
        return {it: size for it, size in live_blocks(self.devices).items() if it not in plugs}


SMALL: Final = 1 << 20
"""bytes: larger requests get no memory of a small segment (kSmallSize of PyTorch's allocator)"""


def _pieces(room: int, largest: int) -> list[int]:
    """Return sizes that fill a room, none above ``largest``."""
    return [largest] * (room // largest) + [room % largest] * (room % largest > 0)


class Plugs:
    """Fills the free rooms in segments that others hold.

    A tensor that an earlier test left alive keeps its whole segment reserved, and the rest of that
    segment would serve the next step: it would reserve less than it does alone. With the rooms
    filled, a step gets all its memory from segments of its own.
    """

    def __init__(self, devices: int | range) -> None:
        """Plug some devices."""
        self._devices = numbers(devices)
        self.sizes = [0] * len(self._devices)
        """bytes of plugs on each device: they count as allocated"""
        self.blocks: list[tuple[int, int]] = []
        """device and address of each"""

    def fill(self) -> None:
        """Fill every free room."""
        import torch

        if not any(current(device).reserved for device in self._devices):
            return
        for segment in torch.cuda.memory_snapshot():
            device, private = segment["device"], tuple(segment.get("segment_pool_id", (0, 0)))
            if device not in self._devices or private != (0, 0) or segment.get("is_expandable"):
                continue
            rooms = [b["size"] for b in segment["blocks"] if b["state"] == "inactive"]
            if segment["segment_type"] == "small":  # it serves no more than this at a time
                rooms = [size for room in rooms for size in _pieces(room, SMALL)]
            for size in sorted(rooms, reverse=True):
                self._take(size, device, segment["stream"])

    def _take(self, size: int, device: int, stream: int) -> None:
        import torch

        before = current(device)
        block = torch.cuda.caching_allocator_alloc(size, device, stream)
        after = current(device)
        if after.reserved > before.reserved:  # it did not go where the room is
            torch.cuda.caching_allocator_delete(block)
            torch.cuda.empty_cache()
        else:
            self.blocks.append((device, block))
            self.sizes[self._devices.index(device)] += after.allocated - before.allocated

    def release(self) -> None:
        """Give the rooms back."""
        if not self.blocks:
            return
        import torch

        while self.blocks:
            torch.cuda.caching_allocator_delete(self.blocks.pop()[1])
        self.sizes = [0] * len(self.sizes)
