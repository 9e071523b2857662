"""The result of a test or a part: its verdict, its measurement, its names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.breakdowns import HeldLine, largest_lines
from pytest_gpumem.judge.verdict import (
    HOST_FIGURES,
    Comparison,
    Growth,
    Kind,
    Verdict,
    beyond_tolerance,
    unexplained,
)
from pytest_gpumem.measurement import BaselineEntry, Breakdown, Measurement, Peak
from pytest_gpumem.nodeids import module_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judge.verdict import ExplainGrowth
    from pytest_gpumem.relations import Bound
    from pytest_gpumem.spec import MemorySpec


# Ten sites are enough to show in a baseline's diff where growth comes from, and keep the file
# small.
KEPT_SITES = 10

Outcome = Literal["", "passed", "failed", "xfail", "unfinished"]


@dataclass(frozen=True, slots=True)
class Beside:
    """A part whose figure limits another part of its test."""

    part: str
    peaks: tuple[Peak, ...]
    """in bytes, one per device"""
    breakdowns: tuple[Breakdown, ...]
    """one per device; empty without attribution"""


@dataclass(frozen=True, slots=True)
class Result:
    """One judged measurement of a whole test, or of a part of it."""

    nodeid: str
    """pytest's node ID"""
    verdict: Verdict
    measurement: Measurement | None = None
    part: str = ""
    """the name passed to ``gpu_memory.measure``; "" is the whole test"""
    batch_size: int | None = None
    """the marker's ``batch_size``; None if it declares none"""
    budget: str = ""
    """the declared limits, as text; "" if none is declared"""
    location: tuple[str, int] | None = None
    """file and line (from 1) of the marker; None if unknown"""
    baseline: bool = True
    """whether the test may have a baseline"""
    expected: bool = False
    """whether the verdict failed as the test's ``xfail`` marker expects"""
    world_size: int | None = None
    """number of ranks that the marker declares; None if it declares none"""
    rank: int | None = None
    """the rank that the marker declares, from 0; None if it declares none"""
    card: str = ""
    """the declared card, which the step must fit on; "" if none is declared"""
    baseline_entry: BaselineEntry | None = None
    """the baseline that was found, even if it cannot be compared; None if none was found"""
    snapshot: str = ""
    """path of the allocator's snapshot; "" if none was written"""
    snapshot_error: str = ""
    """why the snapshot could not be written; "" if there was no error"""
    beside: Beside | None = None
    """the other part that the exceeded limit depends on; None if it depends on none"""
    outcome: Outcome = ""
    """how the test ended, without the verdict on its memory: "passed", "failed" (its own error),
    "xfail" (with that marker), "unfinished" (no tear-down), or "" if unknown"""
    origin: int = 0
    """index of the session in a report of several sessions"""

    @property
    def name(self) -> str:
        """The node ID, followed by the part if there is one."""
        return f"{self.nodeid} ({self.part})" if self.part else self.nodeid

    @property
    def word(self) -> str:
        """The verdict as shown in tables: "ok", "recorded", "regressed (xfail)"."""
        word = "recorded" if self.verdict.recorded else self.verdict.kind.word
        return f"{word}{' (xfail)' if self.expected else ''}"

    @property
    def mark(self) -> str:
        """A character that shows the verdict without colors."""
        return "✕" if self.verdict.failed else self.verdict.kind.mark

    @property
    def rank_label(self) -> str:
        """The declared rank: "0 of 64"; "" if none is declared."""
        return "" if self.world_size is None else f"{self.rank} of {self.world_size}"

    @property
    def module(self) -> str:
        """The file part of the node ID."""
        return module_of(self.nodeid)

    @property
    def device_key(self) -> str:
        """The device's name in baselines: "virtual-T4"; "no device" without a measurement."""
        return self.measurement.device.key if self.measurement else "no device"

    @property
    def breakdowns_before(self) -> tuple[Breakdown, ...]:
        """The baseline's breakdowns, one per device; empty if it was not compared."""
        entry = self.baseline_entry  # not compared if it is of another batch size, say
        return entry.breakdowns if entry is not None and self.leading_comparison is not None else ()

    @property
    def device_over_limit(self) -> int | None:
        """The index of the device that ran out of memory or exceeded a limit; None if none did."""
        oom = self.measurement.out_of_memory if self.measurement else None
        if oom is not None:
            return oom.device_index
        if self.verdict.kind is not Kind.OVER_BUDGET or self.verdict.not_of_peak:
            return None
        if self.is_host_too_much:
            return None
        rows = (row for row in self.verdict.comparisons if row.peak not in HOST_FIGURES)
        return next((row.device for row in rows if row.is_over_budget), 0)

    @property
    def is_host_too_much(self) -> bool:
        """Whether only host memory, pinned or not, made the test fail."""
        rows = self.verdict.comparisons
        if self.verdict.kind is Kind.OVER_BUDGET:
            far = [row for row in rows if row.is_over_budget]
        elif self.verdict.kind is Kind.REGRESSED:
            far = [row for row in rows if row.excess > 0]
        else:
            return False
        return bool(far) and all(row.peak in HOST_FIGURES for row in far)

    @property
    def is_pinned_too_much(self) -> bool:
        """Whether only host memory made the test fail, and pinned memory is part of the reason."""
        rows = self.verdict.comparisons
        return self.is_host_too_much and any(
            row.peak == "pinned" and (row.is_over_budget or row.excess > 0) for row in rows
        )

    @property
    def held_lines(self) -> list[HeldLine]:
        """The lines that hold most of a peak over its limit; empty without attribution."""
        device = self.device_over_limit
        attributions = self.measurement.attributions if self.measurement else ()
        if device is None or len(attributions) <= device:
            return []
        return largest_lines(attributions[device])

    @property
    def leading_comparison(self) -> Comparison | None:
        """The comparison to report first: one beyond tolerance, else the largest allocated.

        None if no figure has a baseline.
        """
        rows = [row for row in self.verdict.comparisons if row.baseline is not None]
        rows.sort(key=lambda row: (row.peak != "allocated", -row.measured))
        return next(iter(beyond_tolerance(rows) + rows), None)


def too_much(results: Iterable[Result]) -> bool:
    """Return whether any test failed because of too much device memory."""
    return any(
        result.verdict.failed
        and result.verdict.kind.too_much
        and not (result.is_host_too_much or result.verdict.not_of_peak)
        for result in results
    )


def describe_budget(spec: MemorySpec, relations: Iterable[Bound] = ()) -> str:
    """Return the limits as declared: ``max_gib=8, card='T4'``; "" if none."""
    names = (
        *("max_gib", "card", "max_allocated_gib", "max_reserved_gib"),
        *("max_mib_per_sample", "max_fixed_gib", "max_leak_mib", "max_pinned_gib", "max_host_gib"),
        "min_cache_tokens",
    )
    values = ((name, getattr(spec, name)) for name in names)
    limits = [f"{name}={value!r}" for name, value in values if value is not None]
    limits += [str(bound.relation) for bound in relations if not bound.relation.chain]
    return ", ".join([*limits, *["steady=True"] * spec.steady])


def with_others(results: Sequence[Result], explain: ExplainGrowth = unexplained) -> list[Result]:
    """Attach to each result the part whose peak limits it, with the causes of the difference."""
    by_part = {result.part: result for result in results}
    complete = []
    for result in results:
        verdict, new = result.verdict, result.measurement
        part = by_part.get(verdict.beside) if verdict.beside else None
        if part is None or part.measurement is None or new is None:
            complete.append(result)
            continue
        old = tuple(attribution.breakdown for attribution in part.measurement.attributions)
        over = max(verdict.comparisons, key=lambda row: (row.peak == "allocated", row.measured))
        row = replace(over, baseline=part.measurement.peak_allocated, allowance=0)
        causes, lead = explain(Growth(row, old, new.attributions, of_one_program=False))
        beside = Beside(part.part, part.measurement.peaks, old)
        verdict = replace(verdict, causes=causes, lead=lead)
        complete.append(replace(result, beside=beside, verdict=verdict))
    return complete


def entry_of(result: Result, ranks: int = 0) -> BaselineEntry:
    """Return the baseline entry for a result, which must have a measurement.

    ``ranks`` is the number of torchrun's ranks if this is the fullest of them; 0 without torchrun.
    """
    measurement = result.measurement
    assert measurement is not None  # noqa: S101 - for the type checker
    breakdowns = tuple(
        replace(
            attribution.breakdown,
            sites=attribution.breakdown.sites[:KEPT_SITES],
            lines=attribution.breakdown.lines[:KEPT_SITES],
        )
        for attribution in measurement.attributions
    )
    # Which of torchrun's ranks is the fullest may change from run to run: do not record it.
    rank = None if ranks else result.rank
    declared = (result.batch_size, result.world_size, rank)
    peaks = measurement.peaks
    if measurement.pinned_count != "counted":
        peaks = tuple(replace(peak, pinned=0) for peak in peaks)
    found = (measurement.slope, measurement.largest, measurement.cache_tokens)
    return BaselineEntry(peaks, measurement.provenance, *declared, breakdowns, *found)
