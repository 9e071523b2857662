"""Where a peak comes from: a recording becomes a breakdown, sites and a timeline."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.attribution import hints
from pytest_gpumem.attribution.categories import Blocks
from pytest_gpumem.attribution.sites import Origin, origin, sites
from pytest_gpumem.measurement import CATEGORIES, Attribution, Breakdown, Peak, Phase, Timeline
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pytest_gpumem.attribution.history_replay import Block
    from pytest_gpumem.attribution.recording import Recording, Span
    from pytest_gpumem.measurement import Category

MOST_SITES: Final = 50
"""sites of one device that are kept"""
MOST_POINTS: Final = 400
"""points of a timeline"""


class Subject(NamedTuple):
    """What is to be explained: one device's peak, within some time."""

    device: int
    peak: Peak
    """as measured"""
    others: Peak
    """what others held, which is not part of it"""
    windows: Sequence[Span]
    """when it was measured"""


class Attributor:
    """Explains the peaks of one recording."""

    def __init__(self, recording: Recording, root: Path) -> None:
        self._recording = recording
        self._root = root
        self._devices: dict[int, Blocks] = {}

    def attribution(self, subject: Subject, *, timeline: bool) -> Attribution | None:
        """Return where a peak comes from; None where the recording cannot tell."""
        device = self._devices.get(subject.device)
        if device is None:
            device = self._devices[subject.device] = Blocks(self._recording, subject.device)
        return _explain(device, subject, self._root, timeline=timeline)


@dataclass
class _Counted:
    """Which blocks count for a subject."""

    blocks: set[Block]
    before: int
    """bytes of the step's own that were there before and of which nothing is known"""


def _counted(device: Blocks, subject: Subject) -> _Counted:
    """Return what counts: what was allocated since, and of what was there before the step's own.

    How much of that is the step's is known, not which blocks: those that were seen in use, if they
    are no more than that.
    """
    initial = [it for it in device.blocks if it.start < 0]
    own = sum(it.size for it in initial) - subject.others.allocated
    seen = [it for it in initial if it.tags]
    known = sum(it.size for it in seen)
    blocks = {it for it in device.blocks if it.start >= 0}
    if own > 0 and known <= own:
        return _Counted(blocks | set(seen), own - known)
    return _Counted(blocks, own)


def _windows(times: Sequence[float], spans: Sequence[Span]) -> Iterator[range]:
    """Yield the events of each span, the last one before it first: that is how it began."""
    for span in spans:
        yield range(bisect_left(times, span.start) - 1, bisect_right(times, span.end))


def _explain(device: Blocks, subject: Subject, root: Path, *, timeline: bool) -> Attribution | None:
    counted = _counted(device, subject)
    deltas = device.deltas(counted.blocks)
    times = device.history.times
    totals = _totals(deltas, len(times), counted.before)
    indices = [i for window in _windows(times, subject.windows) for i in window]
    if not indices:
        return None
    top = max(indices, key=lambda index: (totals[index + 1], -index))
    categories = _categories(device, counted, top)
    residue = subject.peak.allocated - sum(categories.values())
    notes = []
    if residue:
        categories["other"] += residue
        if categories["other"] < 0:
            return None
        notes.append(
            f"the allocator's history accounts for {format_size(totals[top + 1])} of this peak of "
            f"{format_size(subject.peak.allocated)}; the rest is called other"
        )
    origins = [
        origin_of(device, it) for it in device.blocks if it in counted.blocks and it.alive(top)
    ]
    breakdown = Breakdown(
        {name: categories[name] for name in CATEGORIES if categories[name]},
        cached=max(0, _reserved(device, subject, top) - subject.peak.allocated),
        sites=sites(origins, root)[:MOST_SITES],
    )
    drawn = _timeline(device, subject, deltas, totals, indices, top) if timeline else None
    scene = hints.Scene(device, counted.blocks, totals, indices, top, breakdown)
    return Attribution(breakdown, drawn, tuple(notes), hints.of_peak(scene))


def _totals(deltas: dict[int, list[tuple[Category, int]]], number: int, before: int) -> list[int]:
    """Return the bytes allocated before the first event and after each."""
    total = before
    totals = []
    for index in range(-1, number):
        total += sum(size for _, size in deltas.get(index, ()))
        totals.append(total)
    return totals


def _categories(device: Blocks, counted: _Counted, index: int) -> Counter[Category]:
    found: Counter[Category] = Counter()
    for block in counted.blocks:
        if block.alive(index):
            found[device.categories[block]] += block.size
    found["other"] += counted.before
    return found


def _reserved(device: Blocks, subject: Subject, index: int) -> int:
    """Return the bytes that the allocator held for the step after an event."""
    segments = [it for it in device.recording.before if it["device"] == subject.device]
    at_first: int = sum(segment["total_size"] for segment in segments)
    more = device.history.reserved[index] if index >= 0 else 0
    return at_first + more - subject.others.reserved


def origin_of(device: Blocks, block: Block) -> Origin:
    """Return where a block comes from."""
    category = device.categories[block]
    running = device.pass_at(block.time)
    call = device.calls.innermost(block.time)
    names = [tag.name for tag in block.tags if tag.category == category]
    name = max(names, key=lambda it: it.count("."), default="")  # from the outermost module
    if name:
        module = name.rpartition(".")[0]
    elif call is not None and (running is None or call.start > running.start):
        module = call.path
    else:
        module = ""
    return origin(
        block.frames,
        running.line if running else None,
        module=module,
        category=category,
        nbytes=block.size,
    )


# -- the timeline --


def _timeline(  # noqa: PLR0913, PLR0917 - all that _explain has found
    device: Blocks,
    subject: Subject,
    deltas: dict[int, list[tuple[Category, int]]],
    totals: Sequence[int],
    indices: Sequence[int],
    top: int,
) -> Timeline:
    chosen = _chosen(indices, totals, top)
    levels: Counter[Category] = Counter({"other": totals[0] - _initially(deltas)})
    columns: dict[Category, list[int]] = {}
    rows = []
    at = -1
    for index in chosen:
        while at <= index:
            for category, size in deltas.get(at, ()):
                levels[category] += size
            at += 1
        rows.append(dict(levels))
    for category in CATEGORIES:
        column = [max(0, row.get(category, 0)) for row in rows]
        if any(column):
            columns[category] = column
    return Timeline(
        categories={name: tuple(column) for name, column in columns.items()},
        reserved=tuple(_reserved(device, subject, index) for index in chosen),
        phases=tuple(_phases(device, chosen)),
        peak=chosen.index(top),
    )


def _initially(deltas: dict[int, list[tuple[Category, int]]]) -> int:
    return sum(size for _, size in deltas.get(-1, ()))


def _chosen(indices: Sequence[int], totals: Sequence[int], top: int) -> list[int]:
    """Return the events to draw: of each stretch the highest, and the first and last of all."""
    step = max(1, -(-len(indices) // MOST_POINTS))
    found = {indices[0], indices[-1], top}
    for start in range(0, len(indices), step):
        stretch = indices[start : start + step]
        found.add(max(stretch, key=lambda index: totals[index + 1]))
    return sorted(found)


def _phases(device: Blocks, chosen: Sequence[int]) -> Iterator[Phase]:
    """Yield what ran at the chosen events, where it is known."""
    names = [_phase(device, device.history.times[index]) if index >= 0 else "" for index in chosen]
    start = 0
    for index in range(1, len(names) + 1):
        if index == len(names) or names[index] != names[start]:
            if names[start]:
                yield Phase(names[start], start, index)  # type: ignore[arg-type] # not ""
            start = index


def _phase(device: Blocks, time: float) -> str:
    running = device.pass_at(time)
    if running is not None:
        return running.name
    return "forward" if device.calls.innermost(time) is not None else ""
