"""A timeline as SVG for the page: matplotlib draws it, the page's style sheet colours it.

matplotlib is imported when the first timeline is drawn. pyplot is not used, and matplotlib's
settings, which a test may have changed, are its defaults while it draws and then what they were.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.measurement import CATEGORIES
from pytest_gpumem.sizes import GIB, MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

    from pytest_gpumem.measurement import Category, Phase, Timeline

WIDTH, HEIGHT = 8.4, 3.1
"""inches, of 72 units of the drawing each"""
LEFT, RIGHT, BOTTOM, TOP = 0.085, 0.995, 0.09, 0.995
HEADROOM = 1.26
"""how much higher than the highest point the plot is: there stand the phases and the peak"""
LABEL, SIDE = 1.09, 0.6
"""height of the peak's label, likewise; share of the width from where on it stands on the left"""
FONT_SIZE = 10
LETTER = 5.6
"""units that a letter of a label takes"""

_NUMBER = re.compile(r"-?\d+\.\d+")
_CORNER = re.compile(r"([MLz])(?: (-?[\d.]+) (-?[\d.]+))?\s*")
_USED = re.compile(r"#([\w-]+)")
_KEPT = ("fill", "text-anchor", "stroke-dasharray")
"""parts of a style that are no colour of the page's; "fill: none" alone of the fills"""


class Drawing(NamedTuple):
    """A timeline, drawn."""

    svg: str
    """the children of an ``svg`` element, with classes for colours and no styles"""
    viewbox: str
    """the element's ``viewBox``"""
    label: str
    """what it shows, in words"""


def draw(timeline: Timeline, name: str) -> Drawing:
    """Return a drawing: allocated, stacked by category, reserved above it, phases and the peak.

    Args:
        timeline: at least one point of it.
        name: a word of letters, digits and hyphens, the start of every id in the drawing.
    """
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "path.simplify": False}
    with style.context(["default", settings]):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        canvas = FigureCanvasSVG(figure)
        axes = figure.add_axes((LEFT, BOTTOM, RIGHT - LEFT, TOP - BOTTOM))
        _plot(axes, timeline)
        buffer = io.BytesIO()
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    root = ET.fromstring(buffer.getvalue())  # noqa: S314 - matplotlib wrote it
    return Drawing(_cleaned(root, name), root.attrib["viewBox"], describe(timeline))


def describe(timeline: Timeline) -> str:
    """Return what a timeline shows, in words: the peak, what it consists of, and where it is."""
    sums = at(timeline, timeline.peak)
    where = phase_at(timeline.phases, timeline.peak)
    held = ", ".join(f"{name} {format_size(size)}" for name, size in sums.items())
    return (
        f"Timeline of {len(timeline.reserved)} points. "
        f"Peak allocated {format_size(sum(sums.values()))}"
        + (f" in {where}" if where else "")
        + f", with {format_size(timeline.reserved[timeline.peak])} reserved: {held or 'nothing'}. "
        f"Most reserved: {format_size(max(timeline.reserved))}."
    )


def at(timeline: Timeline, index: int) -> dict[Category, int]:
    """Return the bytes of every category at a point, without zeros, in their order."""
    values = {name: timeline.categories.get(name, ()) for name in CATEGORIES}
    return {name: its[index] for name, its in values.items() if its and its[index]}


def shown(timeline: Timeline) -> list[Category]:
    """Return the categories that a timeline has anything of, in their order."""
    return [name for name in CATEGORIES if any(timeline.categories.get(name, ()))]


def phase_at(phases: Sequence[Phase], index: int) -> str:
    """Return the name of the phase that a point is in, "" outside of them."""
    return next((it.name for it in phases if it.start <= index < it.end), "")


def css_name(text: str) -> str:
    """Return the class of a category or a phase: "optimizer state" is "optimizer-state"."""
    return text.replace(" ", "-")


def _plot(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Polygon

    totals = list(_stacked(timeline))
    allocated = totals[-1][1] if totals else [0] * len(timeline.reserved)
    highest = max(*timeline.reserved, *allocated, 1)
    unit, unit_name = (MIB, "MiB") if highest < 10 * GIB else (GIB, "GiB")
    _phases(axes, timeline)
    # The last of the stack is the tallest: those below it are painted over it, each to the ground.
    for name, heights in reversed(totals):
        xs, ys = _steps([height / unit for height in heights])
        corners = [*zip(xs, ys, strict=True), (xs[-1], 0), (0, 0)]
        axes.add_artist(Polygon(corners, gid=f"area {css_name(name)}"))
    xs, ys = _steps([size / unit for size in timeline.reserved])
    axes.plot(xs, ys, gid="reserved")
    _peak(axes, timeline.peak, allocated, unit, highest)
    axes.set_xlim(0, len(timeline.reserved))
    axes.set_ylim(0, HEADROOM * highest / unit)
    axes.tick_params(length=0, labelsize=FONT_SIZE, pad=4)
    axes.set_xticks([])
    axes.yaxis.set_major_locator(_ticks())
    axes.set_yticks([y for y in axes.get_yticks() if y <= 1.02 * highest / unit])
    axes.grid(visible=True, axis="y", gid="grid")
    axes.patch.set_visible(False)
    axes.figure.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_gid("axis")
    _label(axes, 0, 0.995, f"{unit_name} ", gid="unit", ha="right", va="top")
    _label(axes, 0.5, -0.02, "allocations and frees, in their order", ha="center", va="top")


def _stacked(timeline: Timeline) -> Iterator[tuple[Category, list[int]]]:
    """Yield every category with the heights of the stack up to and with it."""
    below = [0] * len(timeline.reserved)
    for name in shown(timeline):
        below = [a + b for a, b in zip(below, timeline.categories[name], strict=True)]
        yield name, below


def _steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the corners of steps: a value holds from its index to the next one's."""
    xs, ys = [0.0], [values[0]]
    for index, (before, value) in enumerate(pairwise(values), 1):
        if before != value:
            xs += [index, index]
            ys += [before, value]
    return [*xs, len(values)], [*ys, values[-1]]


def _phases(axes: Axes, timeline: Timeline) -> None:
    """Mark the phases: a band each, with its name above it.

    The name of a narrow one, as the optimizer's often is, reaches into the band before it where
    there is room; else a letter has to do.
    """
    width = 72 * WIDTH * (RIGHT - LEFT) / len(timeline.reserved)
    place: Any = axes.get_xaxis_transform()
    free = 0.0  # units before a phase that no name takes
    for phase in timeline.phases:
        axes.axvspan(phase.start, phase.end, gid=f"phase {phase.name}")
        room, needed = (phase.end - phase.start) * width, len(phase.name) * LETTER
        x, side = (phase.start + phase.end) / 2, "center"
        text: str = phase.name
        if room < needed < room + free:
            x, side = phase.end, "right"
        elif room < needed:
            text = phase.name[0] if room > 2 * LETTER else ""
        free = max(room - needed, 0) / 2
        axes.text(x, 0.985, text, transform=place, ha=side, va="top", fontsize=FONT_SIZE)


def _peak(axes: Axes, index: int, allocated: Sequence[int], unit: int, highest: int) -> None:
    """Point at the peak: a line from its point up to its size."""
    x, y, top = index + 0.5, allocated[index] / unit, LABEL * highest / unit
    left = x > SIDE * len(allocated)
    axes.plot([x, x], [y, top], gid="pointer")
    axes.plot([x], [y], marker="o", markersize=6, linestyle="none", gid="peak")
    text = f"peak {format_size(allocated[index])}"
    text = f"{text}  " if left else f"  {text}"
    side = "right" if left else "left"
    axes.text(x, top, text, ha=side, va="center", fontsize=FONT_SIZE, gid="peak-label")


def _label(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:  # noqa: ANN401
    """Write a label at a place that is a share of the plot."""
    axes.text(x, y, text, transform=axes.transAxes, fontsize=FONT_SIZE, **more)


@cache
def _ticks() -> Any:  # noqa: ANN401 - a locator
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])


def _cleaned(root: ET.Element, name: str) -> str:
    """Return the drawing's content without what only a file of its own has.

    Names of groups become classes, styles become attributes, and of these no colours are left:
    both are the page's affair. Ids stay where something refers to them.
    """
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = dict(_attributes(element))
    for child in [it for it in root if it.tag in {"metadata", "title", "desc"}]:
        root.remove(child)
    for defs in [it for it in root if it.tag == "defs" and it.find("style") is not None]:
        root.remove(defs)
    text = "".join(ET.tostring(it, encoding="unicode") for it in root)
    text = re.sub(r">\s+<", "><", text.strip())
    used = set(_USED.findall(text))
    text = re.sub(
        r' id="([^"]*)"', lambda it: f' id="{name}-{it[1]}"' if it[1] in used else "", text
    )
    return _USED.sub(rf"#{name}-\1", text)


def _attributes(element: ET.Element) -> Iterator[tuple[str, str]]:
    for key, value in element.attrib.items():
        bare = key.rpartition("}")[2]
        if bare == "style":
            yield from _styles(value)
        elif bare == "id" and element.tag == "g":
            yield "class", re.sub(r"_\d+", "", value)
        elif value.startswith("rotate(-0 "):
            continue  # every text has it
        elif bare in {"d", "x", "y", "transform", "width", "height"}:
            text = _NUMBER.sub(lambda it: f"{float(it[0]):.1f}".removesuffix(".0"), value)
            yield bare, _shortened(text) if bare == "d" else text
        else:
            yield bare, value.strip()


def _shortened(path: str) -> str:
    """Return a path with lines along an axis written as such, and with few spaces."""
    x = y = ""
    parts = []
    for command, first, second in _CORNER.findall(path):
        if command == "L" and first == x:
            parts.append(f"V{second}")
        elif command == "L" and second == y:
            parts.append(f"H{first}")
        else:
            parts.append(f"{command}{first} {second}".strip())
        x, y = first, second
    return "".join(parts) if _CORNER.sub("", path).strip() == "" else path


def _styles(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(";"):
        key, _, value = (it.strip() for it in part.partition(":"))
        if key in _KEPT and (key != "fill" or value == "none"):
            yield key, value
