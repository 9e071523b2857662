"""Text for a terminal: on one line, within its columns, in its encoding, in tables."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence


def size(nbytes: int | None) -> str:
    """Return a size in words; "" for None."""
    return "" if nbytes is None else format_size(nbytes)


def mib(nbytes: int | None) -> str:
    """Return a size as a table's cell in MiB, without the unit; "" for None."""
    return "" if nbytes is None else f"{nbytes / MIB:.2f}"


def signed_size(nbytes: int | None) -> str:
    """Return a difference in words, with its sign; "" for None."""
    return "" if nbytes is None else format_size(nbytes, signed=nbytes != 0)


def printable(text: str) -> str:
    """Return text on one line, control characters and lone surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(name: str, room: int) -> str:
    """Return a name of at most ``room`` columns: its end, which tells most."""
    if columns(name) <= room:
        return name
    name = name[-room:]
    while name and columns(name) >= room:
        name = name[1:]
    return f"…{name}"


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():  # nearly every name; a report of 10,000 tests asks 100,000 times
        return len(text)
    from wcwidth import wcswidth

    width: int = wcswidth(text)
    return width if width >= 0 else len(text)  # below 0: it has a character without a width


def encodable(text: str, encoding: str) -> str:
    """Return text as a terminal can show it: ASCII, if its encoding lacks the arrow of reports."""
    try:
        "…→".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.replace("…", "...").encode("ascii", "backslashreplace").decode()
    return text


def wrapped(label: str, sentence: str, width: int) -> str:
    """Return a paragraph behind a label; a word longer than a line stays whole."""
    return textwrap.fill(
        printable(sentence),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,  # a path or a command that is cut cannot be copied
        break_on_hyphens=False,
    )


def aligned_table(rows: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    """Return a table: the first row is its head, the columns aligned "left" or "right"."""
    # Not by tabulate: its heads make every column at least two columns wider, and before 0.10 cells
    # lose the spaces that they begin with: a part's name is indented below its test's.
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in (rows[0], ["-" * width for width in widths], *rows[1:]):
        cells = []
        for cell, width, side in zip(row, widths, align, strict=True):
            padding = " " * (width - columns(cell))
            cells.append(cell + padding if side == "left" else padding + cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
