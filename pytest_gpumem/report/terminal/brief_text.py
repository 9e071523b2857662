"""Render a failed test in at most fifteen lines: the cause, notes, the next step."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from pytest_gpumem.notes import NoteKind, ranked
from pytest_gpumem.recording.snapshots import VIEWER
from pytest_gpumem.report.model import hints_of, with_alike_ranks
from pytest_gpumem.report.parts.cause_sentences import shared_causes
from pytest_gpumem.report.parts.cells import circumstances
from pytest_gpumem.report.parts.styles import StyledText
from pytest_gpumem.report.terminal.cause_text import ACCEPT, BLAME, HINTED, cause_table
from pytest_gpumem.report.text import printable, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Verdict
    from pytest_gpumem.notes import Note

MAX_LINES: Final = 15
"""lines per failure; a remedy and its command are never cut"""


def brief_failures(
    results: Sequence[Result], *, width: int = 80, whole_code: bool = False
) -> list[StyledText]:
    """Return the lines on one test's failures, its parts' first; [] if nothing failed.

    With ``whole_code`` source lines are not cut, however long.
    """
    lines: list[StyledText] = []
    for result, repeated in failures_in_order(results):
        verdict = result.verdict
        part = f"part {result.part}: " if result.part else ""
        head = wrapped("", f"{part}{verdict.headline}", width).splitlines()
        causes = cause_table(result, width, whole_code=whole_code)
        ending: list[StyledText] = []
        if not repeated:
            step = wrapped("step: ", circumstances(replace(result, part="")), width)
            ending += map(StyledText, step.splitlines())
            if result.snapshot:
                snapshot = f"snapshot: {printable(result.snapshot)} (open it at {VIEWER})"
                ending.append(StyledText(snapshot))
            ending += remedy_lines(verdict, width)
        hints = [
            hint
            for hint in hints_of(result)
            if verdict.kind in HINTED or explains_growth(hint, verdict)
        ]
        notes = told_notes(verdict.notes, hints)
        paragraphs = [wrapped("note: ", note.text, width).splitlines() for note in notes]
        paragraphs += [wrapped("hint: ", hint.text, width).splitlines() for hint in hints]
        # The first cause is always shown; one line is reserved for saying what is left out.
        first = len(causes[:1]) + sum(1 for _ in takewhile(lambda line: line.below, causes[1:]))
        room = MAX_LINES - len(head) - first - len(ending) - 1
        shown: list[str] = []
        hidden = 0
        for paragraph in paragraphs:
            if len(shown) + len(paragraph) <= room:
                shown += paragraph
            else:
                hidden += 1
        causes = causes[: first + max(0, room - len(shown))]
        left_out = []
        if hidden:
            left_out.append("1 more note" if hidden == 1 else f"{hidden} more notes and hints")
        if result.measurement and result.measurement.attributions:
            left_out.append("all figures")
        if left_out:
            shown.append(f"({' and '.join(left_out)} with -v)")
        body = (*(line.text for line in causes), *shown)
        lines += [StyledText(line, "headline") for line in head]
        lines += [*map(StyledText, body), *ending]
    return lines


def explains_growth(hint: Note, verdict: Verdict) -> bool:
    """Return whether a hint's memory may have caused the growth: still held, or an unused graph."""
    if hint.kind is NoteKind.UNUSED_GRAPH:
        return any(cause.category == "activations" for cause in verdict.causes[:1])
    return hint.kind is NoteKind.STILL_HELD


def failures_in_order(results: Sequence[Result]) -> Iterator[tuple[Result, bool]]:
    """Yield one test's failures, parts first, and whether a later one has the same command.

    A command that accepts the whole test also accepts its parts, and the snapshot is of the whole
    test: only the last result has the snapshot.
    """
    failed = [result for result in with_alike_ranks(results) if result.verdict.failed]
    failed.sort(key=lambda result: not result.part)
    for index, result in enumerate(failed):
        later = failed[index + 1 :]
        command = result.verdict.command
        repeated = bool(command) and any(command == each.verdict.command for each in later)
        yield replace(result, snapshot="") if later else result, repeated


def told_notes(notes: Iterable[Note], hints: Iterable[Note]) -> list[Note]:
    """Rank a failure's notes, leaving out those that a hint repeats with figures."""
    next_step = any(hint.kind is NoteKind.NEXT_STEP for hint in hints)
    return [
        note for note in ranked(notes) if not (next_step and note.kind is NoteKind.FRESH_OPTIMIZER)
    ]


def remedy_lines(verdict: Verdict, width: int) -> Iterator[StyledText]:
    """Yield the next step, and the commands that take it, find the edit, or accept the figures."""
    if verdict.advice:
        yield from map(StyledText, wrapped("next: ", verdict.advice, width).splitlines())
    if verdict.command:
        yield StyledText(f"    {printable(str(verdict.command))}", "command")
    if verdict.blame:
        yield StyledText(BLAME)
        yield StyledText(f"    {printable(verdict.blame)}", "command")
    if verdict.accept:
        yield StyledText(ACCEPT)
        yield StyledText(f"    {printable(verdict.accept)}", "command")


def repeated_lines(results: Iterable[Result], *, width: int = 80) -> dict[str, list[StyledText]]:
    """Return a line for each test that fails for the same cause as an earlier one, by nodeid."""
    lines: dict[str, list[StyledText]] = {}
    for cause in shared_causes(results):
        first, *later = cause.results
        for result in later:
            sentence = f"{result.verdict.kind}: same cause as {first.nodeid}: {cause.place}"
            lines[result.nodeid] = [
                StyledText(line, "headline") for line in wrapped("", sentence, width).splitlines()
            ]
    return lines
