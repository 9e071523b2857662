"""A failed test in at most fifteen lines: the cause, notes, the next step."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from pytest_gpumem.attribution.hints import STILL_HELD
from pytest_gpumem.attribution.optimizer_watch import FRESH
from pytest_gpumem.attribution.snapshots import VIEWER
from pytest_gpumem.judge.result import hints_of
from pytest_gpumem.report.causes import shared_causes
from pytest_gpumem.report.terminal.cause_text import (
    ACCEPT,
    HINTED,
    REASON_INDENT,
    FailureLine,
    cause_lines,
)
from pytest_gpumem.report.text import encodable, printable, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.judge.result import Result

MOST_LINES: Final = 15
"""lines of a failure; a remedy and its command are never cut"""


def brief_failures(
    results: Sequence[Result],
    *,
    width: int = 80,
    ascii_only: bool = False,
    whole_code: bool = False,
) -> list[FailureLine]:
    """Return the lines of one test's failures, its parts' first; none where nothing failed.

    Args:
        results: of the test and its parts.
        width: columns of the terminal.
        ascii_only: use no other characters.
        whole_code: whether source lines are shown whole, however long.
    """
    failed = sorted(
        (result for result in results if result.verdict.failed),
        key=lambda result: not result.part,
    )
    lines: list[FailureLine] = []
    for index, result in enumerate(failed):
        # A command that accepts the whole test accepts its parts: it stands below the last.
        command = result.verdict.command
        repeated = any(command == later.verdict.command for later in failed[index + 1 :])
        # So does the snapshot, which is of the whole test.
        last = index == len(failed) - 1
        shown = result if last else replace(result, snapshot="")
        next_step = not (command and repeated)
        lines += _brief_lines(shown, width, next_step=next_step, whole_code=whole_code)
    return [line._replace(text=encodable(line.text, ascii_only=ascii_only)) for line in lines]


def _brief_lines(
    result: Result, width: int, *, next_step: bool, whole_code: bool
) -> list[FailureLine]:
    verdict = result.verdict
    part = f"part {result.part}: " if result.part else ""
    head = wrapped("", f"{part}{verdict.headline}", width).splitlines()
    causes = cause_lines(result, width, whole_code=whole_code)
    ending = list(_next_lines(result, width)) if next_step else []
    hints = hints_of(result)
    if verdict.kind not in HINTED:
        hints = [hint for hint in hints if STILL_HELD in hint]
    notes = list(verdict.notes)
    if any(FRESH in hint for hint in hints):  # the hint says the same, with its bytes
        notes = [note for note in notes if not note.startswith(FRESH)]
    paragraphs = [wrapped("note: ", note, width).splitlines() for note in notes]
    paragraphs += [wrapped("hint: ", hint, width).splitlines() for hint in hints]
    # The first cause is always shown, and one line is left to say that more is known.
    reasons = takewhile(lambda line: line.startswith(REASON_INDENT), causes[1:])
    first = len(causes[:1]) + sum(1 for _ in reasons)
    room = MOST_LINES - len(head) - first - len(ending) - 1
    shown: list[str] = []
    for lines in paragraphs:
        if len(shown) + len(lines) <= room:
            shown += lines
    causes = causes[: first + max(0, room - len(shown))]
    hidden = len(paragraphs) - sum(lines[0] in shown for lines in paragraphs)
    left_out = []
    if hidden:
        left_out.append("1 more note" if hidden == 1 else f"{hidden} more notes and hints")
    if result.measurement and result.measurement.attributions:
        left_out.append("all figures")
    if left_out:
        shown.append(f"({' and '.join(left_out)} with -v)")
    commands = {f"    {printable(verdict.command)}", f"    {printable(verdict.accept)}"}
    return [
        *(FailureLine(line, "headline") for line in head),
        *(
            FailureLine(line, "command" if line in commands else "")
            for line in (*causes, *shown, *ending)
        ),
    ]


def _next_lines(result: Result, width: int) -> Iterator[str]:
    """Yield the step's circumstances, and the remedy."""
    verdict = result.verdict
    circumstances = [
        "" if result.batch_size is None else f"batch size {result.batch_size}",
        f"rank {result.rank_label}" if result.rank_label else "",
        result.budget,
        f"on {result.device_key}",
    ]
    yield from wrapped("step: ", ", ".join(filter(None, circumstances)), width).splitlines()
    if result.snapshot:
        yield f"snapshot: {printable(result.snapshot)} (open it at {VIEWER})"
    if verdict.command:
        yield from wrapped(
            "next: ", verdict.remedy.removesuffix(verdict.command), width
        ).splitlines()
        yield f"    {printable(verdict.command)}"
    elif verdict.remedy:
        yield from wrapped("next: ", verdict.remedy, width).splitlines()
    if verdict.accept:
        yield ACCEPT
        yield f"    {printable(verdict.accept)}"


def repeated_lines(results: Iterable[Result], *, width: int = 80) -> dict[str, list[FailureLine]]:
    """Return a line for each test that fails of the same cause as an earlier one, by nodeid."""
    lines: dict[str, list[FailureLine]] = {}
    for cause in shared_causes(results):
        first, *later = cause.results
        for result in later:
            sentence = f"{result.verdict.kind}: same cause as {first.nodeid}: {cause.place}"
            lines[result.nodeid] = [
                FailureLine(line, "headline") for line in wrapped("", sentence, width).splitlines()
            ]
    return lines
