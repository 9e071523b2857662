"""Separate a step's memory from foreign memory, such as what earlier tests left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.meter.allocator import settle
from pytest_gpumem.meter.peaks import MIN_PINNED, NOTHING, Held, minus, plus
from pytest_gpumem.meter.pins import FINDER, Pins, has_gaps
from pytest_gpumem.meter.plugs import Plugs
from pytest_gpumem.meter.reading import PINNED, Reading
from pytest_gpumem.notes import NoteKind, notes_of
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pytest_gpumem.notes import Note


class Isolation:
    """Divides devices' memory into the step's own, foreign memory, and plugs.

    Plugs are blocks that fill the free memory of foreign segments. The step's figures are the
    allocator's, less foreign memory and plugs. Lists have one item per device.
    """

    def __init__(self, devices: range) -> None:
        self.devices = devices
        self.plugs = Plugs(devices)
        self.initial_foreign = [NOTHING] * len(devices)
        """foreign memory when the step began, without plugs"""
        self.kept_foreign = list(self.initial_foreign)
        """foreign memory that is still allocated, including blocks that only pins keep"""
        self.returned: set[tuple[int, int]] = set()
        """(device, address) of foreign blocks that were freed to the allocator"""
        self._pins = Pins(devices, ())
        self._divided = False
        """whether foreign memory fragments expandable segments, so that the step may reserve
        more"""
        self._pinned_lost = 0
        """bytes of foreign pinned memory that were freed; PyTorch may still cache them"""

    def read(self) -> Reading:
        """Read the allocators' statistics; most of a measurement's time goes here.

        The statistics of pinned host memory, which belongs to the process, are added to the first
        device's.
        """
        all_stats = [VIEW.stats(device) for device in self.devices]
        pinned = VIEW.pinned_stats()
        if pinned.owned:
            all_stats[0][PINNED] = pinned.owned
            active, first = pinned.active["current"], self.kept_foreign[0]
            if active < first.pinned:  # foreign pinned memory was freed
                self._pinned_lost += first.pinned - active
                self.kept_foreign[0] = first._replace(pinned=active)
        return Reading.of(all_stats, self._others())

    def _others(self) -> list[Held]:
        """Return the memory that is not the step's own: foreign memory and the plugs."""
        return list(map(plus, self.kept_foreign, map(Held.blocks, self.plugs.sizes)))

    @property
    def foreign(self) -> list[Held]:
        """Foreign memory that is still referenced, without what the step has freed."""
        released = map(Held.blocks, self._pins.released_by_device())
        return list(map(minus, self.kept_foreign, released))

    def separate(self, *, count_held: bool) -> None:
        """Treat the memory held now as foreign; unused memory must have been released.

        With ``count_held``, the memory held now belongs to the step instead.
        """
        held = list(self.read().held)
        foreign = [NOTHING] * len(held) if count_held else held
        if any(peak.reserved for peak in foreign):  # else the free blocks are the step's own
            self.plugs.fill()
        blocks = {}
        if any(peak.allocated for peak in foreign):
            blocks = self.blocks()
            self._divided = has_gaps(VIEW.segments())
        self.initial_foreign, self.kept_foreign = foreign, list(foreign)
        self._pins = Pins(self.devices, blocks)

    def stop(self) -> None:
        """Release the plugs, and unpin foreign memory."""
        self._pins.stop()
        self.plugs.release()

    def adopt(self, held: Sequence[Held], blocks: Collection[tuple[int, int]]) -> None:
        """Count memory that was foreign as the step's own from now on."""
        self.initial_foreign = list(map(minus, self.initial_foreign, held))
        self.kept_foreign = list(map(minus, self.kept_foreign, held))
        self._pins.adopt(blocks)

    def is_foreign(self, place: tuple[int, int]) -> bool:
        """Return whether the block at (device, address) is foreign memory."""
        return self._pins.holds(place)

    def is_empty(self) -> bool:
        """Return whether the devices hold no memory, so that there is nothing to settle."""
        return all(peak == NOTHING for peak in self.read().held)

    def has_new_blocks(self) -> bool:
        """Return whether a block has been allocated since the last step began.

        Only then is garbage collected before the next step. With many modules loaded a collection
        takes a tenth of a second, and memory that stays allocated would cost each later test this
        time. Older memory may have become garbage, but is foreign memory either way. Any block may
        be new if the allocator does not list its blocks.
        """
        return not VIEW.backend.lists_blocks or not FINDER.remembers(self.blocks())

    def settle(self) -> bool:
        """Release the devices' unused memory, and fill the free blocks of foreign segments again.

        Returns:
            whether foreign memory that the step had freed was returned to the devices.
        """
        self.plugs.release()
        self._unpin_released()
        settle(self.devices)
        if self._unpin_released():  # blocks that the collection has just freed
            with VIEW.hidden_counters(self.devices):
                VIEW.empty_cache()
        changed = self._look_at_foreign()
        self.plugs.fill()
        return changed

    def empty_cache(self, empty: Callable[[], object]) -> tuple[object, bool]:
        """Empty the cache for the test's code, and release the foreign memory that the test freed.

        Returns:
            the result of ``empty``, the real ``torch.cuda.empty_cache``; and whether foreign memory
            was returned to the devices.
        """
        if not self._unpin_released():
            return empty(), False
        self.plugs.release(self._pins.ranges)
        result = empty()
        changed = self._look_at_foreign()
        self.plugs.fill(self._pins.ranges)
        return result, changed

    def _unpin_released(self) -> bool:
        """Unpin the foreign memory that the step has freed; return whether there was any."""
        self._pins.find_released()
        dropped = self._pins.drop()
        self.returned |= dropped
        return bool(dropped)

    def _look_at_foreign(self) -> bool:
        """Update ``kept_foreign``; return whether it has changed."""
        before = list(self.kept_foreign)
        if self._pins.ranges:
            self.kept_foreign = [
                left._replace(pinned=foreign.pinned)
                for left, foreign in zip(self._pins.update(), before, strict=True)
            ]
        return before != self.kept_foreign

    def see_lost(self) -> bool:
        """Subtract freed blocks from the foreign memory; return whether there were any.

        Pins do not keep these blocks: the step may use their memory.
        """
        lost = self._pins.lose(self.blocks)
        if not any(lost):
            return False
        self.kept_foreign = list(map(minus, self.kept_foreign, map(Held.blocks, lost)))
        return True

    @property
    def is_reserved_in_doubt(self) -> bool:
        """Whether foreign memory may have changed the bytes that the step reserved."""
        return self._divided or self.plugs.unfilled

    def notes(self, peaks: Sequence[Held]) -> list[Note]:
        """Return notes about inexact figures; ``peaks`` are the step's highest, one per device."""
        sentences = self._pins.notes()
        on_reserved = []
        unlisted = sum(peak.allocated for peak in self.initial_foreign)
        if unlisted and not VIEW.backend.lists_blocks:
            sentences.append(
                f"{VIEW.backend.title} does not list its blocks: if the test freed some of the "
                f"{format_size(unlisted)} that earlier code holds, its peaks are too low by as much"
            )
            on_reserved.append(
                "the test may have used free memory that earlier code has reserved: peak reserved "
                "may be too low"
            )
        if self.plugs.unfilled:
            on_reserved.append(
                "earlier tests left free gaps in their segments, and not all gaps could be "
                "filled: peak reserved may be wrong by up to 20.00 MiB"
            )
        # The error has a bound: even alone a step reserves no less than it allocates.
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

    def own_of(self, held: Held, device: int) -> Held:
        """Return the step's own part of the memory ``held``; all of it on a device not measured."""
        if device not in self.devices:
            return held
        return minus(held, self._others()[self.devices.index(device)])

    def blocks(self) -> dict[tuple[int, int], int]:
        """Return each live block's bytes by (device, address), foreign ones too, without plugs."""
        blocks, plugs = VIEW.live_blocks(), {*self.plugs.blocks}
        return {
            place: size
            for place, size in blocks.items()
            if place[0] in self.devices and place not in plugs
        }
