"""Growth of memory from step to step: whether it is garbage, its lines, and its holders.

Memory that is allocated after a step is in use, or garbage in reference cycles. The first run
collects nothing: its peak is the program's own. If memory that it never frees by itself grows, the
test runs again, with a collection after each step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.errors import SpecError
from pytest_gpumem.judge.step_growth import MIN_STEPS, growth, last_half
from pytest_gpumem.measurement import Stayed
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.allocator_log import AllocatorLog
from pytest_gpumem.testrun.rerun import ran_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.measurement import Holder, Measurement, Site
    from pytest_gpumem.meter.step_watch import StepEnd
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Recording
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run

GARBAGE_ALONE: Final = Note(
    NoteKind.GARBAGE,
    "what grew from step to step was garbage in reference cycles: the test ran a second time, with "
    "a garbage collection after each step, and the memory in use did not grow",
)
GARBAGE_TOO: Final = Note(
    NoteKind.GARBAGE,
    "some of the memory that grew may be garbage in reference cycles: no second run of the test, "
    "with a garbage collection after each step, had as many steps",
)


def require_steps(run: Run) -> None:
    """Refuse to judge a test that is to be steady and has too few steps."""
    number = len(run.meter.steps.ends)
    if run.spec.steady and number < MIN_STEPS:
        raise SpecError(
            "steady=True",
            f"the test had {number} steps, and growth needs {MIN_STEPS} or more steps (a "
            "step ends with optimizer.step())",
            "run more steps; without an optimizer, call gpu_memory.step() after each step",
        )


def with_growth(
    runner: Runner,
    item: MarkedItem,
    run: Run,
    measurement: Measurement,
    recording: Recording | None,
) -> Measurement:
    """Return a test's measurement with the memory in use after each step, and why it grows."""
    steps, ends = run.meter.steps, run.meter.steps.ends
    growing = [index for index, levels in enumerate(_levels(ends)) if growth(levels) is not None]
    if not run.spec.steady or not growing:
        return measurement
    search = _Search(run, growing, len(ends))
    search.find(ends, recording)  # what has outlived the test; most local variables have not
    outliving = dict(search.holders)
    second: Recording | None = None
    steps.search = search.look
    try:
        with runner.again(item, record=True) as attempt:
            if attempt.ran:
                second = run.meter.recording()
    finally:
        steps.search = None
    # That the steps are the same is enough: an assertion on the peak may fail after them.
    is_alike = attempt.ran and len(steps.ends) == len(ends)
    levels = _levels(ends, steps.ends if is_alike else ends)
    measurement = replace(measurement, steps=tuple(levels))
    grown = [step.final - step.initial if step else 0 for step in map(growth, levels)]
    largest = max(grown)
    if not largest:
        return _noted(measurement, GARBAGE_ALONE) if is_alike else measurement
    index = grown.index(largest)
    found = (search.holders if is_alike else outliving).get(index, ())
    lines: tuple[Site, ...] = ()
    if recording is not None:
        lines = _lines(run, index, second, steps.ends) if is_alike else ()
        lines = lines or _lines(run, index, recording, ends)
    measurement = replace(measurement, stayed=Stayed(index, largest, lines, found))
    if is_alike:
        return _noted(measurement, ran_again("what makes its memory grow"))
    if sum(holder.nbytes for holder in found) == largest:  # no garbage: that was collected since
        return measurement
    return _noted(measurement, GARBAGE_TOO)


def _noted(measurement: Measurement, note: Note) -> Measurement:
    return replace(measurement, notes=(*measurement.notes, note))


def _levels(
    ends: Sequence[StepEnd], collected: Sequence[StepEnd] | None = None
) -> list[tuple[int, ...]]:
    """Return the bytes after each step that the program has not freed itself, for each device.

    Memory that a collection after each step freed (``collected``) was garbage, which is left out.
    """
    levels = [
        [held + freed for held, freed in zip(end.allocated, end.freed, strict=True)] for end in ends
    ]
    if collected is not None:
        levels = [
            [level - garbage for level, garbage in zip(row, end.freed, strict=True)]
            for row, end in zip(levels, collected, strict=True)
        ]
    return list(zip(*levels, strict=True))


class _Search:
    """The search for the holders of the memory that grows, as the last step of a run ends."""

    def __init__(self, run: Run, devices: Sequence[int], steps: int) -> None:
        self._run = run
        self._devices = devices
        """indexes of the devices on which memory grows"""
        self._steps = steps
        self.holders: dict[int, tuple[Holder, ...]] = {}
        """by the index of a device"""

    def look(self, step: int) -> None:
        """Search, if the last step ends."""
        if step == self._steps:
            meter = self._run.meter
            self.find(meter.steps.ends, meter.recorded_so_far())

    def find(self, ends: Sequence[StepEnd], recording: Recording | None) -> None:
        """Search the holders of the blocks of the last half of the steps that are alive now."""
        live = self._run.meter.blocks()
        for index in self._devices:
            device = self._run.meter.devices[index]
            if recording is None or recording.overflowed:
                continue
            blocks = {
                (device, block.address): nbytes
                for block, nbytes in grown_blocks(
                    AllocatorLog.of(recording, device).blocks, ends
                ).items()
                if block.end is None and (device, block.address) in live
            }
            if blocks:
                from pytest_gpumem.attribution.referrers import holders

                self.holders[index] = holders(blocks)


def grown_blocks(blocks: Iterable[Block], ends: Sequence[StepEnd]) -> dict[Block, int]:
    """Return the blocks by which memory grew in the last half of the steps, each with the bytes.

    Of the blocks that came in that time and stayed until its end, some replace blocks that went:
    the batch of the last step, say. The youngest replace those with the same stack of Python's, or
    the same size; of a block that is larger than the one before only the difference is growth. A
    block of the last step may be in a variable yet that its next step gives away: if a block like
    it of the step before that time stayed, that one counts in its place.
    """
    first = last_half(len(ends))
    start, end = ends[first].time, ends[-1].time
    came: list[Block] = []
    went: list[Block] = []
    likes: list[Block] = []
    for block in blocks:
        if start < block.time <= end < block.end_time:
            came.append(block)
        elif block.start >= 0 and block.time <= start < block.end_time:
            if block.end_time <= end:
                went.append(block)
            elif block.time > ends[first - 1].time:
                likes.append(block)
    came.sort(key=lambda block: -block.time)
    grown = {block: block.size for block in came}
    for kind in (_stack_and_size, _stack, _size):
        pairs = _pairs(came, went, kind)
        grown |= {block: _size(block) - _size(replaced) for block, replaced in pairs.items()}
        came = [block for block in came if block not in pairs]
        went = [*{*went} - {*pairs.values()}]
    last = [block for block in came if block.time > ends[-2].time]
    for block, like in _pairs(last, likes, _stack_and_size).items():
        grown[like] = grown.pop(block)
    return {block: nbytes for block, nbytes in grown.items() if nbytes > 0}


def _pairs(
    blocks: Iterable[Block], others: Iterable[Block], key: Callable[[Block], object]
) -> dict[Block, Block]:
    waiting: defaultdict[object, list[Block]] = defaultdict(list)
    for block in others:
        waiting[key(block)].append(block)
    return {block: alike.pop() for block in blocks if (alike := waiting[key(block)])}


def _stack(block: Block) -> tuple[tuple[Any, Any], ...]:
    return tuple((frame["filename"], frame["line"]) for frame in block.frames)


def _size(block: Block) -> int:
    """Return a block's bytes without a remainder, which the next block may have or not."""
    return block.size - block.unsplit


def _stack_and_size(block: Block) -> tuple[object, ...]:
    return _stack(block), _size(block)


def _lines(
    run: Run, index: int, recording: Recording | None, ends: Sequence[StepEnd]
) -> tuple[Site, ...]:
    device = run.meter.devices[index]
    return block_sites(recording, device, lambda blocks: grown_blocks(blocks, ends), run.root)


def block_sites(
    recording: Recording | None,
    device: int,
    choose: Callable[[Sequence[Block]], Mapping[Block, int]],
    root: Path,
) -> tuple[Site, ...]:
    """Return the source lines of some blocks; none where they are not known.

    ``choose`` returns the blocks in question, each with the bytes that count.
    """
    if recording is None or recording.overflowed:
        return ()
    from pytest_gpumem.attribution.attributor import MAX_SITES, origin_of
    from pytest_gpumem.attribution.categories import Blocks
    from pytest_gpumem.attribution.sites import sites

    scene = Blocks(recording, device)
    # Blocks that were live before the recording have no line.
    origins = [
        replace(origin_of(scene, block), nbytes=nbytes)
        for block, nbytes in choose(scene.blocks).items()
        if block.start >= 0
    ]
    return sites(origins, root)[:MAX_SITES]
