"""Text for a terminal: on one line, within its columns, in its encoding, in tables."""

from __future__ import annotations

import textwrap
import unicodedata
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_COMBINING = "\u0300"
"""the first character that does not take one column"""


def size(nbytes: int | None) -> str:
    """Return a size as it is written; "" for none."""
    return "" if nbytes is None else format_size(nbytes)


def printable(text: str) -> str:
    """Return text on one line, with what a terminal would obey rather than show escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(name: str, room: int) -> str:
    """Return a name that takes at most so many columns: its end, which tells most."""
    if columns(name) <= room:
        return name
    name = name[-room:]
    while name and columns(name) >= room:
        name = name[1:]
    return f"…{name}"


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    special = [c for c in text if c >= FIRST_COMBINING]
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in special)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in special)


def encodable(text: str, *, ascii_only: bool) -> str:
    """Return text, with all that is not ASCII escaped where only that can be shown."""
    if not ascii_only:
        return text
    return text.replace("…", "...").encode("ascii", "backslashreplace").decode()


def wrapped(label: str, text: str, width: int) -> str:
    """Return a paragraph behind a label; a word that is too long for a line stays whole."""
    return textwrap.fill(
        printable(text),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def drawn(rows: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    """Return a table whose first row is its head; tabulate's own heads are two columns wider."""
    rule = ["-" * max(map(columns, column)) for column in zip(*rows, strict=True)]
    text = tabulate(
        [rows[0], rule, *rows[1:]],
        tablefmt="plain",
        disable_numparse=True,
        colalign=align,
        preserve_whitespace=True,  # what is indented stays so
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def can_encode(text: str, encoding: str) -> bool:
    """Return whether an encoding has all characters of a text."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
