"""What became of figures between two sets of them: grown, shrunk, appeared, vanished. Pure.

The sets come from baseline folders, revisions of one, or reports; sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_gpumem.judge.breakdown_diff import lead
from pytest_gpumem.judge.toolchain_change import Shift, Together, find, moved_categories
from pytest_gpumem.judge.verdict import PEAKS, Comparison, beyond_tolerance

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pytest_gpumem.baselines.key import Key
    from pytest_gpumem.measurement import BaselineEntry
    from pytest_gpumem.sizes import Tolerance


class Kind(str, Enum):
    """What became of a figure; the values are the words of every rendering, in their order."""

    SHORT = "ran out of memory"
    GREW = "grew"
    SHRANK = "shrank"
    APPEARED = "appeared"
    VANISHED = "vanished"
    INCOMPARABLE = "incomparable"
    SAME = "same"

    __str__ = str.__str__  # the value, in every Python


@dataclass(frozen=True)
class Move:
    """One test or part, before and after."""

    key: Key
    old: BaselineEntry | None
    """None where it was not there"""
    new: BaselineEntry | None
    short: bool = False
    """it ran out of memory afterwards, and had not before: its new figures are what it got"""

    @cached_property
    def mismatch(self) -> str:
        """Why before and after are of different steps: "batch size 32 -> 64"; "" if they aren't."""
        old, new = self.old, self.new
        if old is None or new is None:
            return ""
        if len(old.peaks) != len(new.peaks):
            return f"devices {len(old.peaks)} -> {len(new.peaks)}"
        ranks = [f"{it.rank} of {it.world_size}" for it in (old, new)]
        if ranks[0] != ranks[1]:
            return f"rank {ranks[0]} -> {ranks[1]}"
        lists = [it.slope.sizes if it.slope else () for it in (old, new)]
        if lists[0] != lists[1]:
            texts = [", ".join(map(str, it)) or "one" for it in lists]
            return f"batch sizes {texts[0]} -> {texts[1]}"
        sizes = old.batch_size, new.batch_size
        same = None in sizes or sizes[0] == sizes[1]
        return "" if same else f"batch size {sizes[0]} -> {sizes[1]}"

    @cached_property
    def rows(self) -> tuple[Comparison, ...]:
        """The figures that differ, growth first; none where the two cannot be compared."""
        if self.old is None or self.new is None or self.mismatch or self.short:
            return ()
        pairs = enumerate(zip(self.old.peaks, self.new.peaks, strict=True))
        rows = [
            Comparison(device, peak, getattr(after, peak), getattr(before, peak), 0)
            for device, (before, after) in pairs
            for peak in PEAKS
        ]
        one, other = self.old.slope, self.new.slope
        if one is not None and other is not None:
            rows.append(Comparison(0, "per sample", other.per_sample, one.per_sample, 0))
            rows.append(Comparison(0, "fixed", other.fixed, one.fixed, 0))
        return tuple(beyond_tolerance(rows))

    @cached_property
    def kind(self) -> Kind:
        """What became of it; it grew where any peak did."""
        if self.short:
            return Kind.SHORT
        if self.old is None:
            return Kind.APPEARED
        if self.new is None:
            return Kind.VANISHED
        if self.mismatch:
            return Kind.INCOMPARABLE
        if not self.rows:
            return Kind.SAME
        return Kind.GREW if self.rows[0].excess > 0 else Kind.SHRANK

    @cached_property
    def cause(self) -> str:
        """What grew most, and at which line, where both have a breakdown."""
        if not self.rows or self.rows[0].peak != "allocated" or self.rows[0].excess < 0:
            return ""
        assert self.old is not None  # noqa: S101 - for the type checker, as the next line
        assert self.new is not None  # noqa: S101
        device = self.rows[0].device
        if min(len(self.old.breakdowns), len(self.new.breakdowns)) <= device:
            return ""
        return lead(self.new.breakdowns[device], self.old.breakdowns[device])

    @property
    def difference(self) -> int:
        """Bytes of the peak that tells most; 0 where there is nothing to compare."""
        return (self.rows[0].difference or 0) if self.rows else 0

    def grew_beyond(self, tolerance: Tolerance) -> bool:
        """Return whether a peak grew by more than the tolerance, or no longer fits."""
        return self.short or any(
            (row.difference or 0) > tolerance.allowance(abs(row.baseline or 0)) for row in self.rows
        )


def pair(
    old: Mapping[Key, BaselineEntry],
    new: Mapping[Key, BaselineEntry],
    *,
    short_before: Collection[Key] = (),
    short_after: Collection[Key] = (),
) -> list[Move]:
    """Return what became of each figure: by kind, the largest differences first, then by name.

    Args:
        old: the figures before.
        new: those after.
        short_before: what ran out of memory before: what it got then is no figure of it.
        short_after: what does so after.
    """
    moves = []
    for key in old.keys() | new.keys() | set(short_after):
        if key in short_after:
            if key not in short_before:
                moves.append(Move(key, old.get(key), new.get(key), short=True))
        elif key not in short_before or key in new:
            moves.append(Move(key, old.get(key), new.get(key)))
    order = {kind: number for number, kind in enumerate(Kind)}
    return sorted(moves, key=lambda it: (order[it.kind], -abs(it.difference), it.key))


def count(moves: Iterable[Move]) -> dict[Kind, int]:
    """Return how many are of each kind, in the order of :class:`Kind`, without zeros."""
    counter = Counter(it.kind for it in moves)
    return {kind: counter[kind] for kind in Kind if counter[kind]}


@dataclass(frozen=True)
class Changes:
    """All that became of the figures between two sets of them."""

    before: str
    """what the first set is called"""
    after: str
    moves: tuple[Move, ...]
    remarks: tuple[str, ...] = ()
    """sentences on what the sets have not"""
    across: bool = False
    """what moved together with the toolchain is told as one"""

    @cached_property
    def together(self) -> tuple[Together, ...]:
        """What moved together from one toolchain to another."""
        return tuple(find(filter(None, map(_shift, self.moves))))

    @cached_property
    def alone(self) -> tuple[Move, ...]:
        """The moves that are told one by one."""
        if not self.across:
            return self.moves
        spared = {(it.nodeid, it.part, it.device) for one in self.together for it in one.shifts}
        return tuple(
            it for it in self.moves if (it.key.nodeid, it.key.part, it.key.device) not in spared
        )


def _shift(move: Move) -> Shift | None:
    """Return a move as one between toolchains; None of what has no before and after."""
    if move.old is None or move.new is None or move.mismatch or move.short:
        return None
    old, new, key = move.old, move.new, move.key
    shift = Shift(key.nodeid, key.part, key.device, old.provenance, new.provenance)
    if not move.rows:
        return shift
    row = move.rows[0]
    categories = moved_categories(old.breakdowns, new.breakdowns, row.device)
    return replace(shift, peak=row.peak, difference=row.difference or 0, categories=categories)
