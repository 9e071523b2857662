"""The result of a test or of a part: its verdict, its measurement, its names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import Comparison, Kind, Verdict, beyond_tolerance
from pytest_gpumem.measurement import BaselineEntry, Measurement  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.measurement import Breakdown
    from pytest_gpumem.spec import MemorySpec


ORDER = (
    Kind.OUT_OF_MEMORY,
    Kind.OVER_BUDGET,
    Kind.REGRESSED,
    Kind.LEAKED,
    Kind.INCOMPARABLE,
    Kind.NO_BASELINE,
    Kind.IMPROVED,
    Kind.WITHIN,
)
"""kinds as reports begin with them; what failed comes before all that passed"""


@dataclass(frozen=True)
class Result:
    """One judged measurement: of a whole test, or of a part of it."""

    nodeid: str
    """the test, as pytest names it"""
    verdict: Verdict
    measurement: Measurement | None = None
    part: str = ""
    """the name given to ``gpu_memory.measure``; "" is the whole test"""
    batch_size: int | None = None
    """as declared"""
    budget: str = ""
    """the declared limits, as :func:`describe_budget` writes them"""
    location: tuple[str, int] | None = None
    """file and line (from 1) of the marker"""
    baseline: bool = True
    """whether it is held to a baseline, and may become one"""
    expected: bool = False
    """whether it failed as the test's ``xfail`` says"""
    world_size: int | None = None
    """as declared"""
    rank: int | None = None
    """as declared"""
    card: str = ""
    """that the step has to fit on, as declared"""
    baseline_entry: BaselineEntry | None = None
    """the baseline that was found, whether or not it can be compared with"""
    snapshot: str = ""
    """the file of the allocator's snapshot"""
    snapshot_error: str = ""
    """why that could not be written"""

    @property
    def name(self) -> str:
        """The test, with its part where it has one."""
        return f"{self.nodeid} ({self.part})" if self.part else self.nodeid

    @property
    def ranks(self) -> str:
        """Which rank of how many it is: "0 of 64"; "" where it is none."""
        return "" if self.world_size is None else f"{self.rank} of {self.world_size}"

    @property
    def module(self) -> str:
        """The test's file, as pytest names it."""
        return self.nodeid.partition("::")[0]

    @property
    def device_key(self) -> str:
        """The name of its device's baselines."""
        return self.measurement.device.key if self.measurement else "no device"

    @property
    def breakdowns_before(self) -> tuple[Breakdown, ...]:
        """The baseline's breakdowns, one a device; none where it was not compared with."""
        entry = self.baseline_entry  # of another batch size, say: it was found as well
        return entry.breakdowns if entry is not None and self.lead is not None else ()

    @property
    def lead(self) -> Comparison | None:
        """The comparison that tells most: what is beyond tolerance first, else peak allocated."""
        rows = [row for row in self.verdict.comparisons if row.baseline is not None]
        rows.sort(key=lambda row: (row.peak != "allocated", -row.measured))
        return next(iter(beyond_tolerance(rows) + rows), None)


def count_kinds(results: Iterable[Result]) -> dict[Kind, int]:
    """Return how many results are of each kind, in the order of :class:`Kind`, without zeros."""
    counter = Counter(result.verdict.kind for result in results)
    return {kind: counter[kind] for kind in Kind if counter[kind]}


def urgency(result: Result) -> int:
    """Return by what reports sort results: what failed first, then what failed as expected."""
    failed = result.verdict.failed + (result.verdict.failed and not result.expected)
    return len(ORDER) * (2 - failed) + ORDER.index(result.verdict.kind)


def describe_budget(spec: MemorySpec) -> str:
    """Return the limits as the marker declares them: ``max_gib=8, card='T4'``; "" if none."""
    names = (
        *("max_gib", "card", "max_allocated_gib", "max_reserved_gib"),
        *("max_mib_per_sample", "max_fixed_gib", "max_leak_mib"),
    )
    values = ((name, getattr(spec, name)) for name in names)
    limits = [f"{name}={value!r}" for name, value in values if value is not None]
    return ", ".join([*limits, *["steady=True"] * spec.steady])


def hints_of(result: Result) -> list[str]:
    """Return the hints of a test, each once."""
    measurement = result.measurement
    if measurement is None:
        return []
    found = [hint for it in measurement.attributions for hint in it.hints]
    return list(dict.fromkeys([*found, *measurement.hints]))
