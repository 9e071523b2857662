"""Draw a step's timeline: memory by category, phases and the peak."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

from pytest_gpumem.measurement import CATEGORIES, Phase, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.explain.hints import AnalyzedPeak
    from pytest_gpumem.measurement import Category
    from pytest_gpumem.recording.allocator_log import Block

MAX_POINTS: Final = 400
"""maximum number of stretches of a timeline: of each, the point with the highest level is drawn"""
COURSE_POINTS: Final = 40
"""maximum number of levels in a course, a step's memory over time; few, as a baseline file has them
on one line"""


def drawn_timeline(
    analyzed: AnalyzedPeak,
    deltas: dict[int, list[tuple[Category, int]]],
    foreign_reserved: int,
    line_of: Callable[[Block], str],
) -> Timeline:
    """Return the timeline of a step or a part, with its peak.

    ``deltas`` are the bytes that each event adds to each category. ``foreign_reserved``,
    the bytes reserved for memory that is not the step's, is not drawn.
    """
    device, totals = analyzed.device, analyzed.totals
    indices, points = analyzed.indices, {analyzed.indices[0], analyzed.indices[-1], analyzed.top}
    step = max(1, -(-len(indices) // MAX_POINTS))
    for start in range(0, len(indices), step):
        points.add(max(indices[start : start + step], key=lambda index: totals[index + 1]))
    drawn = sorted(points)
    """indices of the events to draw: the highest of each stretch, the first, the last, the peak"""
    initially_known = sum(size for _, size in deltas.get(-1, ()))
    levels: Counter[Category] = Counter({"other": totals[0] - initially_known})
    rows = []
    event = -1
    for index in drawn:
        while event <= index:
            for category, size in deltas.get(event, ()):
                levels[category] += size
            event += 1
        rows.append(dict(levels))
    columns = {name: tuple(max(0, row.get(name, 0)) for row in rows) for name in CATEGORIES}
    phases = []
    numbered = enumerate(device.phase_at(index) for index in drawn)
    for name, stretch in groupby(numbered, key=lambda pair: pair[1]):
        positions = [position for position, _ in stretch]
        if name is not None:
            phases.append(Phase(name, positions[0], positions[-1] + 1))
    by_event: dict[int | None, Block] = {}
    for block in analyzed.blocks:
        for event_index in (block.end, block.start):
            if event_index in points:
                by_event[event_index] = block
    words = [line_of(by_event[index]) if index in by_event else "" for index in drawn]
    lines = tuple(dict.fromkeys(filter(None, words)))
    places = {line: place for place, line in enumerate(lines)}
    return Timeline(
        categories={name: column for name, column in columns.items() if any(column)},
        reserved=tuple(device.reserved(index) - foreign_reserved for index in drawn),
        phases=tuple(phases),
        peak=drawn.index(analyzed.top),
        lines=lines,
        line_of=tuple(places.get(line, -1) for line in words) if lines else (),
    )


def course_of(indices: Sequence[int], totals: Sequence[int]) -> tuple[int, ...]:
    """Return a step's course: the highest level in each of several equal stretches of events.

    ``totals`` are the bytes allocated before the first event and after each one.
    """
    number = min(COURSE_POINTS, len(indices))
    edges = [len(indices) * place // number for place in range(number + 1)]
    return tuple(
        max(totals[index + 1] for index in indices[start:end]) for start, end in pairwise(edges)
    )
