"""What of the memory that is held on devices belongs to a step, and what to others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.records import Peak
from pytest_gpumem.settling import Plugs, held_now, live_blocks, stats
from pytest_gpumem.tally import NOTHING, minus

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
