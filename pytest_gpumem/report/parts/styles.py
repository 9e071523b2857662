"""Split terminal lines into parts with named styles.

Without styles the text is the same: :mod:`pytest_gpumem.plugin.session_plugin` knows whether the
terminal has colors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from pytest_gpumem.report.text import encodable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.judge.result import Result

Style = Literal["headline", "command", "bad", "good", "open", ""]
"""includes every :data:`~pytest_gpumem.judge.verdict.Tone`"""


class StyledText(NamedTuple):
    """Part of a line, with the name of its style."""

    text: str
    style: Style = ""


Line = tuple[StyledText, ...]


def tone(result: Result) -> Style:
    """Return the style of a result's verdict; a failure that xfail expects is not shown as bad."""
    if result.expected:
        return "open"
    return "good" if result.verdict.recorded else result.verdict.kind.tone


def lines_of(text: str, style: Style = "") -> list[Line]:
    """Split a text into lines of one style; [] for ""."""
    return [(StyledText(line, style),) for line in text.splitlines()]


def encodable_lines(lines: Iterable[Iterable[StyledText]], encoding: str) -> list[Line]:
    """Return lines in characters that a terminal's encoding can show."""
    return [
        tuple(StyledText(encodable(text, encoding), style) for text, style in line)
        for line in lines
    ]
