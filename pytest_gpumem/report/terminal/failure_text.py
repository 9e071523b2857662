"""The text of one failed test: the cause, the figures, the source lines, the next step.

All of it fits 80 columns where names allow. Names of tests and parts, source lines and error texts
are shown with their control characters escaped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_gpumem.attribution.snapshots import VIEWER
from pytest_gpumem.judge.breakdown_diff import BreakdownRow, category_rows, site_name, site_rows
from pytest_gpumem.judge.result import hints_of
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.terminal.brief_text import failures_in_order, remedy_lines, told_notes
from pytest_gpumem.report.terminal.cause_text import cause_table
from pytest_gpumem.report.terminal.styles import StyledText
from pytest_gpumem.report.text import (
    aligned_table,
    columns,
    encodable,
    printable,
    shortened,
    signed_size,
    size,
    wrapped,
)
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Comparison
    from pytest_gpumem.measurement import OutOfMemory

MIN_SITE = 24
"""columns that the name of a source line keeps, however narrow the terminal"""
MAX_REASONS_IN_FULL = 10
"""clauses on one source line"""
MAX_ROWS = 10
"""rows of a table that says where a peak comes from"""


def failure_sections(
    results: Sequence[Result],
    *,
    width: int = 80,
    max_rows: int | None = MAX_ROWS,
    whole_code: bool = False,
    ascii_only: bool = False,
) -> list[StyledText]:
    """Return the lines of one test's failures, those of its parts first: they tell where.

    A command that is the next step of several results, and their snapshot, stand in the last.

    Args:
        results: of the test and its parts.
        width: columns of the terminal.
        max_rows: rows of each table; None: all.
        whole_code: whether source lines are shown whole, however long.
        ascii_only: use no other characters.
    """
    lines: list[StyledText] = []
    for result, repeated in failures_in_order(results):
        shown = result
        if repeated:
            verdict = replace(result.verdict, command=None, advice="", accept="")
            shown = replace(result, verdict=verdict)
        lines += [StyledText("")] if lines else []
        lines += failure_section(
            shown, width=width, ascii_only=ascii_only, max_rows=max_rows, whole_code=whole_code
        )
    return lines


def failure_section(
    result: Result,
    *,
    width: int = 80,
    ascii_only: bool = False,
    max_rows: int | None = MAX_ROWS,
    whole_code: bool = False,
) -> list[StyledText]:
    """Return the section of one failure: its cause, its figures, the next step."""
    verdict = result.verdict
    oom = result.measurement.out_of_memory if result.measurement else None
    facts = tabulate(shortage_facts(result, oom), tablefmt="plain", disable_numparse=True)
    comparisons = ""
    cells = comparison_cells(verdict.comparisons)
    if cells:
        titles = ("", "budget", "baseline", "needed" if oom else "measured", "difference")
        used = [i for i in range(len(titles)) if any(row[i] for row in cells)]
        rows = [[row[i] for i in used] for row in (titles, *cells)]
        comparisons = aligned_table(rows, ["left", *("right" for _ in used[1:])])
    hints = hints_of(result)
    sentences = []
    if verdict.kind is not Kind.OUT_OF_MEMORY:  # its facts have them
        sentences.append(wrapped("step: ", circumstances(result), width))
    notes = told_notes(verdict.notes, hints)
    sentences += [wrapped("note: ", note.text, width) for note in notes]
    sentences += [wrapped("hint: ", hint.text, width) for hint in hints]
    if result.snapshot:
        sentences.append(f"snapshot: {printable(result.snapshot)} (open it at {VIEWER})")
    # As in brief: what is added stands below.
    causes = cause_table(result, width, whole_code=whole_code, max_reasons=MAX_REASONS_IN_FULL)
    blocks = [
        "\n".join(line.text for line in causes),
        facts if oom else "",
        comparisons,
        *_explanation(result, width, max_rows),
        "\n".join(sentences),
    ]
    body = "\n\n".join(filter(None, blocks)).splitlines()
    remedy = list(remedy_lines(verdict, width))
    if remedy and not sentences:
        body.append("")
    lines = [
        *(
            StyledText(line, "headline")
            for line in wrapped("", verdict.headline, width).splitlines()
        ),
        *([] if causes else [StyledText("")]),
        *map(StyledText, body),
        *remedy,
    ]
    return [line._replace(text=encodable(line.text, ascii_only=ascii_only)) for line in lines]


def comparison_cells(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Return a row for each figure: its name, budget, baseline, measured size and difference."""
    several = len({row.device for row in comparisons}) > 1
    return [
        (
            row.title + (f", device {row.device}" if several else ""),
            size(row.budget),
            size(row.baseline),
            size(row.measured),
            signed_size(row.difference),
        )
        for row in comparisons
    ]


def _explanation(result: Result, width: int, max_rows: int | None) -> list[str]:
    """Return two tables: the categories of a peak, and the source lines that allocated it.

    They are of the device whose peak grew most, else of the fullest. A leak has one table, of the
    lines whose memory stayed.
    """
    measurement = result.measurement
    if measurement is None:
        return []
    if result.verdict.kind is Kind.LEAKED:
        sites = measurement.stayed.sites if measurement.stayed else ()
        rows = [
            BreakdownRow(site_name(site), site.nbytes, None, site, site.blocks) for site in sites
        ]
        return [rows_table("stayed, allocated by", rows, width, max_rows)]
    attributions = measurement.attributions
    if not attributions:
        return []
    device = result.leading_comparison.device if result.leading_comparison else 0
    device = device if device < len(attributions) else 0
    breakdown, baselines = attributions[device].breakdown, result.breakdowns_before
    titles = ("baseline", "now")
    if result.beside is not None:
        baselines, titles = result.beside.breakdowns, (result.beside.part, result.part)
    baseline = baselines[device] if device < len(baselines) else None
    where = f", device {device}" if len(attributions) > 1 else ""
    categories, sites_of_peak = category_rows(breakdown, baseline), site_rows(breakdown, baseline)
    return [
        rows_table(f"at the peak{where}", categories, width, max_rows, titles),
        rows_table("allocated by", sites_of_peak, width, max_rows, titles),
        *(wrapped("note: ", note.text, width) for note in attributions[device].notes),
    ]


def rows_table(
    title: str,
    rows: Sequence[BreakdownRow],
    width: int,
    max_rows: int | None,
    sides: tuple[str, str] = ("baseline", "now"),
) -> str:
    """Return rows of categories or source lines as a table, the first ``max_rows`` of them.

    Args:
        title: of the first column.
        rows: the rows.
        width: columns of the terminal.
        max_rows: rows to show; None: all.
        sides: the titles of the two columns.
    """
    shown = rows[:max_rows]
    if not shown:
        return ""
    compared = any(row.baseline is not None for row in shown)
    old, new = map(printable, sides)
    titles = [title, old, new, "difference"] if compared else [title, new]
    table = [titles]
    for row in shown:
        sizes = [size(row.baseline), size(row.nbytes), signed_size(row.difference)]
        table.append([printable(row.name), *(sizes if compared else sizes[1:2])])
    align = ["left", *("right" for _ in titles[1:])]
    if any(row.site for row in shown):
        table, align = _with_subjects(table, shown, width), [*align, "left"]
    hidden = len(rows) - len(shown)
    drawn = aligned_table(table, align)
    return f"{drawn}\n({hidden} more with -vv)" if hidden else drawn


def _with_subjects(
    table: list[list[str]], rows: Sequence[BreakdownRow], width: int
) -> list[list[str]]:
    """Add a column with each line's memory: "activations, 12 blocks, GPT2.h.*.attn".

    Where the width does not allow all of that, only the category.
    """
    subjects = ["of"]
    for row in rows:
        blocks = "" if not row.blocks else "1 block" if row.blocks == 1 else f"{row.blocks} blocks"
        words = (row.site.category, blocks, row.site.module) if row.site else ()
        subjects.append(printable(", ".join(filter(None, words))))
    sizes = sum(2 + max(map(columns, column)) for column in list(zip(*table, strict=True))[1:])
    names = max(columns(row[0]) for row in table)
    if names + sizes + 2 + max(map(columns, subjects)) > width:
        subjects = ["of", *(row.site.category if row.site else "" for row in rows)]
    room = max(width - sizes - 2 - max(map(columns, subjects)), MIN_SITE)
    return [
        # Without its folders, and if need be without its beginning.
        [
            shortened(name if columns(name) <= room else name.rpartition("/")[2], room),
            *cells,
            subject,
        ]
        for (name, *cells), subject in zip(table, subjects, strict=True)
    ]


def circumstances(result: Result) -> str:
    """Return how a step was measured: "part forward, batch size 32, max_gib=8, on virtual-T4"."""
    parts = [
        f"part {result.part}" if result.part else "",
        "" if result.batch_size is None else f"batch size {result.batch_size}",
        f"rank {result.rank_label}" if result.rank_label else "",
        result.budget,
        f"on {result.device_key}",
    ]
    return ", ".join(filter(None, parts))


def shortage_facts(result: Result, oom: OutOfMemory | None) -> list[tuple[str, str]]:
    """Return an out-of-memory error's facts, as titles and texts; none without an error."""
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
