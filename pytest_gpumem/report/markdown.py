"""The report in Markdown, as GitHub and GitLab show it: what failed first, then every test.

Names from outside stand in code spans and sentences are escaped (:func:`code`, :func:`prose`), so
that no test's name can end a table's row or add markup.
"""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.judge.result import hints_of, urgency
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.breakdown_rows import DeviceRows, device_rows
from pytest_gpumem.report.held_to import compared
from pytest_gpumem.report.terminal import session_text, update_text
from pytest_gpumem.report.terminal.summary_table import budget_use, change, taken
from pytest_gpumem.report.text import printable, shortened, size
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.judge.breakdown_diff import Row
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.report.model import Report

MOST_SITES = 12
"""source lines that a failure lists, of each device"""
LONGEST_NAME = 300
"""characters of a name that are shown"""
LONGEST_SENTENCE = 2000
"""characters of a sentence that are shown"""
_UPDATE_WIDTH = 100
"""columns of the text that says what became of the baselines"""

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$&{}])")
_LINKS = re.compile(r"(:)(?=//)|(?<=www)(\.)", re.IGNORECASE)
_RUNS = re.compile(r"`+")


class _Most(NamedTuple):
    """How much of it is shown; None: all."""

    failures: int | None
    """failures that have a section"""
    details: int | None
    """of these, how many with their tables"""
    rows: int | None
    """tests in the tables, of each device"""


_ALL = _Most(None, None, None)
_SHORTER = (
    _Most(None, 100, 2000),
    _Most(200, 20, 500),
    _Most(50, 5, 100),
    _Most(10, 0, 20),
    _Most(3, 0, 0),
    _Most(0, 0, 0),
)
"""what is tried where there is a limit, in turn"""


def markdown(report: Report, *, when: str = "", limit: int | None = None) -> str:
    """Return the report; "" where not even its shortest form keeps the limit.

    Args:
        report: what to show.
        when: date and time of the session.
        limit: bytes in UTF-8 that it has at most; it is shortened to that, and says so.
    """
    text = _text(report, when, _ALL)
    if limit is None or len(text.encode()) <= limit:
        return text
    shorter = (_text(report, when, most) for most in _SHORTER)
    return next((text for text in shorter if len(text.encode()) <= limit), "")


def code(text: str) -> str:
    """Return a name as code: one line, in which nothing is markup, in a table as well."""
    text = shortened(printable(text), LONGEST_NAME)
    if not text:
        return ""
    if not set(text) & set("`|\\") and text == text.strip():
        return f"`{text}`"
    return f"<code>{re.sub(r'[^ A-Za-z0-9./]', _entity, text)}</code>"


def prose(text: str) -> str:
    """Return a sentence on one line with nothing in it that Markdown would take as markup."""
    text = printable(" ".join(text.split()))
    if len(text) > LONGEST_SENTENCE:
        text = f"{text[:LONGEST_SENTENCE]}…"
    return _LINKS.sub(r"\\\1\2", _SPECIAL.sub(r"\\\1", text))


def _entity(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"


def _text(report: Report, when: str, most: _Most) -> str:
    results = sorted(report.results, key=urgency)
    failures = [it for it in results if it.verdict.failed and not it.expected]
    blocks = [
        *_head(report, failures, when),
        *_failed(failures, most),
        *_tables(results, most),
        *_end(report, most),
    ]
    if most != _ALL:
        blocks.append("*This report was shortened to the size that is shown here.*")
    return "\n\n".join(blocks) + "\n"


def _head(report: Report, failures: Sequence[Result], when: str) -> Iterator[str]:
    number = len(report.results)
    title = f"{len(failures)} of {number} failed" if failures else f"{number} measured, none failed"
    yield f"## GPU memory: {title if number else 'no test was measured'}"
    yield from ([prose(report.device)] if report.device else [])
    counts = session_text.counts(report.results).removeprefix("gpumem: ")
    facts = [counts, *(f"{name}={value}" for name, value in report.options.items()), when]
    if any(facts):
        yield " · ".join(prose(fact) for fact in facts if fact)
    if report.remarks:
        yield "\n".join(f"- {prose(remark)}" for remark in report.remarks)


# -- failures --


def _failed(failures: Sequence[Result], most: _Most) -> Iterator[str]:
    shown = failures[: most.failures]
    for index, result in enumerate(shown):
        detailed = most.details is None or index < most.details
        yield from _failure(result, detailed=detailed)
    if len(shown) < len(failures):
        yield f"And {len(failures) - len(shown)} more that failed."


def _failure(result: Result, *, detailed: bool) -> Iterator[str]:
    verdict = result.verdict
    part = f" part {code(result.part)}" if result.part else ""
    yield f"### ✕ {code(result.nodeid)}{part}"
    yield f"**{result.device_key}**: {prose(verdict.headline)}"
    if detailed:
        yield from _details(result)
    lines = [f"- note: {prose(note)}" for note in verdict.notes]
    lines += [f"- hint: {prose(hint)}" for hint in hints_of(result)]
    lines += [f"- snapshot: {code(result.snapshot)}"] if result.snapshot else []
    if lines:
        yield "\n".join(lines)
    if verdict.remedy:
        yield f"Next: {prose(verdict.remedy.removesuffix(verdict.command))}"
    if verdict.command:
        yield _fenced(printable(verdict.command), "sh")


def _details(result: Result) -> Iterator[str]:
    measurement = result.measurement
    oom = measurement.out_of_memory if measurement else None
    tables = [_comparisons(result, "needed" if oom else "measured")]
    if oom:
        tables.insert(0, _table(("", ""), [(title, prose(x)) for title, x in _shortage(result)]))
    for device in device_rows(result, "", drawn=False):
        tables += _device_tables(device, several=len(measurement.peaks if measurement else ()) > 1)
    tables = [table for table in tables if table]
    if tables:
        yield "<details><summary>Figures, and where they come from</summary>"
        yield prose(f"Step: {session_text.circumstances(result)}")
        yield from tables
        yield "</details>"


def _shortage(result: Result) -> list[tuple[str, str]]:
    oom = result.measurement.out_of_memory if result.measurement else None
    return session_text.shortage_rows(result, oom) if oom else []


def _comparisons(result: Result, measured: str) -> str:
    several = len({row.device for row in result.verdict.comparisons}) > 1
    rows = [
        (
            row.title + (f", device {row.device}" if several else ""),
            size(row.budget),
            size(row.baseline),
            size(row.measured),
            _difference(row.difference),
        )
        for row in result.verdict.comparisons
    ]
    return _table(("", "budget", "baseline", measured, "difference"), rows)


def _device_tables(device: DeviceRows, *, several: bool) -> Iterator[str]:
    where = f", device {device.index}" if several else ""
    titles = (f"at the peak{where}", "baseline", "now", "difference")
    rows = [*device.categories, device.total, device.cached]
    yield _table(titles, [(row.name, *_sizes(row)) for row in rows])
    sites = device.sites[:MOST_SITES]
    of_sites = (f"allocated by{where}", *titles[1:], "of", "blocks", "module", "code")
    yield _table(of_sites, [(code(row.name), *_sizes(row), *_subject(row)) for row in sites])
    more = len(device.sites) - len(sites)
    yield f"And {more} more source lines." if more else ""
    yield "\n".join(f"- {prose(note)}" for note in device.notes)


def _sizes(row: Row) -> tuple[str, str, str]:
    return size(row.before), size(row.now), _difference(row.difference)


def _subject(row: Row) -> tuple[str, str, str, str]:
    if row.site is None:
        return ("", "", "", "")
    blocks = str(row.blocks) if row.blocks else ""
    return row.site.category, blocks, code(row.site.module), code(row.site.code)


def _difference(nbytes: int | None) -> str:
    return "" if nbytes is None else format_size(nbytes, signed=nbytes != 0)


# -- every test --


def _tables(results: Sequence[Result], most: _Most) -> Iterator[str]:
    sentences = compared(results)
    for key in dict.fromkeys(it.device_key for it in results):
        found = [it for it in results if it.device_key == key]
        shown = found[: most.rows]
        yield f"### {key}"
        if key in sentences:
            yield f"{prose(sentences[key])}."
        titles = ("", "test", "verdict", "allocated, MiB", "reserved, MiB", "change", "budget")
        yield _table(titles, [_row(it) for it in shown])
        if len(shown) < len(found):
            yield f"And {len(found) - len(shown)} more."


def _row(result: Result) -> tuple[str, ...]:
    name = code(result.nodeid) + (f" {code(result.part)}" if result.part else "")
    allocated, reserved = taken(result.measurement) if result.measurement else ("", "")
    xfail = " (xfail)" if result.expected else ""
    return (
        _mark(result),
        name,
        f"{result.verdict.kind}{xfail}",
        escape(allocated),
        escape(reserved),
        change(result),
        escape(budget_use(result)),
    )


def _mark(result: Result) -> str:
    if result.verdict.failed:
        return "✕"
    return {Kind.WITHIN: "✓", Kind.IMPROVED: "↓"}.get(result.verdict.kind, "○")


def _end(report: Report, most: _Most) -> Iterator[str]:
    if report.updates is not None:
        brief = most != _ALL
        text = update_text.update_summary(report.updates, width=_UPDATE_WIDTH, brief=brief)
        yield "### Baselines"
        yield _fenced(text.removeprefix("gpumem: baselines: "), "text")
    command = session_text.next_command(report.results, updating=report.updates is not None)
    if command:
        yield "To record baselines:"
        yield _fenced(command, "sh")


# -- Markdown --


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table without empty columns; "" where there are no rows."""
    found = list(rows)
    kept = [i for i in range(len(titles)) if any(row[i] for row in found)]
    if not found or not kept:
        return ""
    left = {"", "test", "verdict", "of", "module", "code"}
    names = [titles[i] for i in kept]
    rule = ["---" if it in left or not n else "---:" for n, it in enumerate(names)]
    lines = [names, rule, *([row[i] for i in kept] for row in found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _fenced(text: str, language: str) -> str:
    """Return a block of code, fenced with more backticks than it has in a row."""
    fence = "`" * max(3, *(len(run) + 1 for run in ["", *_RUNS.findall(text)]))
    return f"{fence}{language}\n{text}\n{fence}"
