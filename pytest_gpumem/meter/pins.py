"""Pins keep foreign memory where it is until the step has ended.

Foreign memory that a step frees (it empties an earlier test's list, say) would leave rooms in which
the allocator serves the step: it would reserve less than alone, and a limit would not hold. So the
measurement has a reference of its own to each foreign block's storage. Memory that the step frees
stays in place, and the step gets all its memory from segments of its own, as alone. Figures that
the test's code reads have it as free rooms, and ``torch.cuda.empty_cache()`` gives it back.
"""

from __future__ import annotations

import os
import re
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.devices.cuda_start import SETTINGS
from pytest_gpumem.recording.allocator_log import SEGMENT
from pytest_gpumem.recording.allocator_view import VIEW, Plug
from pytest_gpumem.recording.graphs import graph_tensors
from pytest_gpumem.recording.plain_tensors import live_tensors, place_of
from pytest_gpumem.sizes import MIB, format_size
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, UntypedStorage
    from torch.utils.weak import TensorWeakRef

    Place = tuple[int, int]
    """device and address of a block"""

LARGE_SEGMENTS: Final = re.compile(r"large_segment_size_mb:(\d+)")
"""PyTorch's setting of the size of large pages; 20 MiB without"""
OURS: Final = 1
"""references to a storage that nothing but a pin keeps"""


class _Pin(NamedTuple):
    """A reference to the storage of a foreign block."""

    storage: UntypedStorage
    plug: Plug
    """the block, as it is shown once the step has freed it"""


class Pins:
    """The pins in the foreign memory of some devices, until ``stop``."""

    def __init__(self, devices: range, foreign: Collection[Place]) -> None:
        """Pin foreign blocks, each given by device and address; without any, this costs nothing."""
        self._devices = devices
        self._pins: dict[Place, _Pin] = {}
        self._deaths: list[weakref.ref[Tensor]] = []
        """finalizers that tell when a tensor dies: its memory may be free from then on"""
        self.released: dict[Place, _Pin] = {}
        """pins in blocks that the step has freed"""
        self._loose: dict[Place, int] = {}
        """bytes of each block that no Python object leads to: nothing keeps them in place"""
        self._lost = 0
        """bytes of them that are freed"""
        self.ranges: list[tuple[int, int, int]] = []
        """each foreign segment, or page of an expandable one: its device, addresses from and to"""
        if not foreign:
            return
        plugs: dict[Place, Plug] = {}
        with without_collections():
            for segment in VIEW.segments():
                device, address, size = segment["device"], segment["address"], segment["total_size"]
                pool = "small_pool" if segment["segment_type"] == "small" else "large_pool"
                blocks: dict[Place, Plug] = {}
                """the allocated ones, as plugs that are shown once they are freed"""
                begin = address
                for block in segment["blocks"]:
                    nbytes, place = block["size"], (device, begin)
                    if block["state"] == "active_allocated" and place not in VIEW.plugs:
                        requested, split = block.get("requested_size", nbytes), nbytes < size
                        blocks[place] = Plug(
                            *place, nbytes, pool, fills=True, requested=requested, split=split
                        )
                    begin += nbytes
                if not blocks.keys() <= set(foreign):
                    continue  # a segment of a fixture's that the step owns
                edges = range(address, address + size, page_size(segment) or size)
                self.ranges += [(device, at, min(at + edges.step, address + size)) for at in edges]
                if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0):
                    plugs |= blocks
                else:  # its rooms serve no other pool, and compiled graphs count references
                    self._loose.update((place, plug.size) for place, plug in blocks.items())
            for place, tensor in FINDER.tensors_at(plugs):
                if place not in self._pins:
                    self._pins[place] = _Pin(tensor.untyped_storage(), plugs[place])
                # The last tensor of a block dies with it. What a graph saved has no such moment.
                self._deaths.append(weakref.ref(tensor, partial(self._see_death, place)))
            self._loose |= {
                place: plug.size for place, plug in plugs.items() if place not in self._pins
            }
        VIEW.add_reader(self.look)

    def stop(self) -> None:
        """Keep no foreign memory in place any more."""
        VIEW.remove_reader(self.look)
        self._deaths.clear()
        self.drop()
        self._pins.clear()

    # -- what the step has freed --

    def _see_death(self, place: Place, _tensor: object) -> None:
        pin = self._pins.get(place)
        if pin is not None and _references(pin.storage) <= OURS + 1:  # the dying tensor has one
            self._release([place])

    def look(self) -> None:
        """Note the blocks that the step has freed since the last look."""
        places = [place for place, pin in self._pins.items() if _references(pin.storage) <= OURS]
        if places:
            self._release(places)

    def _release(self, places: Iterable[Place]) -> None:
        pins = {place: self._pins.pop(place) for place in places}
        VIEW.show_freed([pin.plug for pin in pins.values()])
        self.released |= pins

    def drop(self) -> set[Place]:
        """Let go of the blocks that the step has freed; return device and address of each."""
        plugs = {place: pin.plug for place, pin in self.released.items()}
        self.released.clear()  # now they are free rooms of the allocator's
        VIEW.hide_freed(list(plugs.values()))
        return set(plugs)

    def released_by_device(self) -> list[int]:
        """Return the bytes on each device that the step has freed, and that are kept in place."""
        self.look()
        return self._by_device({place: pin.plug.size for place, pin in self.released.items()})

    def _by_device(self, sizes: Mapping[Place, int]) -> list[int]:
        """Return the bytes of some blocks on each device."""
        return [
            sum(size for place, size in sizes.items() if place[0] == device)
            for device in self._devices
        ]

    def holds(self, place: Place) -> bool:
        """Return whether a foreign block lies at this place."""
        return place in self._pins or place in self._loose

    # -- foreign memory that becomes something else --

    def adopt(self, blocks: Collection[Place]) -> None:
        """Let go of blocks that are the step's own from now on, with their segments or pages."""
        sizes = {place: pin.plug.size for place, pin in self._pins.items()} | self._loose
        for place in blocks:
            self._pins.pop(place, None)
            self._loose.pop(place, None)
        self.ranges = [
            (device, start, end)
            for device, start, end in self.ranges
            if not any(
                number == device and at < end and start < at + sizes.get((number, at), 1)
                for number, at in blocks
            )
        ]

    def still_held(self) -> list[int]:
        """Return the bytes of foreign blocks on each device that the step has not freed."""
        pinned = {place: pin.plug.size for place, pin in self._pins.items()}
        return self._by_device(pinned | self._loose)

    def still_reserved(self) -> list[int]:
        """Return the bytes of foreign segments that the allocator still has, of each device."""
        segments = [
            (segment["device"], segment["address"], segment["address"] + segment["total_size"])
            for segment in VIEW.segments()
        ]
        # Addresses that went back are no foreign segments' any more: others may come to lie there.
        self.ranges = [
            (device, max(start, low), min(end, high))
            for device, start, end in self.ranges
            for number, low, high in segments
            if number == device and low < end and start < high
        ]
        return [
            sum(end - start for number, start, end in self.ranges if number == device)
            for device in self._devices
        ]

    # -- blocks that could not be pinned --

    def lose(self, live: Mapping[Place, int]) -> list[int]:
        """Return the bytes of unpinned blocks on each device that were freed since the last call.

        ``live`` has device, address and bytes of each block that is allocated now.
        """
        gone = {place: size for place, size in self._loose.items() if live.get(place) != size}
        gone |= {
            place: pin.plug.size
            for place, pin in self._pins.items()
            if pin.storage.data_ptr() != place[1]  # resized, as FSDP frees its parameters
        }
        for place in gone:
            self._loose.pop(place, None)
            self._pins.pop(place, None)
        self._lost += sum(gone.values())
        return self._by_device(gone)

    @property
    def any_loose(self) -> bool:
        """Whether a block may be freed without being kept in place."""
        return bool(self._loose)

    def notes(self) -> list[str]:
        """Return a sentence about memory that could not be kept in place."""
        if not self._lost:
            return []
        sentence = (
            f"the test freed {format_size(self._lost)} of earlier tests' memory that no "
            "Python object referred to: peaks may be wrong by this amount"
        )
        return [sentence]


def _references(storage: UntypedStorage) -> int:
    import torch

    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def page_size(segment: dict[str, Any]) -> int:
    """Return the bytes of a segment's pages; 0 if it is not expandable: it goes as a whole.

    An expandable segment has the memory of all owners; its pages come and go by themselves.
    """
    if not segment.get("is_expandable"):
        return 0
    if segment["segment_type"] == "small":
        return SEGMENT
    settings = (os.environ.get(name, "") for name in SETTINGS)
    declared = next(filter(None, map(LARGE_SEGMENTS.search, settings)), None)
    return int(declared[1]) * MIB if declared else 20 * MIB


def has_gaps(segments: Sequence[dict[str, Any]]) -> bool:
    """Return whether expandable segments may have gaps without memory beside memory.

    PyTorch maps memory at a gap that a request fits. The request takes whole pages, and the rest of
    the last page serves a later request if the gap goes on behind the page. Free memory in a gap
    does not join free memory elsewhere. Alone a step has no such gaps: it maps one page after the
    other. Nothing tells where a segment begins: a gap may also lie before its first memory.
    """
    return any(page_size(segment) for segment in segments)


class _Finder:
    """Finds the tensors in blocks, and remembers them: a suite's next test has the same ones."""

    def __init__(self) -> None:
        self._known: dict[Place, list[TensorWeakRef]] = {}
        self._missing: set[Place] = set()
        """blocks in which the last search found none"""

    def tensors_at(self, places: Collection[Place]) -> Iterator[tuple[Place, Tensor]]:
        """Yield the tensors with storages at these places, also those that graphs have saved."""
        known = self._remembered(places)
        missing = {place for place in places if not known.get(place)}
        if missing != self._missing:
            import torch
            from torch.utils.weak import TensorWeakRef

            known = {place: [] for place in places}
            live = live_tensors()
            for tensor in live:
                known.get(place_of(tensor), []).append(tensor)
            visited: set[Any] = set()
            with torch._C.DisableTorchFunctionSubclass():
                for tensor in live:
                    for saved in graph_tensors(tensor, visited):
                        known.get(place_of(saved), []).append(saved)
            self._known = {place: [*map(TensorWeakRef, found)] for place, found in known.items()}
            self._missing = {place for place in places if not known.get(place)}
        for place, tensors in known.items():
            yield from ((place, tensor) for tensor in tensors)

    def remembers(self, places: Collection[Place]) -> bool:
        """Return whether the tensors are alive that the last search found, at all these places."""
        return all(self._remembered(places).values())

    def forget(self, places: Iterable[Place]) -> None:
        """Search for tensors at these places the next time."""
        for place in places:
            self._known.pop(place, None)

    def _remembered(self, places: Collection[Place]) -> dict[Place, list[Tensor]]:
        known = {}
        for place in places:
            tensors = [reference() for reference in self._known.get(place, ())]
            known[place] = [
                tensor for tensor in tensors if tensor is not None and place_of(tensor) == place
            ]
        return known


FINDER: Final = _Finder()
