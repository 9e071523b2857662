"""Many tests that moved together because what they were measured with changed. Pure.

A torch release that keeps 28 MiB more of a workspace is one event, and not forty regressions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from statistics import median_low
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.judge.breakdown_diff import PROVENANCE_NAMES, category_rows
from pytest_gpumem.measurement import Provenance
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judge.verdict import FigureName
    from pytest_gpumem.measurement import Breakdown

FEWEST: Final = 3
"""tests that have to move together, before it is put down to what they were measured with"""
NEARBY: Final = 20
"""amounts are about the same within a 20th of their median, or 1 MiB"""


@dataclass(frozen=True)
class Shift:
    """One figure that was held against another, made with something else."""

    nodeid: str
    part: str
    device: str
    """the device's key"""
    before: Provenance
    after: Provenance
    peak: FigureName = "allocated"
    """the peak that tells most"""
    difference: int = 0
    """bytes of it, 0 where it did not move"""
    categories: tuple[tuple[str, int], ...] = ()
    """what moved at the peak, in bytes by category; none where that is not known"""


@dataclass(frozen=True)
class Together:
    """Figures that moved together from one toolchain to another."""

    before: Provenance
    after: Provenance
    shifts: tuple[Shift, ...]
    """those that moved, in the order given"""
    others: int
    """figures with the same change of toolchain that did not, or moved otherwise"""

    @property
    def tests(self) -> int:
        """How many tests."""
        return len({it.nodeid for it in self.shifts})

    @property
    def amounts(self) -> list[int]:
        """The differences in bytes, sorted."""
        return sorted(it.difference for it in self.shifts)

    @property
    def cause(self) -> str:
        """The category that moved most in most of them: "workspaces +28.00 MiB"; "" if unknown."""
        known = [dict(it.categories) for it in self.shifts if it.categories]
        sign = 1 if self.amounts[0] > 0 else -1
        tops = Counter(max(it, key=lambda name: sign * it[name]) for it in known)
        if not tops:
            return ""
        name, number = tops.most_common(1)[0]
        amounts = [it[name] for it in known if sign * it.get(name, 0) > 0]
        if number * 2 <= len(known) or not amounts:
            return ""
        return f"{name} {_amounts(amounts)}"

    @property
    def sentence(self) -> str:
        """What happened, as reports lead with it.

        "torch 2.14.0 -> 2.15.0: 40 tests moved by +28.00 MiB allocated, workspaces +28.00 MiB"
        """
        moved = f"{tests_text(self.tests)} moved by {_amounts(self.amounts)} {self.shifts[0].peak}"
        cause = f", {self.cause}" if self.cause else ""
        return f"{change_text(self.before, self.after)}: {moved}{cause}"


class _Group(NamedTuple):
    """What all have in common that may have moved together."""

    before: Provenance
    after: Provenance
    peak: FigureName


def find(shifts: Iterable[Shift]) -> list[Together]:
    """Return the figures that moved together, the largest group first.

    They have the same change of provenance, are of three tests or more and half of those with that
    change, and moved by about the same amount; or, where they did not, all in one direction. What
    moved otherwise belongs to none: it is a regression of its own.
    """
    crowds: dict[tuple[Provenance, Provenance], list[Shift]] = {}
    for shift in shifts:
        if shift.before != shift.after:
            crowds.setdefault((shift.before, shift.after), []).append(shift)
    found = [it for crowd in crowds.values() for it in _together(crowd)]
    return sorted(found, key=lambda it: -len(it.shifts))


def _together(crowd: Sequence[Shift]) -> list[Together]:
    found = []
    for peak in ("allocated", "reserved"):
        moved = [it for it in crowd if it.peak == peak and it.difference]
        chosen = _alike(moved, len(crowd)) or _one_way(moved, len(crowd))
        if chosen:
            first, others = chosen[0], len(crowd) - len(chosen)
            found.append(Together(first.before, first.after, tuple(chosen), others))
    return found


def _alike(moved: Sequence[Shift], number: int) -> list[Shift]:
    """Return those that moved by about the same amount, if they are enough."""
    if not moved:
        return []
    middle = median_low(it.difference for it in moved)
    room = max(abs(middle) // NEARBY, MIB)
    near = [
        it for it in moved if abs(it.difference - middle) <= room and it.difference * middle > 0
    ]
    return near if _enough(near, number) else []


def _one_way(moved: Sequence[Shift], number: int) -> list[Shift]:
    same_way = len({it.difference > 0 for it in moved}) == 1
    return list(moved) if same_way and _enough(moved, number) else []


def _enough(shifts: Sequence[Shift], number: int) -> bool:
    return len({it.nodeid for it in shifts}) >= FEWEST and len(shifts) * 2 >= number


def moved_categories(
    before: Sequence[Breakdown], after: Sequence[Breakdown], device: int
) -> tuple[tuple[str, int], ...]:
    """Return by how many bytes each category moved on a device; nothing where it is not known."""
    if min(len(before), len(after)) <= device:
        return ()
    rows = category_rows(after[device], before[device])[:-1]
    return tuple((row.name, row.difference) for row in rows if row.difference)


def change_text(before: Provenance, after: Provenance) -> str:
    """Return what changed: "torch 2.14.0 -> 2.15.0, CUDA 13.0 -> 13.2"."""
    pairs = (
        (PROVENANCE_NAMES.get(it.name, it.name), getattr(before, it.name), getattr(after, it.name))
        for it in fields(Provenance)
    )
    return ", ".join(
        f"{name} {was or 'none'} -> {now or 'none'}" for name, was, now in pairs if was != now
    )


def _amounts(amounts: Sequence[int]) -> str:
    """Return one amount or, where they differ as written, their range and median."""
    low, high = (format_size(it, signed=True) for it in (min(amounts), max(amounts)))
    if low == high:
        return low
    first, last = (low, high) if max(amounts) > 0 else (high, low)
    return f"{first} to {last} (median {format_size(median_low(amounts), signed=True)})"


def tests_text(number: int) -> str:
    """Return "1 test", "2 tests"."""
    return "1 test" if number == 1 else f"{number} tests"
