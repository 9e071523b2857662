"""The table at the end of a session: both peaks of every test, and notes on them."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.judge.breakdown_diff import provenance_text
from pytest_gpumem.judge.result import hints_of, with_alike_ranks
from pytest_gpumem.judge.toolchain_change import tests_text
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.notes import Note, NoteKind, Severity
from pytest_gpumem.report.parts.cause_sentences import row_cause
from pytest_gpumem.report.parts.cells import figure_cells
from pytest_gpumem.report.parts.styles import Line, StyledText, lines_of, tone
from pytest_gpumem.report.parts.tables import TableRow, drawn_rows
from pytest_gpumem.report.text import mib, printable, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_gpumem.judge.result import Result

FEW_ROWS = 25
"""results that are all listed without being asked for; of more, those that are not within"""
MAX_NOTES = 10
"""notes below the table; each kind that says that a figure may be wrong has one in any case"""

_SIZES = re.compile(r"\d[\d,.]* (?:[KMGT]i)?B\b")
"""sizes in a note, and no lines or versions; of notes that differ in these alone, one is shown"""

_TITLES = ("test", "allocated", "reserved", "pinned", "change", "budget", "verdict")


_DETAIL_TITLES = (
    *("test", "held before", "retained", "segments", "retries"),
    *("device", "outside", "host"),
)


def summary_table(results: Sequence[Result], verbosity: int = 0, width: int = 80) -> list[Line]:
    """Return the table for the end of the session; none without rows.

    ``verbosity`` below 0 has no rows, 0 every test or, of more than ``FEW_ROWS``, those that are
    not within, 1 every test and hints, 2 also memory held before and after, and provenance.
    """
    results = listed = with_alike_ranks(results)
    if verbosity == 0 and len(listed) > FEW_ROWS:
        listed = [result for result in listed if result.verdict.kind is not Kind.WITHIN]
    if verbosity < 0 or not listed:
        return []
    modules = {result.module for result in listed}
    devices = {result.device_key for result in listed}
    hidden = len(results) - len(listed)
    title = "".join(
        [
            "Peak memory in MiB",
            f" on {devices.pop()}" if len(devices) == 1 else "",
            f", {printable(modules.pop())}" if len(modules) == 1 else "",
            f" ({len(listed)} of {len(results)}, -v lists all)" if hidden else "",
        ]
    )
    table = [*lines_of(wrapped("", title, width)), ()]
    table += _table(
        _TITLES,
        _rows(listed, lambda result: (*figure_cells(result), result.word), of_verdicts=True),
        width,
    )
    if verbosity > 1:
        table += [(), *lines_of("Allocated before the test and retained after it, in MiB"), ()]
        table += _table(_DETAIL_TITLES, _rows(listed, _detail_row), width)
        for paragraph in filter(None, _source_notes(listed, width)):
            table += [(), *lines_of(paragraph)]
    # A failure has a section of its own, with its notes.
    passed = [result for result in listed if not result.verdict.failed]
    notes = [
        note
        for result in passed
        for note in result.verdict.notes
        # Its word says that.
        if not (result.verdict.recorded and note.kind is NoteKind.RECORDED)
    ]
    every_note = verbosity > 1
    lines = list(_counted_lines("note", notes, width, every_note=every_note))
    if verbosity > 0:
        hints = [hint for result in passed for hint in hints_of(result)]
        lines += _counted_lines("hint", hints, width, every_note=every_note)
    if lines:
        table += [(), *(line for paragraph in lines for line in lines_of(paragraph))]
    return table


def _rows(
    results: Sequence[Result],
    cells: Callable[[Result], tuple[str, ...]],
    *,
    of_verdicts: bool = False,
) -> list[TableRow]:
    """Return a row for each result, by file and device in the order of their first results.

    Above each such group stand its file and device, where they differ; below a failed test its
    cause, where the last cell is the verdict.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.module, result.device_key), []).append(result)
    several_modules = len({module for module, _ in groups}) > 1
    several_devices = len({device_key for _, device_key in groups}) > 1
    rows: list[TableRow] = []
    for (module, device_key), members in groups.items():
        file = printable(module) if several_modules else ""
        device = f"on {device_key}" if several_devices else ""
        head = " ".join(filter(None, [file, device]))
        if head:
            rows.append(TableRow((head,)))
        whole_test = ""  # the last row of a whole test: its parts stand below it
        for result in members:
            below = bool(result.part) and result.nodeid == whole_test
            whole_test = whole_test if result.part else result.nodeid
            name = f"({result.part})" if below else result.name.removeprefix(f"{module}::")
            indent = "  " * (bool(head) + below)
            row = (f"{indent}{printable(name)}", *cells(result))
            rows.append(TableRow(row, result if of_verdicts else None))
            cause = row_cause(result) if of_verdicts else ""
            if cause:
                rows.append(TableRow((cause,), is_cause=True))
    return rows


def _table(titles: Sequence[str], rows: Sequence[TableRow], width: int) -> list[Line]:
    head, *drawn = drawn_rows(titles, rows, width)
    lines = lines_of(head)
    for row, drawn_row in zip(rows, drawn, strict=True):
        if row.result is None:
            lines += lines_of(drawn_row)
        else:
            start = len(drawn_row) - len(row.cells[-1])
            lines.append(
                (StyledText(drawn_row[:start]), StyledText(drawn_row[start:], tone(row.result)))
            )
    return lines


def _detail_row(result: Result) -> tuple[str, ...]:
    measurement = result.measurement
    if measurement is None:
        return ("",) * (len(_DETAIL_TITLES) - 1)
    held, retained = (
        " + ".join(mib(peak.allocated) for peak in peaks)
        for peaks in (measurement.held, measurement.retained)
    )
    device, outside = (
        " + ".join(mib(getattr(use, name)) for use in measurement.device_use)
        for name in ("peak", "outside")
    )
    counts = (str(measurement.segments), str(measurement.alloc_retries))
    host = "" if measurement.host is None else mib(measurement.host)
    return (held, retained, *counts, device, outside, host)


def _source_notes(results: Sequence[Result], width: int) -> Iterator[str]:
    """Yield the meaning of the columns about the device, and the provenances."""
    sources = {
        f"{use.source}, every {use.every_ms} ms" if use.every_ms else use.source
        for result in results
        if result.measurement
        for use in result.measurement.device_use
    }
    meaning = (
        "the peak that nvidia-smi shows, and the part allocated during the step outside "
        "PyTorch's allocator"
    )
    yield "\n".join(
        wrapped("device, outside: ", f"{meaning} ({source})", width) for source in sorted(sources)
    )
    counter = Counter(result.measurement.provenance for result in results if result.measurement)
    lines = []
    for provenance, number in counter.items():
        tests = f" ({tests_text(number)})" if len(counter) > 1 else ""
        lines.append(wrapped("made with: ", f"{provenance_text(provenance)}{tests}", width))
    yield "\n".join(lines)


def _counted_lines(
    label: str, notes: Iterable[Note], width: int, *, every_note: bool
) -> Iterator[str]:
    """Yield notes or hints, each once with its number of tests: the most important first.

    Of those that differ in sizes alone, the one that most tests have stands for all. Of many, each
    kind that says that a figure may be wrong has one, and further ones the rest of
    :data:`MAX_NOTES`.
    """
    counter = Counter(notes)
    by_rank = sorted(counter, key=lambda note: (note.severity, -counter[note]))
    alike: dict[tuple[NoteKind, str], list[Note]] = {}
    for note in by_rank:
        key = note.text if every_note else _SIZES.sub("", note.text)
        alike.setdefault((note.kind, key), []).append(note)
    groups = list(alike.values())
    shown = groups
    if not every_note and len(groups) > MAX_NOTES:
        first_of_kind = {group[0].kind: group for group in reversed(groups)}
        warnings = [
            group for group in first_of_kind.values() if group[0].severity <= Severity.FIGURE
        ]
        further = [group for group in groups if group not in warnings]
        chosen = [*warnings, *further[: max(0, MAX_NOTES - len(warnings))]]
        shown = [group for group in groups if group in chosen]
    for first, *like_it in shown:
        tests = tests_text(counter[first])
        if like_it:
            number = sum(counter[note] for note in like_it)
            tests += f"; {tests_text(number)} with other sizes"
        yield wrapped(f"{label}: ", f"{first.text} ({tests})", width)
    hidden = sum(map(len, groups)) - sum(map(len, shown))
    if hidden:
        ending = f"1 more {label}" if hidden == 1 else f"{hidden} more {label}s"
        yield f"{label}: and {ending} (-vv lists all)"
