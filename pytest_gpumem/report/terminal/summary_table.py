"""Render the table at the end of a session: both peaks of every test, and notes on them."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.breakdowns import provenance_text
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.notes import Note, NoteKind, Severity
from pytest_gpumem.report.model import hints_of, with_alike_ranks
from pytest_gpumem.report.parts.cause_sentences import row_cause
from pytest_gpumem.report.parts.cells import figure_cells
from pytest_gpumem.report.parts.styles import Line, StyledText, lines_of, tone
from pytest_gpumem.report.parts.tables import TableRow, drawn_rows
from pytest_gpumem.report.parts.toolchain_change import tests_text
from pytest_gpumem.report.text import printable, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.judge.result import Result

FEW_ROWS = 25
"""if there are more results than this, those with the verdict "ok" are not listed"""
MAX_NOTES = 10
"""notes below the table; each kind that warns of a wrong figure is shown once in any case"""

_SIZES = re.compile(r"\d[\d,.]* (?:[KMGT]i)?B\b")
"""sizes in a note, but not line numbers or versions; of notes that differ only in these, one is
shown"""

_TITLES = ("test", "allocated", "reserved", "pinned", "change", "budget", "verdict")


def summary_table(results: Sequence[Result], verbosity: int = 0, width: int = 80) -> list[Line]:
    """Return the table for the end of the session; [] without rows.

    ``verbosity`` below 0 gives no rows; 0 every test or, if there are more than ``FEW_ROWS``, those
    whose verdict is not "ok"; 1 every test and hints; 2 also provenance and every note.
    """
    results = listed = with_alike_ranks(results)
    if verbosity == 0 and len(listed) > FEW_ROWS:
        listed = [result for result in listed if result.verdict.kind is not Kind.WITHIN]
    if verbosity < 0 or not listed:
        return []
    modules = {result.module for result in listed}
    devices = {result.device_key for result in listed}
    title = "Peak memory in MiB"
    title += f" on {devices.pop()}" if len(devices) == 1 else ""
    title += f", {printable(modules.pop())}" if len(modules) == 1 else ""
    if len(listed) < len(results):
        title += f" ({len(listed)} of {len(results)}, -v lists all)"
    table = [*lines_of(wrapped("", title, width)), ()]
    rows = _rows(listed)
    head, *drawn = drawn_rows(_TITLES, rows, width)
    table += lines_of(head)
    for row, drawn_row in zip(rows, drawn, strict=True):
        if row.result is None:
            table += lines_of(drawn_row)
        else:
            start = len(drawn_row) - len(row.cells[-1])
            table.append(
                (StyledText(drawn_row[:start]), StyledText(drawn_row[start:], tone(row.result)))
            )
    if verbosity > 1:
        counter = Counter(result.measurement.provenance for result in listed if result.measurement)
        table += [()] if counter else []
        for provenance, number in counter.items():
            tests = f" ({tests_text(number)})" if len(counter) > 1 else ""
            table += lines_of(
                wrapped("made with: ", f"{provenance_text(provenance)}{tests}", width)
            )
    # A failure shows its notes in its own section.
    passed = [result for result in listed if not result.verdict.failed]
    notes = [
        note
        for result in passed
        for note in result.verdict.notes
        # The result's word, "recorded", already says so.
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


def _rows(results: Sequence[Result]) -> list[TableRow]:
    """Return a row per result, by file and device in the order of their first results.

    Each group starts with a heading of its file, if there are several files, and of its device, if
    there are several devices. A failed test's cause follows its row.
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
        whole_test = ""  # the last whole test's row: its parts are indented below it
        for result in members:
            below = bool(result.part) and result.nodeid == whole_test
            whole_test = whole_test if result.part else result.nodeid
            name = f"({result.part})" if below else result.name.removeprefix(f"{module}::")
            indent = "  " * (bool(head) + below)
            row = (f"{indent}{printable(name)}", *figure_cells(result), result.word)
            rows.append(TableRow(row, result))
            if cause := row_cause(result):
                rows.append(TableRow((cause,), is_cause=True))
    return rows


def _counted_lines(
    label: str, notes: Iterable[Note], width: int, *, every_note: bool
) -> Iterator[str]:
    """Yield distinct notes or hints with their number of tests, the most important first.

    Notes that differ only in sizes are merged into the most frequent one. If there are many, each
    kind that warns of a wrong figure is shown once, and others fill up to :data:`MAX_NOTES`.
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
