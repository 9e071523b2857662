"""A timeline as SVG for the page: matplotlib draws it, the page's style sheet colours it.

matplotlib is imported when the first timeline is drawn. pyplot is not used, and matplotlib's
settings, which a test may have changed, are its defaults while it draws and then as before.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
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
"""height of the plot, as a multiple of the highest point: room for the phases and the peak"""
LABEL, SIDE = 1.09, 0.6
"""height of the peak's label, as a multiple of the highest point, and the share of the width from
which on it stands on the left"""
FONT_SIZE = 10
LETTER = 5.6
"""units that a letter of a label takes"""

_NUMBER = re.compile(r"-?\d+\.\d+")
_CORNER = re.compile(r"([MLz])(?: (-?[\d.]+) (-?[\d.]+))?\s*")
_REFERENCE = re.compile(r"#([\w-]+)")
_STYLES = ("fill", "text-anchor", "stroke-dasharray")
"""parts of a style that are not the page's colours; "fill: none" alone of the fills"""


class Drawing(NamedTuple):
    """A timeline, drawn."""

    svg: str
    """the children of an ``svg`` element, with classes for colours and no styles"""
    viewbox: str
    """the element's ``viewBox``"""
    label: str
    """the drawing in words"""


def draw(timeline: Timeline, name: str) -> Drawing:
    """Return a drawing: allocated, stacked by category, reserved above it, phases and the peak.

    Args:
        timeline: at least one point of it.
        name: a word of letters, digits and hyphens, the start of every id in the drawing.
    """
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The ids are the same in every run, and no point is left out as too near to the next.
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
    """Return a timeline in words: the peak, its categories, and its phase."""
    sums = category_sums(timeline, timeline.peak)
    phase = phase_at(timeline.phases, timeline.peak)
    held = ", ".join(f"{name} {format_size(size)}" for name, size in sums.items())
    return (
        f"Timeline of {len(timeline.reserved)} points. "
        f"Peak allocated {format_size(sum(sums.values()))}"
        + (f" in {phase}" if phase else "")
        + f", with {format_size(timeline.reserved[timeline.peak])} reserved: {held or 'nothing'}. "
        f"Most reserved: {format_size(max(timeline.reserved))}."
    )


def category_sums(timeline: Timeline, index: int) -> dict[Category, int]:
    """Return the bytes of every category at a point, without zeros, in their order."""
    columns = {name: timeline.categories.get(name, ()) for name in CATEGORIES}
    return {name: column[index] for name, column in columns.items() if column and column[index]}


def categories_of(timeline: Timeline) -> list[Category]:
    """Return the categories of which a timeline has any bytes, in their order."""
    return [name for name in CATEGORIES if any(timeline.categories.get(name, ()))]


def phase_at(phases: Sequence[Phase], index: int) -> str:
    """Return the name of the phase that a point is in, "" outside of them."""
    return next((phase.name for phase in phases if phase.start <= index < phase.end), "")


def css_name(name: str) -> str:
    """Return the class of a category or a phase: "optimizer state" is "optimizer-state"."""
    return name.replace(" ", "-")


def _plot(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Polygon
    from matplotlib.ticker import MaxNLocator

    heights_of: list[tuple[Category, list[int]]] = []
    """every category with the heights of the stack up to and with it"""
    below = [0] * len(timeline.reserved)
    for name in categories_of(timeline):
        below = [a + b for a, b in zip(below, timeline.categories[name], strict=True)]
        heights_of.append((name, below))
    allocated = below
    highest = max(*timeline.reserved, *allocated, 1)
    unit, unit_name = (MIB, "MiB") if highest < 10 * GIB else (GIB, "GiB")
    _draw_phases(axes, timeline)
    # The last of the stack is the tallest: those below it are painted over it, each to the ground.
    for name, heights in reversed(heights_of):
        xs, ys = _steps([height / unit for height in heights])
        corners = [*zip(xs, ys, strict=True), (xs[-1], 0), (0, 0)]
        axes.add_artist(Polygon(corners, gid=f"area {css_name(name)}"))
    xs, ys = _steps([size / unit for size in timeline.reserved])
    axes.plot(xs, ys, gid="reserved")
    _draw_peak(axes, timeline.peak, allocated, unit, highest)
    axes.set_xlim(0, len(timeline.reserved))
    axes.set_ylim(0, HEADROOM * highest / unit)
    axes.tick_params(length=0, labelsize=FONT_SIZE, pad=4)
    axes.set_xticks([])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_yticks([y for y in axes.get_yticks() if y <= 1.02 * highest / unit])
    axes.grid(visible=True, axis="y", gid="grid")
    axes.patch.set_visible(False)
    axes.figure.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_gid("axis")
    _draw_label(axes, 0, 0.995, f"{unit_name} ", gid="unit", ha="right", va="top")
    _draw_label(axes, 0.5, -0.02, "allocations and frees, in their order", ha="center", va="top")


def _steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the corners of steps: a value holds from its index to the next one's."""
    xs, ys = [0.0], [values[0]]
    for index, (previous, value) in enumerate(pairwise(values), 1):
        if previous != value:
            xs += [index, index]
            ys += [previous, value]
    return [*xs, len(values)], [*ys, values[-1]]


def _draw_phases(axes: Axes, timeline: Timeline) -> None:
    """Mark the phases: a band each, with its name above it.

    The name of a narrow one, as the optimizer's often is, reaches into the band before it where
    it has room; else a letter has to do.
    """
    width = 72 * WIDTH * (RIGHT - LEFT) / len(timeline.reserved)
    transform: Any = axes.get_xaxis_transform()
    free = 0.0  # units before a phase that no name takes
    for phase in timeline.phases:
        axes.axvspan(phase.start, phase.end, gid=f"phase {phase.name}")
        room, needed = (phase.end - phase.start) * width, len(phase.name) * LETTER
        x, side = (phase.start + phase.end) / 2, "center"
        label: str = phase.name
        if room < needed < room + free:
            x, side = phase.end, "right"
        elif room < needed:
            label = phase.name[0] if room > 2 * LETTER else ""
        free = max(room - needed, 0) / 2
        axes.text(x, 0.985, label, transform=transform, ha=side, va="top", fontsize=FONT_SIZE)


def _draw_peak(axes: Axes, index: int, allocated: Sequence[int], unit: int, highest: int) -> None:
    """Point at the peak: a line from its point up to its size."""
    x, y, top = index + 0.5, allocated[index] / unit, LABEL * highest / unit
    left = x > SIDE * len(allocated)
    axes.plot([x, x], [y, top], gid="pointer")
    axes.plot([x], [y], marker="o", markersize=6, linestyle="none", gid="peak")
    label = f"peak {format_size(allocated[index])}"
    label = f"{label}  " if left else f"  {label}"
    side = "right" if left else "left"
    axes.text(x, top, label, ha=side, va="center", fontsize=FONT_SIZE, gid="peak-label")


def _draw_label(axes: Axes, x: float, y: float, label: str, **style: Any) -> None:  # noqa: ANN401
    """Write a label at a place that is a share of the plot."""
    axes.text(x, y, label, transform=axes.transAxes, fontsize=FONT_SIZE, **style)


def _cleaned(root: ET.Element, name: str) -> str:
    """Return the drawing's content without the parts that only a file of its own needs.

    Names of groups become classes, styles become attributes without colours: both are the page's
    affair. Ids stay where something refers to them.
    """
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = dict(_attributes(element))
    for child in list(root):
        styles = child.tag == "defs" and child.find("style") is not None
        if styles or child.tag in {"metadata", "title", "desc"}:
            root.remove(child)
    svg = "".join(ET.tostring(child, encoding="unicode") for child in root)
    svg = re.sub(r">\s+<", "><", svg.strip())
    referred = set(_REFERENCE.findall(svg))
    # Several drawings stand in one page, each with ids of its own.
    svg = re.sub(
        r' id="([^"]*)"',
        lambda match: f' id="{name}-{match[1]}"' if match[1] in referred else "",
        svg,
    )
    return _REFERENCE.sub(rf"#{name}-\1", svg)


def _attributes(element: ET.Element) -> Iterator[tuple[str, str]]:
    for key, value in element.attrib.items():
        bare = key.rpartition("}")[2]
        if bare == "style":
            for part in value.split(";"):
                name, _, setting = (word.strip() for word in part.partition(":"))
                if name in _STYLES and (name != "fill" or setting == "none"):
                    yield name, setting
        elif bare == "id" and element.tag == "g":
            yield "class", re.sub(r"_\d+", "", value)
        elif value.startswith("rotate(-0 "):
            continue  # every text has it
        elif bare in {"d", "x", "y", "transform", "width", "height"}:
            # A tenth of a unit is less than a pixel.
            rounded = _NUMBER.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), value)
            yield bare, short_path(rounded) if bare == "d" else rounded
        else:
            yield bare, value.strip()


def short_path(path: str) -> str:
    """Return a path with lines along an axis written as such, and with few spaces."""
    x = y = ""
    parts = []
    for command, corner_x, corner_y in _CORNER.findall(path):
        if command == "L" and corner_x == x:
            parts.append(f"V{corner_y}")
        elif command == "L" and corner_y == y:
            parts.append(f"H{corner_x}")
        else:
            parts.append(f"{command}{corner_x} {corner_y}".strip())
        x, y = corner_x, corner_y
    return "".join(parts) if _CORNER.sub("", path).strip() == "" else path
