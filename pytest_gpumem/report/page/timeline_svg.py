"""Draw a timeline as SVG for the page: areas by category, phases, limits, the peak.

The plot is a nested ``svg`` with one unit per point from left to right, so that the page's script
can zoom by its ``viewBox`` alone. The page's style sheet sets all colors.
"""

from __future__ import annotations

import json
from html import escape
from itertools import accumulate, pairwise
from math import floor, log10
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.measurement import CATEGORIES
from pytest_gpumem.sizes import GIB, MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.measurement import Category, Phase, Timeline

WIDTH, HEIGHT = 605, 224
"""units of the drawing, about one pixel each on a desktop"""
LEFT, RIGHT, TOP, BOTTOM = 52, 602, 2, 204
"""edges of the plot"""
SPAN: Final = RIGHT - LEFT
SCALE: Final = 1000
"""height of the plot in its own units"""
HEADROOM: Final = 1.36
"""height of the plot relative to the highest point: leaves room for the phases and the peak"""
LABEL, SIDE = 1.09, 0.6
"""height of the peak's label relative to the highest point, and the share of the width beyond which
it is placed on the left"""
NEAR: Final = 1.6
"""limits up to this multiple of the highest point are drawn at their height; a higher one would
flatten the plot, so only its label is drawn, at the upper edge"""
TICKS: Final = 5
LETTER: Final = 5.6
"""width of a label's letter on a desktop, in units"""
PHONE_LETTER: Final = 9.5
"""width of a label's letter on a phone, where letters are larger relative to the drawing"""
GAP: Final = 4
"""units between two labels"""
LINE_HEIGHT: Final = 17
"""units between two lines of labels, large enough for a phone"""
BLOCK: Final = 512
"""bytes: the sizes of the allocator's blocks are multiples of this"""


class LimitLine(NamedTuple):
    """A level that a peak is compared with."""

    kind: str
    """ "budget", "card" or "baseline": the CSS class of its line"""
    label: str
    """its text with the size: "max_gib=8: 8.00 GiB" """
    nbytes: int


class RefusedRequest(NamedTuple):
    """A request that the allocator refused, in bytes."""

    requested: int | None
    reserved: int
    """bytes that were reserved at that moment"""
    cap: int
    """the most bytes that the allocator was allowed to reserve"""


class Drawing(NamedTuple):
    """A drawn timeline."""

    svg: str
    """the children of an ``svg`` element, with classes for colors and no styles"""
    viewbox: str
    label: str
    """describes the drawing in words"""
    data: str
    """the points as JSON, which the page's script reads to describe each"""


def draw(
    timeline: Timeline,
    limits: Iterable[LimitLine] = (),
    *,
    refusal: RefusedRequest | None = None,
    ghost: Sequence[int] = (),
) -> Drawing:
    """Draw allocated memory stacked by category, reserved memory above it, phases and the peak.

    ``ghost`` has the baseline's bytes at equal distances over the whole width.
    """
    number = len(timeline.reserved)
    stacked = stacked_heights(timeline)
    allocated = stacked[-1][1] if stacked else [0] * number
    refused = refused_at(timeline, refusal) if refusal else None
    highest = max(*timeline.reserved, *allocated, *ghost, refused[1] if refused else 0, 1)
    inside = [limit for limit in limits if limit.nbytes <= NEAR * highest]
    outside = [limit for limit in limits if limit.nbytes > NEAR * highest]
    highest = max(highest, *(limit.nbytes for limit in inside), 0)
    unit, unit_name = (MIB, "MiB") if highest < 10 * GIB else (GIB, "GiB")
    scale = _Scale(number, HEADROOM * highest)
    parts = []
    for nbytes in ticks(highest, unit):
        y = scale.y(nbytes)
        parts.append(
            f'<g class="grid"><path d="M{LEFT} {y:.1f}H{RIGHT}"/></g>'
            f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}">{nbytes / unit:g}</text>'
        )
    parts.append(f'<text class="tick unit" x="{LEFT - 5}" y="{TOP + 10}">{unit_name}</text>')
    parts.append(
        f'<svg class="plot" x="{LEFT}" y="{TOP}" width="{SPAN}" height="{BOTTOM - TOP}" '
        f'viewBox="0 0 {number} {SCALE}" preserveAspectRatio="none">'
    )
    parts += (
        f'<g class="phase {phase.name}"><path d="M{phase.start} 0H{phase.end}V{SCALE}'
        f'H{phase.start}z"/></g>'
        for phase in timeline.phases
    )
    # Each area reaches down to zero. The last is the whole stack: paint it first, the lower ones
    # over it.
    for category, heights in reversed(stacked):
        path = f"{scale.steps(heights)}V{SCALE}H0z"
        kind = category.replace(" ", "-")
        parts.append(f'<g class="area {kind}"><path d="{path}"/></g>')
    parts.append(f'<g class="reserved"><path d="{scale.steps(timeline.reserved)}"/></g>')
    if ghost:
        width = number / len(ghost)
        corners = "".join(
            f"{'V' if index else 'M0 '}{scale.height(nbytes)}H{round((index + 1) * width, 1):g}"
            for index, nbytes in enumerate(ghost)
        )
        halo = f'<path class="halo" d="{corners}"/>'  # visible over dark and light areas
        parts.append(f'<g class="ghost">{halo}<path d="{corners}"/></g>')
    parts.append("</svg>")
    mark = scale.x(refused[0] + 0.5) if refused else None
    parts += limit_lines(inside, outside, scale, timeline.peak, mark)
    parts += phase_names(timeline.phases, number)
    if refused:
        parts.append(refusal_mark(refused, scale))
    parts.append(peak_pointer(timeline.peak, allocated[timeline.peak], highest, scale))
    parts.append(
        f'<g class="axis"><path d="M{LEFT} {BOTTOM}H{RIGHT}"/></g>'
        f'<text class="caption" x="{LEFT + SPAN / 2:g}" y="{HEIGHT - 6}">'
        "allocations and frees, in their order</text>"
    )
    label = timeline_text(timeline)
    if ghost:
        share = 100 * ghost.index(max(ghost)) / len(ghost)
        label += f" The baseline had at most {format_size(max(ghost))}, after {share:.0f} %."
    return Drawing("".join(parts), f"0 0 {WIDTH} {HEIGHT}", label, points_json(timeline, ghost))


class _Scale(NamedTuple):
    """Converts figures to coordinates."""

    number: int
    """number of points"""
    top: float
    """bytes at the plot's upper edge"""

    def x(self, index: float) -> float:
        """Return a point's x in the drawing."""
        return LEFT + SPAN * index / self.number

    def y(self, nbytes: float) -> float:
        """Return a figure's y in the drawing."""
        return BOTTOM - (BOTTOM - TOP) * nbytes / self.top

    def height(self, nbytes: float) -> int:
        """Return a figure's y in the plot's own units."""
        return round(SCALE * (1 - nbytes / self.top))

    def steps(self, levels: Sequence[int]) -> str:
        """Return a stepped path: each level holds until the next point."""
        heights = [self.height(nbytes) for nbytes in levels]
        corners = [f"M0 {heights[0]}"]
        corners += (
            f"H{index}V{height}"
            for index, (previous, height) in enumerate(pairwise(heights), 1)
            if previous != height
        )
        return f"{''.join(corners)}H{len(levels)}"


def timeline_text(timeline: Timeline) -> str:
    """Describe a timeline in words: the peak, its categories and its phase."""
    sums = {
        name: timeline.categories[name][timeline.peak]
        for name in categories_of(timeline)
        if timeline.categories[name][timeline.peak]
    }
    at = timeline.peak
    phase = next((each.name for each in timeline.phases if each.start <= at < each.end), "")
    held = ", ".join(f"{name} {format_size(size)}" for name, size in sums.items())
    return (
        f"Timeline of {len(timeline.reserved)} points. "
        f"Peak allocated {format_size(sum(sums.values()))}"
        + (f" in {phase}" if phase else "")
        + f", with {format_size(timeline.reserved[timeline.peak])} reserved: {held or 'nothing'}. "
        f"Most reserved: {format_size(max(timeline.reserved))}."
    )


def categories_of(timeline: Timeline) -> list[Category]:
    """Return the categories with any bytes in a timeline, in order."""
    return [name for name in CATEGORIES if any(timeline.categories.get(name, ()))]


def ticks(highest: int, unit: int) -> list[float]:
    """Return round values for the axis, in bytes, from zero to about ``highest``."""
    rough = highest / unit / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= 0.999 * rough)
    return [number * step * unit for number in range(int(1.02 * highest / unit / step) + 1)]


def stacked_heights(timeline: Timeline) -> list[tuple[Category, list[int]]]:
    """Return each category with the heights of its upper edge in the stack."""
    names = categories_of(timeline)
    columns = (list(timeline.categories[name]) for name in names)
    heights = accumulate(
        columns, lambda below, column: [a + b for a, b in zip(below, column, strict=True)]
    )
    return list(zip(names, heights, strict=True))


def limit_lines(
    inside: Iterable[LimitLine],
    outside: Iterable[LimitLine],
    scale: _Scale,
    peak: int,
    mark: float | None,
) -> list[str]:
    """Draw limits with their labels, on the side that the peak's label does not take.

    Limits in ``outside`` are above the plot, and only their labels are drawn. ``mark`` is the x of
    a refused request, which labels must not cover; None without one.
    """
    on_left = peak > SIDE * scale.number
    x, side = (LEFT + 4, "start") if on_left else (RIGHT - 4, "end")
    labels = []
    for limit in sorted(inside, key=lambda limit: limit.nbytes):
        y = scale.y(limit.nbytes)
        line = f'<g class="limit {limit.kind}"><path d="M{LEFT} {y:.1f}H{RIGHT}"/></g>'
        labels.append((limit, line, limit.label, y - 3, -1))
    for number, limit in enumerate(sorted(outside, key=lambda limit: limit.nbytes), 1):
        # Place it below the phase names, and below other labels on this side.
        labels.append((limit, "", f"↑ {limit.label}", TOP + 11 + number * LINE_HEIGHT, 1))
    parts = []
    taken: list[float] = []
    for limit, line, words, place, way in labels:
        while any(abs(place - height) < LINE_HEIGHT for height in taken):
            place += way  # noqa: PLW2901 - up to a free place
        taken.append(place)
        label_x = beside_mark(x, side, words, mark)
        parts.append(
            f'{line}<text class="limit-label {limit.kind}" x="{label_x:g}" y="{place:.1f}" '
            f'text-anchor="{side}">{escape(words)}</text>'
        )
    return parts


def beside_mark(x: float, side: str, words: str, mark: float | None) -> float:
    """Return a label's x, moved beyond a mark that it would overlap."""
    width = len(words) * PHONE_LETTER
    if mark is not None and side == "start" and x < mark < x + width and mark + width < RIGHT:
        return mark + 2 * GAP
    if mark is not None and side == "end" and x - width < mark < x and mark - width > LEFT:
        return mark - 2 * GAP
    return x


def phase_names(phases: Sequence[Phase], number: int) -> list[str]:
    """Place the phases' names above their bands without overlap, omitting those without room.

    The widest band comes first. A name may move from its band's middle to a free place as long as
    it stays within the band or, if it is wider than the band, covers it.
    """
    labels: list[tuple[Phase, float, str]] = []
    for letter, kind in ((PHONE_LETTER, "phase-name"), (LETTER, "phase-name wide")):
        for phase in sorted(phases, key=lambda phase: phase.start - phase.end):
            if any(phase is named for named, *_ in labels):
                continue
            left, right = (LEFT + SPAN * edge / number for edge in (phase.start, phase.end))
            half = len(phase.name) * letter / 2
            # Names that fit on a phone also appear on a desktop, where they are narrower.
            placed = [(x, len(named.name) * letter / 2) for named, x, *_ in labels]
            low, high = max(right - half, LEFT + half), min(left + half, RIGHT - half)
            low, high = min(low, high), max(low, high)
            middle = min(max((left + right) / 2, LEFT + half), RIGHT - half)
            places = [middle]
            places += (x - width - half - GAP for x, width in placed)
            places += (x + width + half + GAP for x, width in placed)
            free = [
                place
                for place in places
                if low - 0.1 <= place <= high + 0.1
                and all(abs(place - x) >= half + width + GAP - 0.1 for x, width in placed)
            ]
            if free:
                place = min(free, key=lambda place: abs(place - middle))
                labels.append((phase, place, kind))
    return [
        f'<text class="{kind}" x="{x:.1f}" y="{TOP + 11}" data-start="{phase.start}" '
        f'data-end="{phase.end}">{phase.name}</text>'
        for phase, x, kind in sorted(labels, key=lambda label: label[0].start)
    ]


def peak_pointer(index: int, nbytes: int, highest: int, scale: _Scale) -> str:
    """Draw a pointer to the peak: a line from its point up to its size."""
    x, y, top = scale.x(index + 0.5), scale.y(nbytes), scale.y(LABEL * highest)
    left = index + 0.5 > SIDE * scale.number
    words = f"peak {format_size(nbytes)}"
    return (
        f'<g class="at-point" data-index="{index}"><g class="pointer">'
        f'<path d="M{x:.1f} {y:.1f}V{top:.1f}"/></g>'
        f'<g class="peak"><circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/></g>'
        f'<g class="peak-label"><text x="{x + (-6 if left else 6):.1f}" y="{top + 3:.1f}" '
        f'text-anchor="{"end" if left else "start"}">{words}</text></g></g>'
    )


def refused_at(timeline: Timeline, refusal: RefusedRequest) -> tuple[int, int, str]:
    """Return the index of a refused request's point, the reserved bytes it needed, and a label.

    The timeline is from a run of the step without a limit, as far as that was possible: the point
    is the first point above the limit, or else the last point.
    """
    index = next(
        (i for i, nbytes in enumerate(timeline.reserved) if nbytes > refusal.cap),
        len(timeline.reserved) - 1,
    )
    if refusal.requested is None:
        return index, refusal.reserved, "refused here"
    level = refusal.reserved + refusal.requested
    return index, level, f"{format_size(refusal.requested)} refused here"


def refusal_mark(refused: tuple[int, int, str], scale: _Scale) -> str:
    """Draw a line up to the level that a request would have needed, with a cross at its end."""
    index, level, words = refused
    x, y = scale.x(index + 0.5), scale.y(level)
    left = index > SIDE * scale.number
    return (
        f'<g class="at-point refused" data-index="{index}">'
        f'<path d="M{x:.1f} {BOTTOM}V{y:.1f}m-4 -4l8 8m0 -8l-8 8"/>'
        f'<text x="{x + (-7 if left else 7):.1f}" y="{BOTTOM - 8}" '
        f'text-anchor="{"end" if left else "start"}">{words}</text></g>'
    )


def points_json(timeline: Timeline, ghost: Sequence[int] = ()) -> str:
    """Serialize the points as JSON; each column lists only the points at which it changes.

    ``ghost`` is the baseline's memory at equal distances; it is in bytes, not in units of a block.
    """
    columns: dict[str, Sequence[int]] = {
        name: timeline.categories[name] for name in categories_of(timeline)
    }
    columns["reserved"] = timeline.reserved
    # All sizes are multiples of a block, unless memory outside the allocator is counted too.
    whole = all(nbytes % BLOCK == 0 for column in columns.values() for nbytes in set(column))
    unit = BLOCK if whole else 1
    document: dict[str, Any] = {
        "points": len(timeline.reserved),
        "unit": unit,
        "peak": timeline.peak,
        "columns": {
            name: changes_of([nbytes // unit for nbytes in column])
            for name, column in columns.items()
        },
        "phases": [[phase.name, phase.start, phase.end] for phase in timeline.phases],
        "lines": timeline.lines,
        "line": changes_of(timeline.line_of),
        "ghost": list(ghost),
    }
    return json.dumps(document, separators=(",", ":"))


def changes_of(levels: Sequence[int]) -> list[int]:
    """Return the points at which levels change, flat: point, level, point, level."""
    flat: list[int] = []
    previous = None
    for index, level in enumerate(levels):
        if level != previous:
            flat += (index, level)
            previous = level
    return flat
