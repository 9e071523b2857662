"""Render the report as Markdown for GitHub and GitLab: failures first, then every test."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.notes import ranked
from pytest_gpumem.report.markdown_syntax import code, fenced, pipe_table, prose
from pytest_gpumem.report.model import hints_of, urgency, with_alike_ranks
from pytest_gpumem.report.parts.breakdown_rows import device_rows
from pytest_gpumem.report.parts.card_matrix import TITLE as CARDS_TITLE
from pytest_gpumem.report.parts.card_matrix import card_matrix
from pytest_gpumem.report.parts.cause_sentences import cause_lines, code_words
from pytest_gpumem.report.parts.cells import (
    circumstances,
    comparison_cells,
    figure_cells,
    shortage_facts,
)
from pytest_gpumem.report.parts.session_words import comparison_sentences, counts, next_command
from pytest_gpumem.report.parts.update_text import update_summary
from pytest_gpumem.report.text import printable, signed_size, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.breakdowns import BreakdownRow
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.report.model import Report

MAX_CAUSES = 3
"""maximum number of grown source lines whose keepers a failure's section names"""
MAX_SITES = 12
"""source lines that a failure lists, per device"""
MAX_SHARED_CAUSES = 5
"""shared causes at the beginning of the report"""
_UPDATE_WIDTH = 100
"""width in columns of the text on updated baselines"""


class _Limits(NamedTuple):
    """How much of the report to show; None: all."""

    failures: int | None
    """number of failures with a section"""
    details: int | None
    """how many of these sections have tables"""
    rows: int | None
    """number of tests in each device's table"""


_ALL = _Limits(None, None, None)
_SHORTER = (
    _Limits(None, 100, 2000),
    _Limits(200, 20, 500),
    _Limits(50, 5, 100),
    _Limits(10, 0, 20),
    _Limits(3, 0, 0),
    _Limits(0, 0, 0),
)
"""limits to try in turn until the report is short enough"""


def markdown(report: Report, *, when: str = "", limit: int | None = None) -> str:
    """Render the report; "" if even its shortest form exceeds the limit.

    ``limit`` is in bytes of UTF-8; a shortened report says that it is shortened.
    """
    document = _document(report, when, _ALL)
    if limit is None or len(document.encode()) <= limit:
        return document
    shorter = (_document(report, when, limits) for limits in _SHORTER)
    return next((rendered for rendered in shorter if len(rendered.encode()) <= limit), "")


def _document(report: Report, when: str, limits: _Limits) -> str:
    results = sorted(with_alike_ranks(report.results), key=urgency)
    failures = [result for result in results if result.verdict.failed and not result.expected]
    number = len(results)
    title = f"{len(failures)} of {number} failed" if failures else f"{number} measured, none failed"
    blocks = [f"## GPU memory: {title if number else 'no test was measured'}"]
    if report.device:
        blocks.append(prose(report.device))
    kinds = "".join(span.text for span in counts(report.results))
    facts = [kinds, *(f"{name}={value}" for name, value in report.options.items()), when]
    if any(facts):
        blocks.append(" · ".join(prose(fact) for fact in facts if fact))
    if report.remarks:
        blocks.append("\n".join(f"- {prose(remark)}" for remark in report.remarks))
    causes = cause_lines(report.results)
    if causes:
        blocks.append("\n".join(f"- {prose(cause)}" for cause in causes[:MAX_SHARED_CAUSES]))
    blocks += _failures(failures, limits)
    matrix = card_matrix(results)
    if matrix is not None:
        shown = list(matrix.cells.items())[: limits.rows]
        rows = [(code(name), *(row.get(card, "") for card in matrix.cards)) for name, row in shown]
        blocks += [f"### {CARDS_TITLE}", pipe_table(("test", *matrix.cards), rows)]
        if len(shown) < len(matrix.cells):
            blocks.append(f"And {len(matrix.cells) - len(shown)} more.")
    blocks += _device_tables(results, limits)
    if report.updates is not None:
        account = update_summary(report.updates, width=_UPDATE_WIDTH, brief=limits != _ALL)
        # Use a fenced block: the text has line breaks, and paths must not be read as markup.
        blocks += ["### Baselines", fenced(account, "text")]
    blocks += _commands(report)
    if limits != _ALL:
        blocks.append("*This report was shortened to fit the size limit.*")
    return "\n\n".join(blocks) + "\n"


def _commands(report: Report) -> Iterator[str]:
    """Yield the commands that record baselines: by another run, and from this run's report."""
    updating = report.updates is not None
    command = next_command(report.results, updating=updating, arguments=report.arguments)
    if command:
        yield "To record baselines:"
        yield fenced(printable(str(command)), "sh")
    for accept in dict.fromkeys(result.verdict.accept for result in report.results):
        if accept:
            yield "To accept this run's figures on another machine:"
            yield fenced(printable(accept), "sh")


def _failures(failures: Sequence[Result], limits: _Limits) -> Iterator[str]:
    shown = failures[: limits.failures]
    for index, result in enumerate(shown):
        verdict = result.verdict
        part = f" part {code(result.part)}" if result.part else ""
        yield f"### ✕ {code(result.nodeid)}{part}"
        yield f"**{result.device_key}**: {prose(verdict.headline)}"
        if limits.details is None or index < limits.details:
            yield from _details(result)
        sites = [(cause.site, cause.reasons) for cause in verdict.causes[:MAX_CAUSES]]
        sites += [(line.site, line.reasons) for line in result.held_lines]
        lines = [
            f"- {code(code_words(site)[0])}: {prose(reason)}"
            for site, reasons in sites
            if site is not None
            for reason in reasons
        ]
        lines += [f"- note: {prose(note.text)}" for note in ranked(verdict.notes)]
        lines += [f"- hint: {prose(hint.text)}" for hint in hints_of(result)]
        lines += [f"- snapshot: {code(result.snapshot)}"] if result.snapshot else []
        if lines:
            yield "\n".join(lines)
        if verdict.advice:
            yield f"Next: {prose(verdict.advice)}"
        if verdict.command:
            yield fenced(printable(str(verdict.command)), "sh")
    if len(shown) < len(failures):
        yield f"And {len(failures) - len(shown)} more failures."


def _details(result: Result) -> Iterator[str]:
    measurement = result.measurement
    oom = measurement.out_of_memory if measurement else None
    facts = [(title, prose(fact)) for title, fact in shortage_facts(result, oom)]
    measured = "needed" if oom else "measured"
    titles = ("", "budget", "baseline", measured, "difference")
    comparisons = pipe_table(titles, comparison_cells(result.verdict.comparisons))
    tables = [pipe_table(("", ""), facts), comparisons]
    several = len(measurement.peaks if measurement else ()) > 1
    sides = ("baseline", "now", "difference")
    for device in device_rows(result):
        where = f", device {device.index}" if several else ""
        categories = [*device.categories, device.total, device.cached]
        rows = [(row.name, *_size_cells(row)) for row in categories]
        tables.append(pipe_table((f"at the peak{where}", *sides), rows))
        sites = []
        for row in device.sites[:MAX_SITES]:
            category = row.site.category if row.site else ""
            places = map(code, (row.site.module, row.site.code) if row.site else ("", ""))
            blocks = str(row.blocks or "")
            sites.append((code(row.name), *_size_cells(row), category, blocks, *places))
        heads = (f"allocated by{where}", *sides, "of", "blocks", "module", "code")
        tables.append(pipe_table(heads, sites))
        hidden = len(device.sites) - len(sites)
        tables.append(f"And {hidden} more source lines." if hidden else "")
        tables.append("\n".join(f"- {prose(note.text)}" for note in device.notes))
    if any(tables):
        yield "<details><summary>Figures and their origin</summary>"
        yield prose(f"Step: {circumstances(result)}")
        yield from filter(None, tables)
        yield "</details>"


def _size_cells(row: BreakdownRow) -> tuple[str, str, str]:
    return size(row.baseline), size(row.nbytes), signed_size(row.difference)


def _device_tables(results: Sequence[Result], limits: _Limits) -> Iterator[str]:
    sentences = comparison_sentences(results)
    titles = (
        *("", "test", "verdict", "allocated, MiB", "reserved, MiB", "pinned, MiB"),
        *("change", "budget"),
    )
    for key in dict.fromkeys(result.device_key for result in results):
        members = [result for result in results if result.device_key == key]
        shown = members[: limits.rows]
        yield f"### {key}"
        if key in sentences:
            yield f"Baselines: {prose(sentences[key])}."
        rows = []
        for result in shown:
            name = code(result.nodeid) + (f" {code(result.part)}" if result.part else "")
            rows.append((result.mark, name, result.word, *map(escape, figure_cells(result))))
        yield pipe_table(titles, rows)
        if len(shown) < len(members):
            yield f"And {len(members) - len(shown)} more."
