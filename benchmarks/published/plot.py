"""The plot of the page on accuracy: each published row, predicted against real, by family.

    python -m benchmarks.published.plot

It writes docs/images/accuracy.svg from the rows of evidence.py, which reads the recorded
results. Rows in cuDNN's benchmark mode, whose prediction is a range, are left out.
"""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.published import evidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLOT = Path(__file__).resolve().parents[2] / "docs" / "images" / "accuracy.svg"
COLOURS = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951"),
    *("#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0"),
    *("#111111", "#c2a60a", "#2f7f86", "#7a1f5c"),
)
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 520, 56, 48, 12
"""size of the drawing, and its margins"""
FONT = 'role="img" font-family="sans-serif" font-size="12"'
TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


class Point(NamedTuple):
    """A row with a real and a predicted figure."""

    family: str
    real: float
    """GiB: reserved if published, else allocated"""
    predicted: float


def points() -> list[Point]:
    """Return the rows that have both figures."""
    found = []
    for group in evidence.peaks():
        columns = ["row", *group.columns]
        predicted = [i for i, name in enumerate(columns) if name == "virtual"]
        if not predicted:  # a row on whether the run is out of memory
            continue
        family = re.split(r",| \(| with | in half| in float32", group.title)[0]
        if "float32" in group.title:
            family += ", float32"
        for row in group.rows:
            # Reserved comes after allocated; a row may have only one of the two.
            for at in reversed(predicted):
                real, virtual = (_number(row[i]) for i in (at - 1, at))
                if real and virtual:
                    unit = 1 if "GiB" in columns[at - 1] else _gib(real)
                    found.append(Point(family, real * unit, virtual * unit))
                    break
    return found


def _gib(figure: float) -> float:
    """Convert a figure to GiB; sources use GiB, MiB or bytes, for sizes of 64 MiB to 64 GiB."""
    return 1 if figure < 64 else 2**-10 if figure < 2**24 else 2**-30


def _number(cell: str) -> float:
    match = re.match(r"[\d,.]+", cell.strip())
    return float(match[0].replace(",", "")) if match else 0.0


def svg(rows: list[Point]) -> str:
    """Return the drawing: both axes logarithmic, the diagonal, and 10 % on each side of it."""
    values = [value for row in rows for value in (row.real, row.predicted)]
    low, high = math.log2(min(values)) - 0.2, math.log2(max(values)) + 0.2

    def at(real: float, predicted: float) -> tuple[float, float]:
        across, up = ((math.log2(value) - low) / (high - low) for value in (real, predicted))
        x = LEFT + across * (WIDTH - LEFT - TOP)
        return round(x, 1), round(HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP), 1)

    first, last = 2**low, 2**high
    corners = [(first, first * 1.1), (last / 1.1, last), (last, last), (last, last / 1.1)]
    corners += [(first * 1.1, first), (first, first)]
    band = " ".join(",".join(map(str, at(*corner))) for corner in corners)
    (x0, y0), (x1, y1) = at(first, first), at(last, last)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        "<title>Peak memory predicted and measured, by family</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<polygon points="{band}" fill="#e4e4e4"/>',
        f'<path d="M{x0},{y0}L{x1},{y1}" stroke="#888888"/>',
        f'<path d="M{x0},{y1}V{y0}H{x1}" fill="none" stroke="#333333"/>',
        _text(f'x="{(x0 + x1) / 2:.1f}" y="{HEIGHT - 8}"', "measured on a real GPU, GiB"),
        _text(f'transform="translate(14,{(y0 + y1) / 2:.1f}) rotate(-90)"', "predicted, GiB"),
    ]
    for tick in TICKS:
        if first <= tick <= last:
            x, y = at(tick, tick)
            parts += [
                f'<text x="{x}" y="{y0 + 16}" text-anchor="middle">{tick:g}</text>',
                f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>',
            ]
    parts += [*_series(rows, at), "</svg>", ""]
    return "\n".join(parts)


def _text(place: str, words: str) -> str:
    return f'<text {place} text-anchor="middle">{words}</text>'


def _series(rows: list[Point], at: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    """Yield each family's points, and its line of the legend."""
    families = dict.fromkeys(row.family for row in rows)
    for number, (family, colour) in enumerate(zip(families, COLOURS[: len(families)], strict=True)):
        members = [row for row in rows if row.family == family]
        y = TOP + 22 + 18 * number
        yield f'<g fill="{colour}" fill-opacity="0.75">'
        for row in members:
            x_of_row, y_of_row = at(row.real, row.predicted)
            yield f'<circle cx="{x_of_row}" cy="{y_of_row}" r="4"/>'
        yield f'<circle cx="{LEFT + 18}" cy="{y - 4}" r="4"/></g>'
        label = f"{family} ({len(members)} rows)"
        yield f'<text x="{LEFT + 28}" y="{y}">{escape(label)}</text>'
    y = TOP + 22 + 18 * len(families)
    yield f'<rect x="{LEFT + 12}" y="{y - 10}" width="12" height="10" fill="#e4e4e4"/>'
    yield f'<text x="{LEFT + 28}" y="{y}">within 10 %</text>'


if __name__ == "__main__":
    PLOT.write_text(svg(points()), encoding="utf-8")
