"""What GitHub Actions shows beside the source: an annotation for each result that failed.

The form is that of "Workflow commands for GitHub Actions" in GitHub's documentation: in a property
``%``, carriage return, newline, ``:`` and ``,`` are percent-encoded, in a message the first three.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.judge.result import urgency
from pytest_gpumem.report.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_gpumem.judge.result import Result

SUMMARY_LIMIT: Final = 1024 * 1024
"""bytes that GitHub takes of a step's summary; of a larger one it shows nothing"""
_LONGEST: Final = 4000
"""characters of a message"""


def error_lines(results: Iterable[Result], *, root: Path, workspace: Path) -> Iterator[str]:
    """Yield a line for each result that failed, the most urgent first: GitHub shows ten a step.

    Args:
        results: of the session.
        root: what the results' locations are relative to: pytest's root folder.
        workspace: the repository's folder; files outside of it are named as they are.
    """
    for result in sorted(results, key=urgency):
        if result.verdict.failed and not result.expected:
            yield _annotation(result, root, workspace)


def _annotation(result: Result, root: Path, workspace: Path) -> str:
    properties = {"title": f"GPU memory: {result.name}"}
    if result.location is not None:
        path, line = result.location
        properties = {"file": _file(root / path, workspace), "line": str(line), **properties}
    given = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    message = f"{result.verdict.headline} ({result.device_key})"
    return f"::error {given}::{_data(message[:_LONGEST])}"


def _file(path: Path, workspace: Path) -> str:
    """Return a file as GitHub wants it: from the repository's folder on."""
    path, workspace = (Path(os.path.realpath(it)) for it in (path, workspace))
    return path.relative_to(workspace).as_posix() if path.is_relative_to(workspace) else str(path)


def _data(text: str) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return printable(text)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
