"""The growth from one snapshot to another, by source line."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from pytest_gpumem.attribution.dumps.held import LIBRARIES, NOWHERE, Held, Place

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True)
class LineGrowth:
    """One source line in both snapshots, in bytes."""

    place: Place
    """as the new snapshot has it, else as the old one"""
    old: int
    new: int
    old_blocks: int
    new_blocks: int

    @property
    def difference(self) -> int:
        """Bytes above the old snapshot; negative below."""
        return self.new - self.old


@dataclass(frozen=True)
class DeviceGrowth:
    """One device in both snapshots."""

    device: int
    old: Held
    new: Held
    lines: tuple[LineGrowth, ...]
    """the largest growth first"""

    @property
    def difference(self) -> int:
        """Allocated bytes above the old snapshot."""
        return self.new.allocated - self.old.allocated


def growth_by_device(old: Sequence[Held], new: Sequence[Held]) -> list[DeviceGrowth]:
    """Return the changes of each device that either snapshot has memory of."""
    old_by_device = {held.device: held for held in old}
    new_by_device = {held.device: held for held in new}
    devices = []
    for device in sorted(old_by_device.keys() | new_by_device.keys()):
        nothing = Held(device, 0, 0, at_peak=any(held.at_peak for held in (*old, *new)))
        old_side = old_by_device.get(device, nothing)
        new_side = new_by_device.get(device, nothing)
        # A machine with eight devices has a history of each, of most without a block.
        if any((held.allocated or held.reserved) for held in (old_side, new_side)):
            devices.append(
                DeviceGrowth(device, old_side, new_side, tuple(grown_lines(old_side, new_side)))
            )
    return devices


def grown_lines(old: Held, new: Held) -> list[LineGrowth]:
    """Return the lines of both: the same file and function, though the line has moved."""
    old_files = {place.path for place in old.places}
    new_files = {place.path for place in new.places}
    same = same_files(old_files, new_files)
    functions: dict[tuple[str, str, str], tuple[list[Place], list[Place]]] = {}
    for side, held in enumerate((old, new)):
        for place in sorted(held.places):
            path = place.path if side else same[place.path]
            functions.setdefault((path, place.function, place.phase), ([], []))[side].append(place)
    lines = []
    for (path, *_), (old_places, new_places) in functions.items():
        for old_side, new_side in paired_places(old_places, new_places):
            place = new_side or old_side or NOWHERE
            lines.append(
                LineGrowth(
                    place._replace(path=shown_name(path)),
                    old.places[old_side] if old_side else 0,
                    new.places[new_side] if new_side else 0,
                    old.blocks[old_side] if old_side else 0,
                    new.blocks[new_side] if new_side else 0,
                )
            )
    return sorted(lines, key=lambda line: (-line.difference, -line.new, line.place))


def paired_places(
    old: Sequence[Place], new: Sequence[Place]
) -> list[tuple[Place | None, Place | None]]:
    """Return the lines of one function as pairs, None for a line that one snapshot lacks.

    Where the function has as many lines in both, these are the same in their order. Else they are
    taken as moved by the number of lines by which most of them meet.
    """
    if len(old) == len(new):
        return list(zip_longest(old, new))
    shifts = Counter(new_side.line - old_side.line for old_side in old for new_side in new)
    shift = min(shifts, key=lambda lines: (-shifts[lines], abs(lines)), default=0)
    old_by_line = {place.line + shift: place for place in old}
    new_by_line = {place.line: place for place in new}
    return [
        (old_by_line.get(line), new_by_line.get(line))
        for line in sorted(old_by_line.keys() | new_by_line.keys())
    ]


def shown_name(path: str) -> str:
    """Return a file's name from the working folder, or of a library from its package on."""
    for folder in LIBRARIES:
        package = path.rpartition(folder)[2]
        if package != path:
            return package
    folder = f"{Path.cwd()}{os.sep}"
    return path.removeprefix(folder)


def same_files(old: Collection[str], new: Collection[str]) -> dict[str, str]:
    """Return for each old file the new one that is the same, in another folder or machine.

    That is the file of the same name with the most folders above it in common, of those that are
    no other file's pair; without such a file, or with several, it is the old one.
    """
    depths: dict[tuple[str, str], int] = {}
    for path in old:
        for candidate in new:
            if depth := common_end(path, candidate):
                depths[path, candidate] = depth
    pairs: dict[str, str] = {}
    for depth in sorted(set(depths.values()), reverse=True):
        left = [
            pair
            for pair, number in depths.items()
            if number == depth and pair[0] not in pairs and pair[1] not in pairs.values()
        ]
        times = Counter(path for pair in left for path in pair)
        pairs |= {path: candidate for path, candidate in left if times[path] == 1}
    return {path: pairs.get(path, path) for path in old}


def common_end(path: str, candidate: str) -> int:
    """Return how many parts two paths have in common, counted from their ends."""
    parts = zip(reversed(PurePath(path).parts), reversed(PurePath(candidate).parts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts))
