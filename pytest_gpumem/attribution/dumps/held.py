"""The blocks of a snapshot by source line: at the peak of its history, or when it was taken.

The history has the sizes that were asked for, and blocks are larger: they are rounded up here as
the allocator does it, to 512 bytes or by the setting ``roundup_power2_divisions``. A snapshot does
not tell where the allocator did not split a larger room.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.recording.allocator_log import rounded_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.attribution.dumps.reading import Event, Frame, Segment, Snapshot

_ALLOCATED: Final = "active_allocated"
"""the state of a block with a live tensor in it"""
LIBRARIES: Final = ("/site-packages/", "/dist-packages/")
"""folders of installed packages"""
_FOREIGN: Final = ("torch", "torchgen", "functorch", "_pytest", "pytest", "pluggy")
"""packages with lines that tell a user nothing about the user's own code"""


class Place(NamedTuple):
    """A source line; all is empty where nothing of Python was running."""

    path: str
    function: str
    line: int
    phase: str = ""
    """ "backward" of memory that autograd allocated while this line ran a backward pass"""


NOWHERE: Final = Place("", "", 0)


@dataclass(frozen=True)
class Held:
    """The memory that one snapshot's tensors held on a device, in bytes."""

    device: int
    allocated: int
    reserved: int
    """held by the allocator when the snapshot was taken"""
    at_peak: bool
    """whether it is the peak of a recorded history; else the moment of the snapshot"""
    places: dict[Place, int] = field(default_factory=dict)
    blocks: dict[Place, int] = field(default_factory=dict)
    """the number of blocks of each place"""


class _Block(NamedTuple):
    size: int
    place: Place


_BACKWARD: Final = "torch/autograd/__init__.py"
"""the file by which a stack tells that it runs a backward pass"""


def held_memory(snapshot: Snapshot, *, at_end: bool = False) -> list[Held]:
    """Return the memory that each device's tensors held, at its highest.

    With ``at_end``: at the moment of the snapshot, not at the peak of its history.
    """
    devices = {segment.device for segment in snapshot.segments}
    traces = snapshot.device_traces or []
    devices |= {device for device, events in enumerate(traces) if events}
    return [
        held_on_device(snapshot, device, [] if at_end or device >= len(traces) else traces[device])
        for device in sorted(devices)
    ]


def held_on_device(snapshot: Snapshot, device: int, events: Sequence[Event]) -> Held:
    """Return the memory of one device's tensors: at the peak of the events, or without any now."""
    segments = [segment for segment in snapshot.segments if segment.device == device]
    reserved = sum(segment.total_size for segment in segments)
    live = blocks_with_tensors(segments)
    if any(event.action == "alloc" for event in events):
        settings = snapshot.allocator_settings
        rounding = (settings.roundup_power2_divisions if settings else None) or {}
        divisions = list(rounding.values())
        live = blocks_at_peak(live, events, divisions)
        at_peak = True
    else:
        at_peak = False
    places: Counter[Place] = Counter()
    blocks: Counter[Place] = Counter()
    for block in live.values():
        places[block.place] += block.size
        blocks[block.place] += 1
    return Held(device, sum(places.values()), reserved, at_peak, dict(places), dict(blocks))


def blocks_with_tensors(segments: Iterable[Segment]) -> dict[int, _Block]:
    """Return the blocks with tensors in them when the snapshot was taken, by their addresses."""
    live = {}
    for segment in segments:
        address = segment.address
        for block in segment.blocks:
            address = address if block.address is None else block.address
            if block.state == _ALLOCATED:
                live[address] = _Block(block.size, innermost_place(block.frames or ()))
            address += block.size
    return live


def blocks_at_peak(
    end: dict[int, _Block], events: Sequence[Event], divisions: Sequence[int]
) -> dict[int, _Block]:
    """Return the blocks that were allocated at the highest moment of a history."""
    # From the end to the beginning: what was there before the history began.
    beginning = dict(end)
    for event in reversed(events):
        if event.action == "alloc":
            beginning.pop(event.addr, None)
        elif event.action == "free_requested":
            # Its frames are those of the free.
            beginning[event.addr] = _Block(rounded_size(event.size, divisions), NOWHERE)
    steps = list(allocations_and_frees(events, divisions))
    live = dict(beginning)
    total = highest = sum(block.size for block in live.values())
    peak = 0
    for number, (address, block) in enumerate(steps, 1):
        freed = live.pop(address, None)
        total -= freed.size if freed else 0
        if block is not None:
            live[address] = block
            total += block.size
        if total > highest:
            highest, peak = total, number
    for address, block in steps[:peak]:
        beginning.pop(address, None)
        if block is not None:
            beginning[address] = block
    return beginning


def allocations_and_frees(
    events: Iterable[Event], divisions: Sequence[int]
) -> Iterator[tuple[int, _Block | None]]:
    """Yield the address of each allocation with its block, and of each free with None.

    Autograd's threads have no frame of Python. Their memory is that of the line that started the
    backward pass: its first gradient was allocated in the user's own thread.
    """
    backward = NOWHERE
    for event in events:
        if event.action == "alloc":
            frames = event.frames or ()
            place = innermost_place(frames)
            if place == NOWHERE:
                place = backward
            elif any(frame.filename.endswith(_BACKWARD) for frame in frames):
                place = backward = place._replace(phase="backward")
            yield event.addr, _Block(rounded_size(event.size, divisions), place)
        elif event.action == "free_requested":
            yield event.addr, None


def innermost_place(frames: Iterable[Frame]) -> Place:
    """Return the innermost line that is neither PyTorch's nor this package's nor C++."""
    for frame in frames:
        if is_users_file(frame.filename):
            return Place(frame.filename, frame.name, frame.line)
    return NOWHERE


@cache
def is_users_file(filename: str) -> bool:
    """Return whether a file, which may be of another machine, is the user's or a library's."""
    if not filename.endswith((".py", ".ipynb")) and "ipykernel" not in filename:
        return False  # C++, "<string>", "??"
    for folder in LIBRARIES:
        package = filename.rpartition(folder)[2]
        if package != filename and package.split("/")[0] in _FOREIGN:
            return False
    if "torchinductor" in filename or "/pytest_gpumem/" in filename:
        return False
    return not of_python_itself(filename)


def of_python_itself(filename: str) -> bool:
    """Return whether a file is of Python's own library: lib/python3.12/contextlib.py."""
    parts = PurePath(filename).parts
    return any(
        part.startswith("python3") and folder.startswith("lib") for folder, part in pairwise(parts)
    ) and not any(name in filename for name in LIBRARIES)
