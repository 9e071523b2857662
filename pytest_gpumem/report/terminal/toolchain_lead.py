"""Render the lead of a session's summary if a new toolchain changed the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import Kind, UpdateCommand
from pytest_gpumem.report.parts.session_words import moved_together
from pytest_gpumem.report.parts.styles import StyledText, lines_of
from pytest_gpumem.report.text import printable, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.report.parts.styles import Line
    from pytest_gpumem.report.parts.toolchain_change import CommonChange

_ELSEWHERE = "(other tests moved with it, see the summary; -v shows the details)"


def lead_lines(
    results: Sequence[Result], width: int = 80, *, arguments: Sequence[str] = ()
) -> list[Line]:
    """Return the first lines of a summary; [] if no new toolchain moved several tests together."""
    groups = moved_together(results)
    sentences = [group.sentence for group in groups]
    command: UpdateCommand | None = None
    regressed = {
        result.name
        for result in results
        if result.verdict.kind is Kind.REGRESSED and result.verdict.failed
    }
    moved = _moved_names(groups)
    alone = len(regressed - moved)
    if regressed & moved and alone:
        sentences.append(f"{alone} more regressed for another reason: begin with these")
    elif regressed & moved:
        commands = (result.verdict.command for result in results if result.name in moved)
        command = next(filter(None, commands), UpdateCommand()).of(arguments)
        sentences.append("if this is intended, run")
    paragraphs = [wrapped("gpumem: ", sentence, width) for sentence in sentences]
    lines = [line for paragraph in paragraphs for line in lines_of(paragraph)]
    if command:
        lines.append((StyledText("    "), StyledText(printable(str(command)), "command")))
    return lines


def short_texts(results: Sequence[Result]) -> dict[str, str]:
    """Return a line for each test that only a new toolchain made fail, in place of its section."""
    moved = _moved_names(moved_together(results))
    lines: dict[str, str] = {}
    failed_alone = set()
    for result in results:
        if not result.verdict.failed:
            continue
        if result.name in moved and result.verdict.kind is Kind.REGRESSED:
            lines.setdefault(result.nodeid, f"{result.verdict.headline}\n{_ELSEWHERE}")
        else:
            failed_alone.add(result.nodeid)
    return {nodeid: line for nodeid, line in lines.items() if nodeid not in failed_alone}


def _moved_names(groups: Iterable[CommonChange]) -> set[str]:
    shifts = (shift for group in groups for shift in group.changes)
    return {f"{shift.nodeid} ({shift.part})" if shift.part else shift.nodeid for shift in shifts}
