"""Annotations that GitHub Actions shows beside the source, one for each failed result.

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
        root: pytest's root folder, to which the results' locations are relative.
        workspace: the repository's folder; files outside of it are named as they are.
    """
    for result in sorted(results, key=urgency):
        if not result.verdict.failed or result.expected:
            continue
        properties = {"title": f"GPU memory: {result.name}"}
        if result.location is not None:
            path, line = result.location
            # GitHub names files from the repository's folder, which may be reached by a link.
            file = Path(os.path.realpath(root / path))
            repository = os.path.realpath(workspace)
            inside = file.is_relative_to(repository)
            name = file.relative_to(repository).as_posix() if inside else str(file)
            properties = {"file": name, "line": str(line), **properties}
        # In a property these two end a value or a name.
        encoded = {
            name: _message(value).replace(":", "%3A").replace(",", "%2C")
            for name, value in properties.items()
        }
        fields = ",".join(f"{name}={value}" for name, value in encoded.items())
        message = f"{result.verdict.headline} ({result.device_key})"
        yield f"::error {fields}::{_message(message[:_LONGEST])}"


def _message(sentence: str) -> str:
    """Return a sentence with the characters encoded that a command's message cannot have."""
    sentence = sentence.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return printable(sentence)
