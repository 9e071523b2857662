"""A differential icicle as SVG for the page: a peak by module and line, beside the baseline's.

A cell is as wide as its memory, this run's or the baseline's, whichever is more, and stands below
its module's. Its colour says how much it grew or shrank. The page's script moves through the cells
as through a tree, and enlarges one by the attributes ``x`` and ``width`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.report.text import printable, signed_size, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.judge.breakdown_diff import BreakdownRow

HEIGHT: Final = 26
"""pixels of a row of cells: a finger meets it"""
MIN_PART: Final = 200
"""a cell of less than one part in so many of the whole is not drawn: the table has its line"""
SHADES: Final = 4
"""steps of a colour"""
NO_MODULE: Final = "outside of modules"
NO_PYTHON: Final = "outside of Python"


class Icicle(NamedTuple):
    """A drawing."""

    svg: str
    """the children of an ``svg`` element, with classes for colours and no styles"""
    height: int
    """in pixels"""
    label: str
    """the drawing in words"""


@dataclass
class _Cell:
    """A module, with the cells below it, or a line."""

    name: str
    nbytes: int = 0
    baseline: int = 0
    known: bool = True
    """whether the baseline kept all of it"""
    below: dict[str, _Cell] = field(default_factory=dict)
    extent: int = 0
    """the bytes that it is drawn as wide as, once it is folded"""

    @property
    def difference(self) -> int:
        """Bytes above the baseline, as far as that kept them."""
        return self.nbytes - self.baseline

    def add(self, row: BreakdownRow) -> None:
        """Add a line's bytes."""
        self.nbytes += row.nbytes
        self.baseline += row.nbytes if row.baseline is None else row.baseline
        self.known &= row.baseline is not None

    def folded(self) -> _Cell:
        """Return the cell with each module that has one module alone as one cell with that."""
        below = [cell.folded() for cell in self.below.values()]
        self.extent = max(self.nbytes, self.baseline, sum(cell.extent for cell in below))
        below.sort(key=lambda cell: (-cell.extent, cell.name))
        if len(below) == 1 and below[0].below and self.name:
            (only,) = below
            only.name = f"{self.name}.{only.name}"
            return only
        self.below = {str(place): cell for place, cell in enumerate(below)}
        return self


def draw_icicle(rows: Sequence[BreakdownRow]) -> Icicle | None:
    """Return the drawing; None where no line is known to differ from the baseline."""
    root = _Cell("")
    for row in rows:
        site = row.site
        if site is None:
            continue
        modules = site.module.replace(".*", "*").split(".") if site.module else []
        place = f"{site.path}:{site.line}" if site.path else NO_PYTHON
        path = [*(name.replace("*", ".*") for name in modules or [NO_MODULE])]
        cell = root
        cell.add(row)
        for name in [*path, f"{place} {site.category}"]:
            cell = cell.below.setdefault(name, _Cell(name))
            cell.add(row)
    root = root.folded()
    placed = list(_placed(root, 0, 0))
    steepest = max((abs(cell.difference) for cell, *_ in placed if not cell.below), default=0)
    if not steepest:
        return None
    root.name = "all these lines"
    cells, deepest = [], 0
    for cell, depth, start in placed:
        if cell.extent * MIN_PART < root.extent:
            continue
        deepest = max(deepest, depth)
        shade = "same" if cell.known else "unknown"
        if cell.difference:
            step = -(-SHADES * abs(cell.difference) // steepest)
            shade = f"{'grew' if cell.difference > 0 else 'shrank'}-{min(step, SHADES)}"
        x, width = (f"{100 * nbytes / root.extent:.3f}%" for nbytes in (start, cell.extent))
        cells.append(
            f'<g role="treeitem" class="{shade}" aria-level="{depth + 1}" '
            f'aria-label="{escape(_cell_words(cell))}"><svg x="{x}" y="{depth * HEIGHT}" '
            f'width="{width}" height="{HEIGHT}"><rect width="100%" height="100%"/>'
            f'<text x="5" y="17">{escape(_label(cell))}</text></svg></g>'
        )
    return Icicle(
        "".join(cells), (deepest + 1) * HEIGHT, f"The peak by module and line. {_cell_words(root)}"
    )


def _placed(cell: _Cell, depth: int, start: int) -> Iterator[tuple[_Cell, int, int]]:
    """Yield a cell and all below it, each with its depth and the bytes on its left."""
    yield cell, depth, start
    for lower in cell.below.values():
        yield from _placed(lower, depth + 1, start)
        start += lower.extent


def _cell_words(cell: _Cell) -> str:
    """Return a cell in words: first the shown ones, so that they are its name for speech too.

    A baseline keeps its largest lines alone: of smaller lines no difference is known.
    """
    if not cell.difference:
        clause = ", unchanged" if cell.known else ", difference not known"
    else:
        clause = "" if cell.known else ", as the difference of the lines in the baseline"
    return f"{_label(cell)}: {size(cell.nbytes)} at the peak{clause}"


def _label(cell: _Cell) -> str:
    change = f" {signed_size(cell.difference)}" if cell.difference else ""
    return f"{printable(cell.name)}{change}"
