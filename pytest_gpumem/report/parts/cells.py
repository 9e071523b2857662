"""Format a test's figures for all renderers: table cells and facts."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.text import mib, printable, signed_size, size
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Comparison, FigureName
    from pytest_gpumem.measurement import Measurement, OutOfMemory

_MARKS: dict[FigureName, str] = {
    "allocated": "",
    "reserved": " res.",
    "per sample": " a sample",
    "fixed": " fixed",
    "pinned": " pinned",
    "host": " host",
}


def figure_cells(result: Result) -> tuple[str, str, str, str, str]:
    """Format a test's figures: peaks in MiB (allocated, reserved, pinned), change and budget."""
    peaks = peak_cells(result.measurement) if result.measurement else ("", "")
    return (*peaks, pinned_cell(result), change_cell(result), budget_cell(result))


def peak_cells(measurement: Measurement) -> tuple[str, str]:
    """Format both peaks in MiB; after out of memory the peaks needed, or ">" and those reached."""
    oom, sign = measurement.out_of_memory, ""
    allocated, reserved = measurement.peak_allocated, measurement.peak_reserved
    if oom and oom.needed:
        allocated, reserved = oom.needed.allocated, oom.needed.reserved
    elif oom:
        sign = ">"
    return f"{sign}{mib(allocated)}", f"{sign}{mib(reserved)}"


def pinned_cell(result: Result) -> str:
    """Format the pinned peak in MiB; "" if nothing was pinned."""
    return mib((result.measurement and result.measurement.peak_pinned) or None)


def change_cell(result: Result) -> str:
    """Format the leading figure's difference from its baseline, in MiB and percent.

    "new" if there is no baseline, "n/a" if it could not be compared.
    """
    lead = result.leading_comparison
    if lead is None or lead.difference is None:
        return "new" if result.verdict.kind is Kind.NO_BASELINE else "n/a"
    if not lead.difference:
        return f"0{_MARKS[lead.peak]}"
    share = f" ({100 * lead.difference / lead.baseline:+.1f}%)" if lead.baseline else ""
    return f"{lead.difference / MIB:+.2f}{_MARKS[lead.peak]}{share}"


def budget_cell(result: Result) -> str:
    """Format the used share of the tightest budget, never rounded across the limit.

    Without a budget: ">100%" after out of memory, else "".
    """
    budgeted = [(row.measured, row.budget) for row in result.verdict.comparisons if row.budget]
    if not budgeted:
        return ">100%" if result.verdict.kind is Kind.OUT_OF_MEMORY else ""
    measured, budget = max(budgeted, key=lambda pair: Fraction(*pair))
    percent = measured * 100 // budget if measured <= budget else -(-measured * 100 // budget)
    return f"{percent}%"


def comparison_cells(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Return a row per figure: its name, budget, baseline, measured size and difference."""
    several = len({row.device for row in comparisons}) > 1
    rows = []
    for row in comparisons:
        title = row.title + (f", device {row.device}" if several else "")
        sizes = map(size, (row.budget, row.baseline, row.measured))
        rows.append((title, *sizes, signed_size(row.difference)))
    return rows


def circumstances(result: Result) -> str:
    """Describe how a step was measured: "part forward, batch size 32, max_gib=8, on virtual-T4"."""
    parts = [
        f"part {result.part}" if result.part else "",
        "" if result.batch_size is None else f"batch size {result.batch_size}",
        f"rank {result.rank_label}" if result.rank_label else "",
        result.budget,
        f"on {result.device_key}",
    ]
    return ", ".join(filter(None, parts))


def shortage_facts(result: Result, oom: OutOfMemory | None) -> list[tuple[str, str]]:
    """Return facts of an out-of-memory error as titles and texts; [] without an error."""
    if oom is None:
        return []
    several = result.measurement is not None and len(result.measurement.peaks) > 1
    facts = [
        ("part", result.part),
        ("batch size", str(result.batch_size or "")),
        ("rank", result.rank_label),
        ("budget", result.budget or "only the device's memory"),
        ("device", result.device_key + (f", number {oom.device_index}" if several else "")),
        ("held", f"{format_size(oom.allocated)} allocated, {format_size(oom.reserved)} reserved"),
        ("asked for", "" if oom.requested is None else f"{format_size(oom.requested)} more"),
        ("at", oom.site),
    ]
    return [(title, printable(fact)) for title, fact in facts if fact]
