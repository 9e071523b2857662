"""Format text for a terminal: on one line, within its width, in its encoding, in tables."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence


def size(nbytes: int | None) -> str:
    """Format a size; "" for None."""
    return "" if nbytes is None else format_size(nbytes)


def mib(nbytes: int | None) -> str:
    """Format a size for a table in MiB, without the unit; "" for None."""
    return "" if nbytes is None else f"{nbytes / MIB:.2f}"


def signed_size(nbytes: int | None) -> str:
    """Format a difference with its sign; "" for None."""
    return "" if nbytes is None else format_size(nbytes, signed=nbytes != 0)


def printable(text: str) -> str:
    """Escape control characters and lone surrogates, so that the text stays on one line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(name: str, room: int) -> str:
    """Shorten a name to ``room`` columns, keeping its end, which is the most specific."""
    if columns(name) <= room:
        return name
    name = name[-room:]
    while name and columns(name) >= room:
        name = name[1:]
    return f"…{name}"


def columns(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    if text.isascii():  # nearly every name; a report of 10,000 tests calls this 100,000 times
        return len(text)
    from wcwidth import wcswidth

    width: int = wcswidth(text)
    return width if width >= 0 else len(text)  # negative if a character has no width


def encodable(text: str, encoding: str) -> str:
    """Return text that the terminal can show: pure ASCII if its encoding lacks "…" or "→"."""
    try:
        "…→".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.replace("…", "...").encode("ascii", "backslashreplace").decode()
    return text


def wrapped(label: str, sentence: str, width: int) -> str:
    """Wrap a sentence behind a label; a word longer than a line is not broken."""
    return textwrap.fill(
        printable(sentence),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,  # a broken path or command could not be copied
        break_on_hyphens=False,
    )


def aligned_table(rows: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    """Return a table: the first row is its header, the columns are aligned "left" or "right"."""
    # tabulate is not used: its headers widen every column by at least two, and before 0.10 it
    # strips leading spaces from cells, but the name of a test's part is indented.
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in (rows[0], ["-" * width for width in widths], *rows[1:]):
        cells = []
        for cell, width, side in zip(row, widths, align, strict=True):
            padding = " " * (width - columns(cell))
            cells.append(cell + padding if side == "left" else padding + cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
