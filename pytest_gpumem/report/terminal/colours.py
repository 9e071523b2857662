"""Colours of a session's text: its lines in stretches, each with the name of its style.

The text is the same without: :mod:`pytest_gpumem.plugin.session_plugin` knows whether the terminal
has colours.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

from pytest_gpumem.judge.verdict import WORDS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

Style = Literal["headline", "command", "bad", "good", "open", ""]
TONES: Final[dict[str, Style]] = {
    **dict.fromkeys(("over budget", "out of memory", "regressed", "leaked"), "bad"),
    **dict.fromkeys((WORDS[Kind.WITHIN], "improved", "recorded"), "good"),
    **dict.fromkeys(("no baseline", "incomparable", "without baseline"), "open"),
}
"""styles of the words for verdicts, in tables and counts"""
_WORD: Final = "|".join(sorted(TONES, key=len, reverse=True))
_IN_ROW: Final = re.compile(rf"(?<=  )({_WORD})(?: \(xfail\))?$")
_IN_COUNTS: Final = re.compile(rf"\d+ ({_WORD})(?: \(\d+ as expected\))?")
_COUNTS: Final = re.compile(rf"gpumem: {_IN_COUNTS.pattern}(?:, {_IN_COUNTS.pattern})*")
_COMMAND: Final = re.compile(r"^(?: {4}|gpumem: to record baselines: )((?:pytest|torchrun) .*)$")


def styled(line: str) -> Iterator[tuple[str, Style]]:
    """Yield the stretches of a line of the session's summary, each with its style."""
    pattern = _IN_COUNTS if _COUNTS.fullmatch(line) else _IN_ROW
    command = _COMMAND.match(line)
    end = 0
    if command is not None:
        end = command.start(1)
        yield line[:end], ""
        yield line[end:], "command"
        return
    for match in pattern.finditer(line):
        yield line[end : match.start()], ""
        # What fails as its xfail says is no bad news.
        expected = match[0].endswith("(xfail)")
        yield match[0], "open" if expected else TONES[match[1]]
        end = match.end()
    yield line[end:], ""
