"""Render one failed test in full: the cause, the figures, the source lines, the next step.

It fits 80 columns if names allow. Control characters in names of tests and parts, source lines and
error texts are escaped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_gpumem.breakdowns import BreakdownRow, category_rows, site_name, site_rows
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.recording.snapshots import VIEWER
from pytest_gpumem.report.model import hints_of
from pytest_gpumem.report.parts.cells import circumstances, comparison_cells, shortage_facts
from pytest_gpumem.report.parts.styles import StyledText
from pytest_gpumem.report.parts.tables import rows_table
from pytest_gpumem.report.terminal.brief_text import failures_in_order, remedy_lines, told_notes
from pytest_gpumem.report.terminal.cause_text import cause_table
from pytest_gpumem.report.text import aligned_table, printable, wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result

MAX_REASONS_IN_FULL = 10
"""clauses per source line"""
MAX_ROWS = 10
"""rows of a table that breaks a peak down"""


def failure_sections(
    results: Sequence[Result],
    *,
    width: int = 80,
    max_rows: int | None = MAX_ROWS,
    whole_code: bool = False,
) -> list[StyledText]:
    """Return the lines on one test's failures, its parts' first: they are more specific.

    If the next step of several results is the same command, only the last of them shows it; only
    the test's last failure shows the snapshot.

    ``max_rows`` None shows all; with ``whole_code`` source lines are not cut.
    """
    lines: list[StyledText] = []
    for result, repeated in failures_in_order(results):
        shown = result
        if repeated:
            verdict = replace(result.verdict, command=None, advice="", blame="", accept="")
            shown = replace(result, verdict=verdict)
        lines += [StyledText("")] if lines else []
        lines += failure_section(shown, width=width, max_rows=max_rows, whole_code=whole_code)
    return lines


def failure_section(
    result: Result, *, width: int = 80, max_rows: int | None = MAX_ROWS, whole_code: bool = False
) -> list[StyledText]:
    """Return one failure's section: its cause, figures and next step."""
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
    if verdict.kind is not Kind.OUT_OF_MEMORY:  # else the table of facts has these
        sentences.append(wrapped("step: ", circumstances(result), width))
    notes = told_notes(verdict.notes, hints)
    sentences += [wrapped("note: ", note.text, width) for note in notes]
    sentences += [wrapped("hint: ", hint.text, width) for hint in hints]
    if result.snapshot:
        sentences.append(f"snapshot: {printable(result.snapshot)} (open it at {VIEWER})")
    # The section begins as the brief text does; details follow.
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
    head = wrapped("", verdict.headline, width).splitlines()
    return [
        *(StyledText(line, "headline") for line in head),
        *([] if causes else [StyledText("")]),
        *map(StyledText, body),
        *remedy,
    ]


def _explanation(result: Result, width: int, max_rows: int | None) -> list[str]:
    """Return two tables: a peak's categories, and the source lines that allocated it.

    They are for the device of the leading comparison, or else the first device. A leak has one
    table, of the lines whose memory stayed.
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
