"""Pin foreign memory: keep it allocated until the step has ended.

If a step frees foreign memory (it empties an earlier test's list, say), the allocator would reuse
these blocks for the step: it would reserve less than alone, and a limit would not hold. So the
measurement keeps its own reference to each foreign block's storage. Memory that the step frees
stays in place, and the step gets all its memory from segments of its own, as alone. The test's code
sees such memory as free blocks, and ``torch.cuda.empty_cache()`` releases it.
"""

from __future__ import annotations

import os
import re
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.devices.cuda_start import SETTINGS
from pytest_gpumem.meter.peaks import Held
from pytest_gpumem.recording.allocator_log import SEGMENT
from pytest_gpumem.recording.allocator_view import VIEW, Plug
from pytest_gpumem.recording.graphs import graph_tensors
from pytest_gpumem.recording.plain_tensors import live_tensors, place_of
from pytest_gpumem.sizes import MIB, format_size
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, UntypedStorage
    from torch.utils.weak import TensorWeakRef

    BlockKey = tuple[int, int]

LARGE_SEGMENTS: Final = re.compile(r"large_segment_size_mb:(\d+)")
"""PyTorch's setting of an expandable segment's page size; the default is 20 MiB"""
OWN_REFERENCES: Final = 1
"""reference count of a storage that only a pin refers to"""


class _Pin(NamedTuple):
    """A reference to the storage of a foreign block."""

    storage: UntypedStorage
    plug: Plug
    """the record that makes the block look free to the test's code, once the step has freed it"""


class Pins:
    """Pins the foreign memory of devices until ``stop``."""

    def __init__(self, devices: range, foreign: Collection[BlockKey]) -> None:
        """Pin foreign blocks; without any, this costs nothing."""
        self._devices = devices
        self._pins: dict[BlockKey, _Pin] = {}
        self._deaths: list[weakref.ref[Tensor]] = []
        """weak references whose callbacks check whether the step has just freed a block"""
        self.released: dict[BlockKey, _Pin] = {}
        """pins of blocks that the step has freed"""
        self._loose: dict[BlockKey, int] = {}
        """bytes of each block that could not be pinned: no Python object refers to it"""
        self._lost = 0
        """bytes of foreign blocks that pins did not keep: unpinned, or with a resized storage"""
        self.ranges: list[tuple[int, int, int]] = []
        """(device, start, end) of each foreign segment, or of each page of an expandable segment"""
        if not foreign:
            return
        plugs: dict[BlockKey, Plug] = {}
        with without_collections():
            for segment in VIEW.segments():
                device, address, size = segment["device"], segment["address"], segment["total_size"]
                pool = "small_pool" if segment["segment_type"] == "small" else "large_pool"
                blocks: dict[BlockKey, Plug] = {}
                """the allocated blocks, each with its plug (see ``_Pin``)"""
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
                    continue  # a block is not foreign, for example on a device not measured
                edges = range(address, address + size, page_size(segment) or size)
                self.ranges += [(device, at, min(at + edges.step, address + size)) for at in edges]
                if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0):
                    plugs |= blocks
                # Blocks of a private pool are not pinned: the pool serves no other requests, and
                # compiled graphs check their storages' use counts, which a pin would raise.
                else:
                    self._loose.update((place, plug.size) for place, plug in blocks.items())
            for place, tensor in FINDER.tensors_at(plugs):
                if place not in self._pins:
                    self._pins[place] = _Pin(tensor.untyped_storage(), plugs[place])
                # A block is freed when its last tensor dies. The death of a tensor that only a
                # graph saved is not reported: find_released() finds its block.
                self._deaths.append(weakref.ref(tensor, partial(self._see_death, place)))
            self._loose |= {
                place: plug.size for place, plug in plugs.items() if place not in self._pins
            }
        VIEW.add_reader(self.find_released)

    def stop(self) -> None:
        """Release all pins."""
        VIEW.remove_reader(self.find_released)
        self._deaths.clear()
        self.drop()
        self._pins.clear()

    # -- what the step has freed --

    def _see_death(self, place: BlockKey, _tensor: object) -> None:
        pin = self._pins.get(place)
        dying = 1  # the dying tensor still holds a reference
        if pin is not None and _references(pin.storage) <= OWN_REFERENCES + dying:
            self._release([place])

    def find_released(self) -> None:
        """Find the blocks that the step has freed since the last call."""
        places = [
            place for place, pin in self._pins.items() if _references(pin.storage) <= OWN_REFERENCES
        ]
        if places:
            self._release(places)

    def _release(self, places: Iterable[BlockKey]) -> None:
        pins = {place: self._pins.pop(place) for place in places}
        VIEW.show_freed([pin.plug for pin in pins.values()])
        self.released |= pins

    def drop(self) -> set[BlockKey]:
        """Unpin the blocks that the step has freed; return (device, address) of each."""
        plugs = {place: pin.plug for place, pin in self.released.items()}
        self.released.clear()  # deletes the last references: the blocks are free now
        VIEW.hide_freed(list(plugs.values()))
        return set(plugs)

    def released_by_device(self) -> list[int]:
        """Return the bytes on each device that the step has freed and that are still pinned."""
        self.find_released()
        return self._by_device({place: pin.plug.size for place, pin in self.released.items()})

    def _by_device(self, sizes: Mapping[BlockKey, int]) -> list[int]:
        return [
            sum(size for place, size in sizes.items() if place[0] == device)
            for device in self._devices
        ]

    def holds(self, place: BlockKey) -> bool:
        """Return whether a foreign block begins at this address."""
        return place in self._pins or place in self._loose

    # -- foreign memory that becomes something else --

    def adopt(self, blocks: Collection[BlockKey]) -> None:
        """Unpin blocks that belong to the step from now on; their ranges are no longer foreign."""
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

    def update(self) -> list[Held]:
        """Forget segments that were released; return the memory that is still foreign, by device.

        That is the blocks that the step has not freed, and their segments; no pinned host memory.
        """
        segments = [
            (segment["device"], segment["address"], segment["address"] + segment["total_size"])
            for segment in VIEW.segments()
        ]
        # Forget addresses that were released: new segments may be placed there.
        self.ranges = [
            (device, max(start, low), min(end, high))
            for device, start, end in self.ranges
            for number, low, high in segments
            if number == device and low < end and start < high
        ]
        reserved = [
            sum(end - start for number, start, end in self.ranges if number == device)
            for device in self._devices
        ]
        blocks = {place: pin.plug.size for place, pin in self._pins.items()} | self._loose
        return [
            Held.blocks(nbytes)._replace(reserved=in_segments)
            for nbytes, in_segments in zip(self._by_device(blocks), reserved, strict=True)
        ]

    # -- blocks that could not be pinned --

    def lose(self, live: Callable[[], Mapping[BlockKey, int]]) -> list[int]:
        """Return the bytes per device of foreign blocks that pins did not keep since the last call.

        These are unpinned blocks that were freed, and pinned blocks whose storage was resized.

        ``live`` returns the bytes of each allocated block by (device, address).
        """
        gone = {}
        if self._loose:
            blocks = live()
            gone = {place: size for place, size in self._loose.items() if blocks.get(place) != size}
        gone |= {
            place: pin.plug.size
            for place, pin in self._pins.items()
            if pin.storage.data_ptr() != place[1]  # the storage was resized, as FSDP's are
        }
        for place in gone:
            self._loose.pop(place, None)
            self._pins.pop(place, None)
        self._lost += sum(gone.values())
        return self._by_device(gone)

    def notes(self) -> list[str]:
        """Return a sentence about freed memory that pins did not keep; [] if there is none."""
        if not self._lost:
            return []
        sentence = (
            f"the test freed {format_size(self._lost)} of earlier tests' memory, to which no "
            "Python object referred or whose storage it resized: peaks may be wrong by this amount"
        )
        return [sentence]


def _references(storage: UntypedStorage) -> int:
    import torch

    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def page_size(segment: dict[str, Any]) -> int:
    """Return an expandable segment's page size; 0 for a segment that is released as a whole.

    An expandable segment serves every test; its pages are mapped and unmapped one by one.
    """
    if not segment.get("is_expandable"):
        return 0
    if segment["segment_type"] == "small":
        return SEGMENT
    settings = (os.environ.get(name, "") for name in SETTINGS)
    declared = next(filter(None, map(LARGE_SEGMENTS.search, settings)), None)
    return int(declared[1]) * MIB if declared else 20 * MIB


def has_gaps(segments: Sequence[dict[str, Any]]) -> bool:
    """Return whether expandable segments may have unmapped gaps between mapped pages.

    PyTorch maps memory into a gap if a request fits there. The request takes whole pages, and the
    rest of the last page serves a later request if the gap continues after the page. Free memory in
    a gap does not merge with free memory elsewhere. Alone a step has no such gaps: it maps one page
    after the other. PyTorch does not report where a segment begins: a gap may also come before its
    first mapped page.
    """
    return any(page_size(segment) for segment in segments)


class _Finder:
    """Finds the tensors in blocks, and caches them: the next test has most of the same blocks."""

    def __init__(self) -> None:
        self._known: dict[BlockKey, list[TensorWeakRef]] = {}
        self._missing: set[BlockKey] = set()
        """blocks in which the last search found no tensor"""

    def tensors_at(self, places: Collection[BlockKey]) -> Iterator[tuple[BlockKey, Tensor]]:
        """Yield tensors whose storages begin at these places, including those that graphs saved."""
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

    def remembers(self, places: Collection[BlockKey]) -> bool:
        """Return whether each place still has a tensor that the last search found there."""
        return all(self._remembered(places).values())

    def forget(self, places: Iterable[BlockKey]) -> None:
        """Remove the blocks at these addresses from the cache."""
        for place in places:
            self._known.pop(place, None)

    def _remembered(self, places: Collection[BlockKey]) -> dict[BlockKey, list[Tensor]]:
        known = {}
        for place in places:
            tensors = [reference() for reference in self._known.get(place, ())]
            known[place] = [
                tensor for tensor in tensors if tensor is not None and place_of(tensor) == place
            ]
        return known


FINDER: Final = _Finder()
