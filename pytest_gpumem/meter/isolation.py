"""Separating a step's memory from foreign memory, which earlier tests left, say."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from pytest_gpumem.allocator_view import VIEW, Plug
from pytest_gpumem.devices.memory_cap import device_range
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.allocator import (
    allocator_stats,
    current,
    current_in,
    live_blocks,
    peak_in,
    settle,
)
from pytest_gpumem.meter.foreign import ForeignMemory, no_foreign_memory
from pytest_gpumem.meter.peaks import NOTHING, minus, plus

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.meter.allocator import Stats


class Isolation:
    """The memory of some devices, divided: a step's own, foreign memory, and plugs in the latter.

    A figure is the allocator's, less foreign memory and plugs; lists have one item a device.
    """

    def __init__(self, devices: range) -> None:
        self.devices = devices
        self.plugs = Plugs(devices)
        self.initial_foreign = [NOTHING] * len(devices)
        """memory held by earlier tests and the like when the step began, without plugs"""
        self._foreign = no_foreign_memory(devices)

    def stats(self) -> list[Stats]:
        """Return the allocator's statistics of each device: asking takes most of a measurement."""
        return [allocator_stats(device) for device in self.devices]

    @property
    def foreign(self) -> list[Peak]:
        """Foreign memory that is still held."""
        return self._foreign.peaks

    @property
    def follows_foreign(self) -> bool:
        """Whether frees of foreign memory have to be seen, because some is held."""
        return self._foreign.follows

    def separate(
        self,
        owned: Sequence[Peak] | None,
        owned_blocks: Collection[tuple[int, int]],
        *,
        count_held: bool,
    ) -> list[Stats]:
        """Take the memory held now as foreign, on settled devices; return the statistics then.

        Args:
            owned: memory held now that belongs to the step.
            owned_blocks: device and address of its blocks.
            count_held: all of it does.
        """
        all_stats = self.stats()
        held = [current_in(stats) for stats in all_stats]
        full = any(peak.reserved for peak in held)
        if count_held:
            owned = held
        foreign = held if owned is None else list(map(minus, held, owned))
        if full and not count_held:  # else the free rooms are the step's own
            self.plugs.fill()
            all_stats = self.stats()
        blocks = {}
        if any(peak.allocated for peak in foreign):
            blocks = {
                place: size for place, size in self.blocks().items() if place not in owned_blocks
            }
        self.initial_foreign = foreign
        self._foreign = ForeignMemory(self.devices, foreign, blocks, self.plugs.sizes)
        return all_stats

    def stop(self) -> None:
        """Give the rooms back, and follow foreign memory no longer."""
        self._foreign.stop()
        self.plugs.release()

    def adopt(self, peaks: Sequence[Peak], blocks: Collection[tuple[int, int]]) -> None:
        """Count memory that was taken as foreign for the step's own."""
        self.initial_foreign = list(map(minus, self.initial_foreign, peaks))
        self._foreign.adopt(blocks, peaks)

    def own_peaks(self, all_stats: Sequence[Stats]) -> list[Peak]:
        """Return the step's own peaks, from the allocators' peaks or from their history."""
        own = self.own([peak_in(stats) for stats in all_stats])
        replayed = self._foreign.read(self.plugs.sizes)
        for device, peak in zip(self.devices, replayed, strict=True):
            if (
                peak is not None
            ):  # the allocator's peak may lie before a free, and is of no more use
                VIEW.reset_peaks(device)
        return [peak or plain for peak, plain in zip(replayed, own, strict=True)]

    def settle(self) -> None:
        """Settle the devices, with the free rooms filled anew."""
        self.plugs.release()
        settle(self.devices)
        self._foreign.settle(self.plugs.sizes)
        self.plugs.fill()
        self._foreign.plug(self.plugs.sizes)

    def begin_anew(self) -> None:
        """Forget earlier runs of the step: after a settling, which saw their blocks freed."""
        self._foreign.begin_anew()

    def notes(self) -> list[str]:
        """Return sentences about figures that are not exact."""
        sentences = self._foreign.notes()
        if self.plugs.unfilled:
            sentences.append(
                "earlier tests left free rooms in their segments that cannot be filled: peak "
                "reserved may be up to 20.00 MiB off"
            )
        return sentences

    def own(self, peaks: Sequence[Peak]) -> list[Peak]:
        """Subtract foreign memory and the plugs from the allocators' figures.

        Where foreign memory has been freed, it is the memory held at the last reading.
        """
        subtracted = [
            plus(minus(minus(peak, foreign), Peak(plug, 0)), Peak(0, borrowed))
            for peak, foreign, plug, borrowed in zip(
                peaks, self.foreign, self.plugs.sizes, self._foreign.borrowed(), strict=True
            )
        ]
        return [
            alone.held if alone else peak
            for alone, peak in zip(self._foreign.alone, subtracted, strict=True)
        ]

    def own_at_refusal(self, held: Peak, device: int) -> Peak:
        """Return the step's own part of what a device held when it refused a request."""
        alone = self._foreign.alone[device]
        if alone is not None and alone.held_at_refusal is not None:
            return alone.held_at_refusal
        # Not the foreign memory of now: some of it may have been freed since.
        foreign = self._foreign.at_refusal[device] or self.foreign[device]
        borrowed = self._foreign.borrowed()[device]
        own = minus(minus(held, foreign), Peak(self.plugs.sizes[device], 0))
        return plus(own, Peak(0, borrowed))

    def cap(self, limit: int | None) -> None:
        """Note the bytes that the step may reserve on each device."""
        self._foreign.limit = limit

    def own_now(self) -> list[Peak]:
        """Return the step's own memory now."""
        return self.own([current_in(stats) for stats in self.stats()])

    def blocks(self) -> dict[tuple[int, int], int]:
        """Return device, address and bytes of each live block, foreign ones included, no plugs."""
        blocks = live_blocks(self.devices)
        for place in self.plugs.blocks:
            blocks.pop(place, None)
        return blocks


SMALL: Final = 1 << 20
"""bytes: larger requests get no memory of a small segment (kSmallSize of PyTorch's allocator)"""


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
        self.blocks: list[tuple[int, int]] = []
        """device and address of each plug"""
        self.unfilled = False
        """a room could not be filled, and may save a step a part of a page"""

    def fill(self) -> None:
        """Fill every free room."""
        if not any(current(device).reserved for device in self._devices):
            return
        rooms: defaultdict[tuple[int, int, str], list[tuple[int, bool]]] = defaultdict(list)
        with VIEW.hidden(self._devices):
            for segment in VIEW.segments():
                device, private = segment["device"], tuple(segment.get("segment_pool_id", (0, 0)))
                if device not in self._devices or private != (0, 0):
                    continue
                pool = "small_pool" if segment["segment_type"] == "small" else "large_pool"
                for block in segment["blocks"]:
                    size = block["size"]
                    if block["state"] != "inactive":
                        continue
                    if pool == "large_pool" and size <= SMALL:  # a request as small goes elsewhere
                        self.unfilled |= bool(segment.get("is_expandable"))
                        continue
                    # A small segment serves no more than this at a time.
                    most = SMALL if pool == "small_pool" else size
                    parts = [most] * (size // most) + [size % most] * bool(size % most)
                    rooms[device, segment["stream"], pool] += [
                        (part, number == len(parts)) for number, part in enumerate(parts, 1)
                    ]
            for (device, stream, pool), requests in rooms.items():
                # The largest first, of all segments: the best fit of each is then its own room.
                for size, fills in sorted(requests, reverse=True):
                    self._take(size, device, stream, pool, fills=fills)

    def _take(self, size: int, device: int, stream: int, pool: str, *, fills: bool) -> None:
        import torch

        reserved = current(device).reserved
        address = torch.cuda.caching_allocator_alloc(size, device, stream)
        if current(device).reserved > reserved:  # it got a segment of its own, not the room
            torch.cuda.caching_allocator_delete(address)
            VIEW.empty_cache()
            self.unfilled = True
        else:
            VIEW.add_plug(Plug(device, address, size, pool, fills))
            self.blocks.append((device, address))
            self.sizes[self._devices.index(device)] += size

    def release(self) -> None:
        """Give the rooms back."""
        if not self.blocks:
            return
        import torch

        with VIEW.hidden(self._devices):
            for device, address in self.blocks:
                torch.cuda.caching_allocator_delete(address)
                VIEW.remove_plug(device, address)
        self.blocks.clear()
        self.sizes = [0] * len(self.sizes)
