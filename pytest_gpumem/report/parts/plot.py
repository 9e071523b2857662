"""Plots of a baseline's history as SVG: a chart with its axes, and a small line without."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.sizes import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 720, 190
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 24, 26
"""room beside the plot: figures on its left, dates below"""
SPARK_WIDTH, SPARK_HEIGHT = 64, 16
MAX_DATES: Final = 7
"""dates below a chart; more would overlap"""
TICKS: Final = 4
"""lines across a chart, about"""
NARROW: Final = 0.5
"""a part of the highest figure: where all are above it the axis does not begin at zero, because a
change of some percent would not be seen"""


class PlotPoint(NamedTuple):
    """One commit's figures, in bytes."""

    label: str
    """its name and date, for readers"""
    date: str
    allocated: int
    reserved: int
    target: str
    """the id of its row in the table beside the chart"""


def chart(points: Sequence[PlotPoint], title: str) -> str:
    """Return a chart of peak allocated and reserved by commit, the oldest on the left.

    Each commit's point is a link to its row, with its figures as the link's name.
    """
    lowest = min(point.allocated for point in points)
    highest = max(point.reserved for point in points) or 1
    unit, name = (GIB, "GiB") if highest >= 4 * GIB else (MIB, "MiB")
    ticks = round_ticks(lowest, highest, unit)
    base, top = ticks[0], max(ticks[-1], highest)
    span = WIDTH - LEFT - RIGHT
    # A figure holds from its commit to the next: the last one as long as the others do.
    step = span / len(points)

    def y(nbytes: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - nbytes) / (top - base)

    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(nbytes):.1f}" '
        f'y2="{y(nbytes):.1f}"/><text class="figure" x="{LEFT - 8}" '
        f'y="{y(nbytes) + 4:.1f}">{nbytes / unit:g}</text>'
        for nbytes in ticks
    ]
    for kind in ("reserved", "allocated"):
        levels = [getattr(point, kind) for point in points]
        path = " ".join(
            f"{'M' if index == 0 else 'L'}{LEFT + index * step:.1f} {y(level):.1f}"
            f"H{LEFT + (index + 1) * step:.1f}"
            for index, level in enumerate(levels)
        )
        parts.append(f'<path class="{kind}" d="{path}"/>')
    every = -(-len(points) // MAX_DATES)
    for index, point in enumerate(points):
        x = LEFT + index * step
        if index % every == 0:
            parts.append(
                f'<text class="date" x="{x:.1f}" y="{HEIGHT - 8}">{escape(point.date)}</text>'
            )
        words = (
            f"{point.label}: allocated {point.allocated / MIB:.2f} MiB, "
            f"reserved {point.reserved / MIB:.2f} MiB"
        )
        parts.append(
            f'<a href="#{point.target}" aria-label="{escape(words)}"><title>{escape(words)}</title>'
            f'<circle cx="{x:.1f}" cy="{y(point.allocated):.1f}" r="4.5"/></a>'
        )
    return (
        f'<svg class="history" viewBox="0 0 {WIDTH} {HEIGHT}" role="group" '
        f'aria-label="{escape(title)}">'
        f'<text class="unit" x="{LEFT - 8}" y="{TOP - 14}">{name}</text>'
        f"{''.join(parts)}</svg>"
    )


def round_ticks(lowest: int, highest: int, unit: int) -> list[float]:
    """Return round figures from below the lowest to about the highest, in bytes."""
    low = max(lowest - (highest - lowest) / TICKS, 0) if lowest > NARROW * highest else 0
    rough = max((highest - low) / TICKS, unit / 100) / unit
    power = 10 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = floor(low / unit / step), ceil(highest / unit / step)
    return [number * step * unit for number in range(first, last + 1)]


def sparkline(levels: Sequence[int], limit: int | None = None) -> str:
    """Return a small line of figures, the oldest on the left; "" of fewer than two.

    It stands on zero, and its whole height is the limit: a change is as high as it matters.

    Args:
        levels: bytes.
        limit: the budget, in bytes; None: the highest figure has the whole height.
    """
    if len(levels) < 2:  # noqa: PLR2004 - a line has two ends
        return ""
    low, high = min(levels), max(levels)
    top = max(high, limit or 0, 1)
    step = (SPARK_WIDTH - 4) / (len(levels) - 1)
    places = [
        (2 + index * step, SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * level / top)
        for index, level in enumerate(levels)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    x, y = places[-1]
    words = f"{len(levels)} figures, from {low / MIB:.2f} to {high / MIB:.2f} MiB"
    if limit:
        words += f", of {limit / MIB:.2f} MiB allowed"
    return (
        f'<svg class="spark" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" role="img" '
        f'aria-label="history: {words}"><title>{words}</title><path class="floor" '
        f'd="M0 {SPARK_HEIGHT - 0.5}H{SPARK_WIDTH}"/><polyline points="{path}"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/></svg>'
    )
