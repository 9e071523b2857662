"""Compare two sets of figures: what grew, shrank, appeared or vanished.

The sets come from baseline folders, revisions of one, or reports; sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_gpumem.explain.lead import explain_growth
from pytest_gpumem.judge.comparison import StepShape
from pytest_gpumem.judge.verdict import EVERY_PEAK, Comparison, Growth, beyond_tolerance
from pytest_gpumem.measurement import Attribution
from pytest_gpumem.report.parts.toolchain_change import (
    CommonChange,
    ToolchainChange,
    find_common_changes,
    moved_categories,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pytest_gpumem.baselines.paths import Key
    from pytest_gpumem.measurement import BaselineEntry
    from pytest_gpumem.sizes import Tolerance


class ChangeKind(str, Enum):
    """The kinds of changes, in display order; the values are the words of every renderer."""

    OUT_OF_MEMORY = "ran out of memory"
    GREW = "grew"
    SHRANK = "shrank"
    APPEARED = "appeared"
    VANISHED = "vanished"
    INCOMPARABLE = "incomparable"
    SAME = "same"

    __str__ = str.__str__  # str() gives the value in every version of Python


@dataclass(frozen=True)
class EntryChange:
    """One test or part in the old and in the new set of figures.

    Its rows are the :class:`~pytest_gpumem.judge.verdict.Comparison` of each figure that differs,
    without a tolerance.
    """

    key: Key
    old: BaselineEntry | None
    """None if only the new set has it"""
    new: BaselineEntry | None
    out_of_memory: bool = False
    """whether the test newly ran out of memory, so that ``new`` has no full peak"""

    @cached_property
    def mismatch(self) -> str:
        """The setting that makes the steps different: "batch size 32 -> 64"; "" if none."""
        if self.old is None or self.new is None:
            return ""
        mismatch = StepShape.of_entry(self.old).mismatch(StepShape.of_entry(self.new))
        return "" if mismatch is None else "{} {} -> {}".format(*mismatch)

    @cached_property
    def rows(self) -> tuple[Comparison, ...]:
        """The figures that differ, growth first; () if they cannot be compared."""
        old, new = self.old, self.new
        if old is None or new is None or self.mismatch or self.out_of_memory:
            return ()
        rows = [
            Comparison(device, peak, getattr(new_peak, peak), getattr(old_peak, peak), 0)
            for device, (old_peak, new_peak) in enumerate(zip(old.peaks, new.peaks, strict=True))
            for peak in EVERY_PEAK
        ]
        if old.slope is not None and new.slope is not None:
            rows += [
                Comparison(0, "per sample", new.slope.per_sample, old.slope.per_sample, 0),
                Comparison(0, "fixed", new.slope.fixed, old.slope.fixed, 0),
            ]
        return tuple(beyond_tolerance(rows))

    @cached_property
    def kind(self) -> ChangeKind:
        """The kind of change: GREW if any figure grew, even if others shrank."""
        if self.out_of_memory:
            return ChangeKind.OUT_OF_MEMORY
        if self.old is None:
            return ChangeKind.APPEARED
        if self.new is None:
            return ChangeKind.VANISHED
        if self.mismatch:
            return ChangeKind.INCOMPARABLE
        if not self.rows:
            return ChangeKind.SAME
        return ChangeKind.GREW if self.rows[0].excess > 0 else ChangeKind.SHRANK

    @cached_property
    def cause(self) -> str:
        """The category and line that grew most; "" if ``old`` or ``new`` has no breakdown."""
        if not self.rows or self.old is None or self.new is None:
            return ""
        measured = [Attribution(breakdown) for breakdown in self.new.breakdowns]
        _, lead = explain_growth(Growth(self.rows[0], self.old.breakdowns, measured))
        return lead.sentence if lead else ""

    @property
    def difference(self) -> int:
        """The first row's difference in bytes; 0 without rows."""
        return (self.rows[0].difference or 0) if self.rows else 0

    def grew_beyond(self, tolerance: Tolerance) -> bool:
        """Return whether a figure grew beyond the tolerance, or the test ran out of memory."""
        return self.out_of_memory or any(
            (row.difference or 0) > tolerance.allowance(abs(row.baseline or 0)) for row in self.rows
        )


def pair_entries(
    old: Mapping[Key, BaselineEntry],
    new: Mapping[Key, BaselineEntry],
    *,
    old_oom: Collection[Key] = (),
    new_oom: Collection[Key] = (),
) -> list[EntryChange]:
    """Return the change of each test or part: by kind, the largest first, then by name.

    Tests in ``old_oom`` and ``new_oom`` ran out of memory, so they have no figures.
    """
    changes = []
    for key in old.keys() | new.keys() | set(new_oom):
        if key in new_oom:
            if key not in old_oom:
                changes.append(EntryChange(key, old.get(key), new.get(key), out_of_memory=True))
        elif key not in old_oom or key in new:
            changes.append(EntryChange(key, old.get(key), new.get(key)))
    order = {kind: number for number, kind in enumerate(ChangeKind)}
    return sorted(
        changes, key=lambda change: (order[change.kind], -abs(change.difference), change.key)
    )


def count_changes(changes: Iterable[EntryChange]) -> dict[ChangeKind, int]:
    """Count the changes of each kind, in the order of the kinds, without zeros."""
    counter = Counter(change.kind for change in changes)
    return {kind: counter[kind] for kind in ChangeKind if counter[kind]}


@dataclass(frozen=True)
class Changes:
    """All changes between two sets of figures."""

    old_name: str
    """the old set: a folder, a revision or a report"""
    new_name: str
    entries: tuple[EntryChange, ...]
    remarks: tuple[str, ...] = ()
    """sentences on figures that one of the sets lacks"""
    across: bool = False
    """whether reports merge tests that changed together with the toolchain into one line"""

    @cached_property
    def common_changes(self) -> tuple[CommonChange, ...]:
        """Groups of tests that changed together when the toolchain changed."""
        changes = []
        for entry in self.entries:
            old, new, key = entry.old, entry.new, entry.key
            if old is None or new is None or entry.mismatch or entry.out_of_memory:
                continue  # the figures cannot be compared
            change = ToolchainChange(
                key.nodeid, key.part, key.device, old.provenance, new.provenance
            )
            if entry.rows:
                row = entry.rows[0]
                categories = moved_categories(old.breakdowns, new.breakdowns, row.device)
                change = replace(
                    change, peak=row.peak, difference=row.difference or 0, categories=categories
                )
            changes.append(change)
        return tuple(find_common_changes(changes))

    @cached_property
    def alone(self) -> tuple[EntryChange, ...]:
        """The changes that reports list one by one."""
        if not self.across:
            return self.entries
        grouped = {
            (change.nodeid, change.part, change.device)
            for group in self.common_changes
            for change in group.changes
        }
        return tuple(
            entry
            for entry in self.entries
            if (entry.key.nodeid, entry.key.part, entry.key.device) not in grouped
        )
