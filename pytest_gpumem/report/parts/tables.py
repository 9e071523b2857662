"""Lay out terminal tables: empty columns are left out, and names are cut to the width."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.report.text import (
    aligned_table,
    columns,
    printable,
    shortened,
    signed_size,
    size,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.breakdowns import BreakdownRow
    from pytest_gpumem.judge.result import Result

MIN_NAME = 12
"""columns that a test's name gets even on a narrow terminal"""
MIN_SITE = 24
"""columns that a source line's name gets at least"""
_CAUSE_INDENT = " " * 6
"""indents the cause below a failed test, more than any name is indented"""


class TableRow(NamedTuple):
    """A row of a table of tests."""

    cells: tuple[str, ...]
    """a single cell is a heading for the rows below it, on a line across all columns"""
    result: Result | None = None
    """the result whose verdict is the last cell; None for a heading, a cause, or in other tables"""
    is_cause: bool = False
    """whether its single cell is the cause of the failure above it, which is never cut"""


def named_table(titles: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> str:
    """Return a table without empty columns, with names cut until it fits the width.

    A row with one cell is a heading for those below it, on a line across all columns.
    """
    return "\n".join(drawn_rows(titles, [TableRow(tuple(row)) for row in rows], width))


def drawn_rows(titles: Sequence[str], rows: Sequence[TableRow], width: int) -> list[str]:
    """Return a table's header, which has two lines, and the text of each row."""
    full_rows = [row.cells for row in rows if len(row.cells) > 1]
    used = [i for i in range(len(titles)) if any(row[i] for row in full_rows)]
    table = [[row[i] for i in used] for row in (titles, *full_rows)]
    figures = list(zip(*table, strict=True))[1:]
    room = max(width - sum(2 + max(map(columns, column)) for column in figures), MIN_NAME)
    for cells in table:
        name = cells[0].lstrip(" ")
        indent = cells[0][: len(cells[0]) - len(name)]
        cells[0] = indent + shortened(name, max(room - len(indent), 1))
    left = {titles[0], "verdict", "peak"}
    drawn = aligned_table(table, ["left" if title in left else "right" for title in table[0]])
    head, rule, *lines = drawn.splitlines()
    remaining, shown = iter(lines), [f"{head}\n{rule}"]
    for row in rows:
        if len(row.cells) > 1:
            shown.append(next(remaining))
        elif row.is_cause:
            shown.append(wrapped(_CAUSE_INDENT, row.cells[0], width))
        else:
            shown.append(shortened(row.cells[0], width))
    return shown


def rows_table(
    title: str,
    rows: Sequence[BreakdownRow],
    width: int,
    max_rows: int | None,
    sides: tuple[str, str] = ("baseline", "now"),
) -> str:
    """Return a table of the first ``max_rows`` rows of categories or source lines.

    ``max_rows`` None shows all; ``sides`` are the titles of the two columns.
    """
    shown = rows[:max_rows]
    if not shown:
        return ""
    compared = any(row.baseline is not None for row in shown)
    old, new = map(printable, sides)
    titles = [title, old, new, "difference"] if compared else [title, new]
    table = [titles]
    for row in shown:
        sizes = [size(row.baseline), size(row.nbytes), signed_size(row.difference)]
        table.append([printable(row.name), *(sizes if compared else sizes[1:2])])
    align = ["left", *("right" for _ in titles[1:])]
    if any(row.site for row in shown):  # adds a column: "activations, 12 blocks, GPT2.h.*.attn"
        subjects = ["of"]
        for row in shown:
            number = "1 block" if row.blocks == 1 else f"{row.blocks} blocks"
            blocks = number if row.blocks else ""
            words = (row.site.category, blocks, row.site.module) if row.site else ()
            subjects.append(printable(", ".join(filter(None, words))))
        figures = list(zip(*table, strict=True))[1:]
        wide = sum(2 + max(map(columns, column)) for column in figures) + 2
        names = max(columns(row[0]) for row in table)
        if names + wide + max(map(columns, subjects)) > width:
            subjects = ["of", *(row.site.category if row.site else "" for row in shown)]
        room = max(width - wide - max(map(columns, subjects)), MIN_SITE)
        for cells, subject in zip(table, subjects, strict=True):
            # Drop the folders, then cut the beginning if needed.
            place = cells[0] if columns(cells[0]) <= room else cells[0].rpartition("/")[2]
            cells[:] = [shortened(place, room), *cells[1:], subject]
        align.append("left")
    hidden = len(rows) - len(shown)
    drawn = aligned_table(table, align)
    return f"{drawn}\n({hidden} more with -vv)" if hidden else drawn
