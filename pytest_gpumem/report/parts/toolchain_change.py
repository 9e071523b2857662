"""Detect changes of many tests at once that came with another toolchain.

A torch release that needs 28 MiB more for a workspace is one event, not forty regressions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import category_rows, toolchain_text
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judge.verdict import FigureName
    from pytest_gpumem.measurement import Breakdown, Provenance

# Two tests may change together by chance, or because both run one edited line.
MIN_TESTS: Final = 3
"""tests that must change together for the toolchain to be named as the cause"""
NEARBY: Final = 20
"""amounts are close if they differ from their median by at most 1/NEARBY of it, or
1 MiB if that is more"""


@dataclass(frozen=True)
class ToolchainChange:
    """One test's figure and its baseline, measured with different toolchains.

    It is a :class:`~pytest_gpumem.judge.verdict.Comparison` reduced to the amount of the change.
    """

    nodeid: str
    part: str
    device: str
    """the device's key"""
    old: Provenance
    """the baseline's provenance"""
    new: Provenance
    peak: FigureName = "allocated"
    """the figure that changed most"""
    difference: int = 0
    """bytes; 0 if the figure did not change"""
    categories: tuple[tuple[str, int], ...] = ()
    """change at the peak in bytes, by category; empty without breakdowns"""


@dataclass(frozen=True)
class CommonChange:
    """Several tests' figures that changed together from one toolchain to another."""

    old: Provenance
    new: Provenance
    changes: tuple[ToolchainChange, ...]
    remaining: int
    """the number of figures with the same two toolchains that changed differently or not at all"""

    @property
    def tests(self) -> int:
        """The number of tests whose figures changed."""
        return len({change.nodeid for change in self.changes})

    @property
    def amounts(self) -> list[int]:
        """The changes in bytes, sorted."""
        return sorted(change.difference for change in self.changes)

    @property
    def cause(self) -> str:
        """The category that changed most in most tests: "workspaces +28.00 MiB"; "" if unknown."""
        differences = [dict(change.categories) for change in self.changes if change.categories]
        sign = 1 if self.amounts[0] > 0 else -1
        tops = Counter(
            max(categories, key=lambda name: sign * categories[name]) for categories in differences
        )
        if not tops:
            return ""
        name, number = tops.most_common(1)[0]
        amounts = [
            categories[name] for categories in differences if sign * categories.get(name, 0) > 0
        ]
        if number * 2 <= len(differences) or not amounts:  # a minority explains too little
            return ""
        return f"{name} {_amounts(amounts)}"

    @property
    def sentence(self) -> str:
        """Describe the change in one sentence, the first of a report.

        "torch 2.14.0 -> 2.15.0: 40 tests moved by +28.00 MiB allocated, workspaces +28.00 MiB"
        """
        moved = f"{tests_text(self.tests)} moved by {_amounts(self.amounts)} {self.changes[0].peak}"
        cause = f", {self.cause}" if self.cause else ""
        return f"{toolchain_text(self.old, self.new)}: {moved}{cause}"


def find_common_changes(changes: Iterable[ToolchainChange]) -> list[CommonChange]:
    """Group the figures that changed together, the largest group first.

    A group has the same two toolchains, at least three tests, and at least half of all figures with
    these toolchains. Its figures changed by about the same amount, or else all figures changed in
    one direction. A figure in no group is a separate regression.
    """
    by_toolchains: dict[tuple[Provenance, Provenance], list[ToolchainChange]] = {}
    for change in changes:
        if change.old != change.new:
            by_toolchains.setdefault((change.old, change.new), []).append(change)
    groups = []
    for (old, new), candidates in by_toolchains.items():
        for peak in ("allocated", "reserved"):
            changed = [each for each in candidates if each.peak == peak and each.difference]
            if not changed:
                continue
            median = median_low(each.difference for each in changed)
            distance = max(abs(median) // NEARBY, MIB)
            group = [  # close to the median, with the same sign
                each
                for each in changed
                if abs(each.difference - median) <= distance and each.difference * median > 0
            ]
            if not _enough(group, len(candidates)):
                directions = {each.difference > 0 for each in changed}
                group = changed if len(directions) == 1 else []
            if _enough(group, len(candidates)):
                groups.append(CommonChange(old, new, tuple(group), len(candidates) - len(group)))
    return sorted(groups, key=lambda group: -len(group.changes))


def _enough(changes: Sequence[ToolchainChange], candidates: int) -> bool:
    return (
        len({change.nodeid for change in changes}) >= MIN_TESTS and len(changes) * 2 >= candidates
    )


def moved_categories(
    old: Sequence[Breakdown], new: Sequence[Breakdown], device: int
) -> tuple[tuple[str, int], ...]:
    """Return each category's change on a device in bytes; () without breakdowns."""
    if min(len(old), len(new)) <= device:
        return ()
    rows = category_rows(new[device], old[device])[:-1]
    return tuple((row.name, row.difference) for row in rows if row.difference)


def _amounts(amounts: Sequence[int]) -> str:
    """Format one amount or, if they differ as printed, their range and median."""
    low, high = (format_size(amount, signed=True) for amount in (min(amounts), max(amounts)))
    if low == high:
        return low
    first, last = (low, high) if max(amounts) > 0 else (high, low)
    return f"{first} to {last} (median {format_size(median_low(amounts), signed=True)})"


def tests_text(number: int) -> str:
    """Return "1 test", "2 tests"."""
    return "1 test" if number == 1 else f"{number} tests"
