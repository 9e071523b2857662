"""Separating a step's memory from foreign memory, which earlier tests left, say."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.allocator_view import VIEW, Plug
from pytest_gpumem.devices.memory_cap import device_range
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.allocator import (
    PINNED,
    allocator_stats,
    current,
    current_in,
    live_blocks,
    settle,
)
from pytest_gpumem.meter.peaks import MIN_PINNED, NOTHING, minus
from pytest_gpumem.meter.pinned import pinned_stats
from pytest_gpumem.meter.pins import FINDER, Pins, has_gaps
from pytest_gpumem.notes import NoteKind, notes_of
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pytest_gpumem.meter.allocator import Stats
    from pytest_gpumem.notes import Note


class Isolation:
    """The memory of some devices, divided: a step's own, foreign memory, and plugs in the latter.

    A figure is the allocator's, less foreign memory and plugs; lists have one item a device.
    """

    def __init__(self, devices: range) -> None:
        self.devices = devices
        self.plugs = Plugs(devices)
        self.initial_foreign = [NOTHING] * len(devices)
        """memory held by earlier tests and the like when the step began, without plugs"""
        self.kept_foreign = list(self.initial_foreign)
        """such memory that the allocators still hold, what the step has freed of it included"""
        self.returned: set[tuple[int, int]] = set()
        """device and address of foreign blocks that went back to the allocator"""
        self._pins = Pins(devices, ())
        self._divided = False
        """whether foreign memory divides expandable segments: the step may reserve more"""
        self._pinned_lost = 0
        """bytes of foreign pinned memory that was freed: the allocator may have it as yet"""

    def stats(self) -> list[Stats]:
        """Return the allocator's statistics of each device: asking takes most of a measurement.

        The first have those of pinned host memory as well, which is the whole process's.
        """
        all_stats = [allocator_stats(device) for device in self.devices]
        pinned = pinned_stats()
        if pinned.owned:
            all_stats[0][PINNED] = pinned.owned
            self._look_at_pinned(pinned.active["current"])
        return all_stats

    def _look_at_pinned(self, active: int) -> None:
        """Note that foreign pinned memory was freed, where less is active than there was of it."""
        first = self.kept_foreign[0]
        if active < first.pinned:
            self._pinned_lost += first.pinned - active
            self.kept_foreign[0] = replace(first, pinned=active)

    @property
    def foreign(self) -> list[Peak]:
        """Foreign memory that earlier tests and the like still refer to."""
        released = self._pins.released_by_device()
        return [
            minus(kept, Peak(nbytes, 0))
            for kept, nbytes in zip(self.kept_foreign, released, strict=True)
        ]

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
            self._divided = has_gaps(VIEW.segments())
        self.initial_foreign, self.kept_foreign = foreign, list(foreign)
        self._pins = Pins(self.devices, blocks)
        return all_stats

    def stop(self) -> None:
        """Give the rooms back, and keep foreign memory in place no longer."""
        self._pins.stop()
        self.plugs.release()

    def adopt(self, peaks: Sequence[Peak], blocks: Collection[tuple[int, int]]) -> None:
        """Count memory that was taken as foreign for the step's own."""
        self.initial_foreign = list(map(minus, self.initial_foreign, peaks))
        self.kept_foreign = list(map(minus, self.kept_foreign, peaks))
        self._pins.adopt(blocks)

    def is_empty(self) -> bool:
        """Return whether the devices hold no memory: there is nothing to settle."""
        return all(current_in(stats) == NOTHING for stats in self.stats())

    def has_new_blocks(self) -> bool:
        """Return whether a block is held that was not when the last step began.

        Only then garbage is collected before the next one: a collection takes a tenth of a second
        where many modules are loaded, and each test beside memory that stays would wait for it.
        Older memory may be garbage since; it is foreign memory, whatever refers to it.
        """
        return not FINDER.remembers(self.blocks())

    def settle(self) -> bool:
        """Settle the devices, with the free rooms filled anew.

        Returns:
            whether foreign memory that the step had freed went back to the devices.
        """
        self.plugs.release()
        self._let_go()
        settle(self.devices)
        if self._let_go():  # what Python's collector has just freed
            with VIEW.hidden_counters(self.devices):
                VIEW.empty_cache()
        changed = self._look_at_foreign()
        self.plugs.fill()
        return changed

    def empty_cache(self, empty: Callable[[], object]) -> tuple[object, bool]:
        """Call ``torch.cuda.empty_cache()`` for the test's code, with what it has freed.

        Args:
            empty: calls it.

        Returns:
            its result; and whether foreign memory went back to the devices.
        """
        if not self._let_go():
            return empty(), False
        self.plugs.release(self._pins.ranges)
        result = empty()
        changed = self._look_at_foreign()
        self.plugs.fill(self._pins.ranges)
        return result, changed

    def _let_go(self) -> bool:
        """Free the foreign memory that the step has freed; return whether there was any."""
        self._pins.look()
        dropped = self._pins.drop()
        self.returned |= dropped
        return bool(dropped)

    def _look_at_foreign(self) -> bool:
        """Note the foreign memory that is left; return whether it has changed."""
        before = list(self.kept_foreign)
        if self._pins.ranges:
            held, reserved = self._pins.still_held(), self._pins.still_reserved()
            pinned = (foreign.pinned for foreign in before)
            self.kept_foreign = list(map(Peak, held, reserved, pinned))
        return before != self.kept_foreign

    def see_lost(self) -> bool:
        """Note foreign memory that was freed and not kept in place; return whether there was any.

        From then on it is not subtracted.
        """
        if not self._pins.any_loose:
            return False
        lost = self._pins.lose(self.blocks())
        self.kept_foreign = [
            minus(kept, Peak(nbytes, 0))
            for kept, nbytes in zip(self.kept_foreign, lost, strict=True)
        ]
        return any(lost)

    @property
    def is_reserved_in_doubt(self) -> bool:
        """Whether the step may have reserved another figure than alone, beside foreign memory."""
        return self._divided or self.plugs.unfilled

    def notes(self, peaks: Sequence[Peak]) -> list[Note]:
        """Return notes about figures that are not exact; ``peaks`` has these, one a device."""
        sentences = self._pins.notes()
        on_reserved = []
        if self.plugs.unfilled:
            on_reserved.append(
                "earlier tests left free gaps in their segments, and not all gaps could be "
                "filled: peak reserved may be wrong by up to 20.00 MiB"
            )
        # Alone a step reserves no less than it allocates.
        more = max((peak.reserved - peak.allocated for peak in peaks), default=0)
        if self._divided and more > 0:
            on_reserved.append(
                "memory of earlier tests divides PyTorch's expandable segments: peak reserved may "
                f"be too high by up to {format_size(more)}"
            )
        if self._pinned_lost >= MIN_PINNED:
            lost = format_size(self._pinned_lost)
            sentences.append(
                f"{lost} of pinned memory of earlier tests were freed during the step: its peak "
                "pinned may be too high by as much"
            )
        return [
            *notes_of(NoteKind.EARLIER_MEMORY, sentences),
            *notes_of(NoteKind.EARLIER_SEGMENTS, on_reserved),
        ]

    def own(self, peaks: Sequence[Peak]) -> list[Peak]:
        """Subtract foreign memory and the plugs from the allocators' figures."""
        return [
            minus(minus(peak, foreign), Peak(plug, 0))
            for peak, foreign, plug in zip(peaks, self.kept_foreign, self.plugs.sizes, strict=True)
        ]

    def own_of(self, held: Peak, device: int) -> Peak:
        """Return the step's own part of what a device holds now; of others all of it."""
        if device not in self.devices:
            return held
        index = self.devices.index(device)
        return minus(minus(held, self.kept_foreign[index]), Peak(self.plugs.sizes[index], 0))

    def own_now(self) -> list[Peak]:
        """Return the step's own memory now."""
        return self.own([current_in(stats) for stats in self.stats()])

    def blocks(self) -> dict[tuple[int, int], int]:
        """Return device, address and bytes of each live block, foreign ones included, no plugs."""
        blocks = live_blocks(self.devices)
        for place in self.plugs.blocks:
            blocks.pop(place, None)
        return blocks


def _lies_in(ranges: Collection[tuple[int, int, int]] | None, device: int, address: int) -> bool:
    return ranges is None or any(
        number == device and start <= address < end for number, start, end in ranges
    )


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
        self.blocks: set[tuple[int, int]] = set()
        """device and address of each plug"""
        self.unfilled = False
        """a room could not be filled, and may save a step a part of a page"""

    def fill(self, ranges: Collection[tuple[int, int, int]] | None = None) -> None:
        """Fill every free room; given ranges, those in them: device, addresses from and to."""
        if not any(current(device).reserved for device in self._devices):
            return
        import torch

        with VIEW.hidden(self._devices):
            for (device, stream, pool), requests in self._rooms(ranges).items():
                others: list[int] = []
                # The largest first, of all segments: the best fit of each is then its own room.
                for size, fills in sorted(requests, reverse=True):
                    plug = self._taken(size, device, stream, ranges, others)
                    if plug is None:
                        self.unfilled = True
                        continue
                    VIEW.add_plug(Plug(device, plug, size, pool, fills))
                    self.blocks.add((device, plug))
                    self.sizes[self._devices.index(device)] += size
                for address in others:
                    torch.cuda.caching_allocator_delete(address)

    def _rooms(
        self, ranges: Collection[tuple[int, int, int]] | None
    ) -> dict[tuple[int, int, str], list[tuple[int, bool]]]:
        """Return the requests that fill the rooms of each device, stream and pool.

        A request has its bytes, and whether nothing is left of the room.
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
                if pool == "large_pool" and size <= SMALL:  # a request as small goes elsewhere
                    self.unfilled |= bool(segment.get("is_expandable"))
                    continue
                # A small segment serves no more than this at a time.
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
        others: list[int],
    ) -> int | None:
        """Return the address of a new block in a room to fill; None where there is none.

        Blocks that get rooms of the step's own, which fit as well, are added to ``others``.
        """
        import torch

        while True:
            reserved = current(device).reserved
            try:
                address = torch.cuda.caching_allocator_alloc(size, device, stream)
            except torch.OutOfMemoryError:
                return None
            if current(device).reserved > reserved:  # it got a segment of its own, not a room
                torch.cuda.caching_allocator_delete(address)
                VIEW.empty_cache()
                return None
            if _lies_in(ranges, device, address):
                return int(address)
            others.append(address)

    def release(self, ranges: Collection[tuple[int, int, int]] | None = None) -> None:
        """Give the rooms back; given ranges, those in them."""
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
