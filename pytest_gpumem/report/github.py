"""Annotate source lines in GitHub Actions: failed tests, and the lines that made them fail.

A failed result is an error on its marker's line; a source line that made tests fail is a warning.

The format is that of "Workflow commands for GitHub Actions" in GitHub's documentation: in a
property ``%``, carriage return, newline, ``:`` and ``,`` are percent-encoded, in a message only the
first three.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import site_name
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.model import urgency
from pytest_gpumem.report.text import printable
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Site

SUMMARY_LIMIT: Final = 1024 * 1024
"""bytes that GitHub accepts for a step's summary; it shows nothing of a larger one"""
MAX_MESSAGE_LENGTH: Final = 4000
"""maximum number of characters of a message"""
MAX_NAMES: Final = 10
"""maximum number of tests that a warning names"""


def error_lines(results: Iterable[Result], *, root: Path, workspace: Path) -> Iterator[str]:
    """Yield an error per failed result, the most urgent first: GitHub shows ten per step.

    Files outside ``workspace``, the repository's folder, keep their full path.
    """
    for result in sorted(results, key=urgency):
        if not result.verdict.failed or result.expected:
            continue
        properties = {"title": f"GPU memory: {result.name}"}
        if result.location is not None:
            path, line = result.location
            file = _name_of_file(root / path, workspace)
            properties = {"file": file, "line": str(line), **properties}
        yield _command("error", properties, f"{result.verdict.headline} ({result.device_key})")


def cause_warnings(results: Iterable[Result], *, root: Path, workspace: Path) -> Iterator[str]:
    """Yield a warning per source line that made tests fail, the line with most tests first.

    They are warnings because GitHub shows ten of these per step in addition to ten errors. A line
    outside ``workspace``, the repository's folder, is skipped: GitHub cannot annotate it.
    """
    groups: dict[tuple[str, int], list[tuple[Result, str]]] = {}
    for result in sorted(results, key=urgency):
        cause = line_at_fault(result) if result.verdict.failed and not result.expected else None
        if cause is not None:
            path, line, words = cause
            groups.setdefault((path, line), []).append((result, words))
    repository = os.path.realpath(workspace)
    for (path, line), members in sorted(groups.items(), key=lambda group: -len(group[1])):
        file = Path(os.path.realpath(root / path))
        if not file.is_file() or not file.is_relative_to(repository):
            continue
        (first, words), number = members[0], len(members)
        tests = "1 failure" if number == 1 else f"{number} failures"
        properties = {
            "file": _name_of_file(file, workspace),
            "line": str(line),
            "title": f"GPU memory: {tests} by this line",
        }
        names = ", ".join(result.name for result, _ in members[:MAX_NAMES])
        hidden = f" and {number - MAX_NAMES} more" if number > MAX_NAMES else ""
        where = f" of {first.name}" if number > 1 else ""
        yield _command("warning", properties, f"{words}{where}; {names}{hidden} failed")


def line_at_fault(result: Result) -> tuple[str, int, str] | None:
    """Return the file and line that made a test fail, with a sentence; None if unknown."""
    measurement = result.measurement
    oom = measurement.out_of_memory if measurement else None
    held_lines = [line for line in result.held_lines if line.reasons]
    keepers = [
        f"{_amount(line.site)} of {site_name(line.site)} {', '.join(line.reasons)}"
        for line in held_lines
    ]
    if oom is not None:
        requested = f" of {format_size(oom.requested)}" if oom.requested else ""
        words = "; ".join([f"out of memory: a request{requested}", *keepers])
        return (oom.path, oom.line, words) if oom.path else None
    stayed = measurement.stayed if measurement else None
    if result.verdict.kind is Kind.LEAKED and stayed is not None and stayed.sites:
        site = stayed.sites[0]
        held = f", held by {stayed.holders[0].names}" if stayed.holders else ""
        return site.path, site.line, f"leaked: {_amount(site)}{held}"
    lead = result.verdict.lead
    if lead is not None and lead.path:
        reasons = result.verdict.causes[0].reasons if result.verdict.causes else ()
        return lead.path, lead.line, "; ".join([lead.sentence, *reasons])
    if held_lines:  # over budget; without a keeper no line is at fault
        site = held_lines[0].site
        return site.path, site.line, f"{result.verdict.kind}: {'; '.join(keepers)}"
    return None


def _amount(site: Site) -> str:
    return f"{format_size(site.nbytes)} of {site.category}"


def _name_of_file(file: Path, workspace: Path) -> str:
    """Return a file's path from the repository's folder, following links, as GitHub expects it."""
    real, repository = Path(os.path.realpath(file)), os.path.realpath(workspace)
    return real.relative_to(repository).as_posix() if real.is_relative_to(repository) else str(real)


def _command(name: str, properties: Mapping[str, str], message: str) -> str:
    # A property's value must not contain the "," before the next property, or the ":" at the end.
    encoded = {
        name: _message(value).replace(":", "%3A").replace(",", "%2C")
        for name, value in properties.items()
    }
    fields = ",".join(f"{name}={value}" for name, value in encoded.items())
    return f"::{name} {fields}::{_message(message[:MAX_MESSAGE_LENGTH])}"


def _message(sentence: str) -> str:
    """Encode the characters that a command's message cannot contain."""
    sentence = sentence.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return printable(sentence)
