"""Judge the growth of memory from step to step (``steady``).

Memory that is still allocated after a step is in use, or garbage in reference cycles. The first run
never collects garbage, so that its peak is the program's own. If memory that the program does not
free itself grows, the test runs again, with a collection after each step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.errors import SpecError
from pytest_gpumem.judge.comparison import MIN_STEPS, growth, last_half
from pytest_gpumem.measurement import Stayed
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.allocator_log import AllocatorLog
from pytest_gpumem.recording.grown_blocks import grown_blocks
from pytest_gpumem.recording.referrers import holders as holders_of
from pytest_gpumem.testrun.second_runs import GROWTH

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.measurement import Holder, Measurement, Site
    from pytest_gpumem.meter.step_watch import StepEnd
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Recording
    from pytest_gpumem.testrun.explainer import Explainer
    from pytest_gpumem.testrun.judging import EndedTest
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
    "some of the memory that grew may be garbage in reference cycles: the test did not run as many "
    "steps again with a garbage collection after each",
)
STEPPED_ONCE: Final = (
    "each optimizer stepped once, so each of these calls of step() counts as the end of a step: if "
    "one step has several of them, call gpu_memory.step() at its end"
)


def require_steps(run: Run) -> None:
    """Refuse to judge a ``steady`` test with too few steps."""
    number = len(run.meter.steps.ends)
    if number < MIN_STEPS:
        raise SpecError(
            "steady=True",
            f"the test had {number} steps, and growth needs {MIN_STEPS} or more steps (a "
            "step ends with optimizer.step())",
            "run more steps; without an optimizer, call gpu_memory.step() after each step",
        )


class SteadyStage:
    """Judges the memory in use after each step of a ``steady`` test, and finds why it grows."""

    def __init__(self, runner: Runner, explainer: Explainer) -> None:
        self._runner = runner
        self._explainer = explainer

    def applies(self, test: EndedTest) -> bool:
        """See :class:`Stage`."""
        return test.run.spec.steady

    def __call__(self, test: EndedTest) -> EndedTest:
        """See :class:`Stage`; a test with too few steps is refused."""
        require_steps(test.run)
        return test.with_whole(_with_growth(self._runner, self._explainer, test))


def _with_growth(runner: Runner, explainer: Explainer, test: EndedTest) -> Measurement:
    """Return a test's measurement with the memory in use after each step, and why it grows."""
    run, measurement, recording = test.run, test.whole, test.recording
    steps, ends = run.meter.steps, run.meter.steps.ends
    levels = _levels(ends)
    growing = [index for index, row in enumerate(levels) if growth(row) is not None]
    if not growing:
        return measurement
    recording = recording if explainer.enabled else None
    notes = [Note(NoteKind.RUN, STEPPED_ONCE)] if steps.each_optimizer_stepped_once else []
    run.meter.release()  # free garbage, which would look like memory that outlives the test
    # Look only at blocks that have outlived the test: most local variables' blocks have not.
    outliving = _holders(run, growing, ends, recording)
    outlived = {index: _levels_outlived(run, index, ends, recording) for index in growing}
    again = _run_collecting(runner, test.item, run, growing)
    # Use a failed second run, too, if it had as many steps as the first: the test's assertion on
    # the peak may fail after the last step.
    is_alike = again.ran and len(again.ends) == len(ends)
    if is_alike:
        collected = list(zip(*(end.requested for end in again.ends), strict=True))
        with_garbage = _levels(again.ends)
        for index in growing:
            rows = levels[index], collected[index], with_garbage[index], outlived[index]
            levels[index] = _judged(*rows)
    measurement = replace(measurement, steps=tuple(levels))
    grown = [step.final - step.initial if step else 0 for step in map(growth, levels)]
    largest = max(grown)
    if not largest:
        return replace(measurement, notes=(*measurement.notes, GARBAGE_ALONE))
    index = grown.index(largest)
    found = ({**outliving, **again.holders} if is_alike else outliving).get(index, ())
    lines: tuple[Site, ...] = ()
    if recording is not None:
        runs = [(again.recording, again.ends)] if is_alike else []
        for log, times in (*runs, (recording, ends)):
            grew = partial(_grown, ends=times)
            lines = lines or explainer.lines(log, run.meter.devices[index], grew)
    measurement = replace(measurement, stayed=Stayed(index, largest, lines, found))
    if is_alike:
        notes.append(GROWTH.note)
    elif sum(holder.nbytes for holder in found) != largest:  # if equal, no garbage grew
        notes.append(GARBAGE_TOO)
    return replace(measurement, notes=(*measurement.notes, *notes))


class _Collecting(NamedTuple):
    """A second run of a test, with a garbage collection after each step."""

    ends: Sequence[StepEnd]
    ran: bool
    recording: Recording | None
    """None if the test did not run again, or was not recorded"""
    holders: dict[int, tuple[Holder, ...]]
    """the holders of the grown blocks at the end of the last step, by the device's index"""


def _run_collecting(
    runner: Runner, item: MarkedItem, run: Run, devices: Sequence[int]
) -> _Collecting:
    """Run a test again, with a garbage collection after each step."""
    steps, last = run.meter.steps, run.meter.steps.last_noted
    holders: dict[int, tuple[Holder, ...]] = {}
    recording: Recording | None = None
    ran = False

    def look(noted: int) -> None:
        if noted == last:
            holders.update(_holders(run, devices, steps.ends, run.meter.recording.so_far()))

    steps.search = look
    try:
        with runner.again(item, GROWTH, record=True) as attempt:
            ran = attempt.ran
            if ran:
                recording = run.meter.recording.stop()
    finally:
        steps.search = None
    return _Collecting(steps.ends, ran, recording, holders)


def _judged(
    first: tuple[int, ...],
    collected: tuple[int, ...],
    with_garbage: tuple[int, ...],
    outlived: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the figures to judge growth by: bytes in use after each step.

    Growth is always computed within one run.

    Args:
        first: bytes in the first run, with garbage.
        collected: bytes in the second run, after each step's collection.
        with_garbage: ``collected`` plus all garbage collected so far.
        outlived: bytes in the first run, only in blocks that have outlived the test.
    """
    if growth(collected) is not None:
        shift = first[0] - with_garbage[0]  # leave out what the first run left behind
        return tuple(level + shift for level in collected)
    if growth(with_garbage) is None:  # what grew was not garbage, but a cache that is full now
        return first
    return outlived if growth(outlived) is not None else collected


def _levels(ends: Sequence[StepEnd]) -> list[tuple[int, ...]]:
    """Return for each device the bytes after each step that the program has not freed itself."""
    rows = (
        [held + freed for held, freed in zip(end.requested, end.freed, strict=True)] for end in ends
    )
    return list(zip(*rows, strict=True))


def _levels_outlived(
    run: Run, index: int, ends: Sequence[StepEnd], recording: Recording | None
) -> tuple[int, ...]:
    """Return the bytes after each step in a device's blocks that are alive now; () if unknown."""
    if recording is None or recording.overflowed:
        return ()
    device, live = run.meter.devices[index], run.meter.isolation.blocks()
    alive = [
        block
        for block in AllocatorLog.of(recording, device).blocks
        if block.end is None and (device, block.address) in live
    ]
    return tuple(sum(block.requested for block in alive if block.time <= end.time) for end in ends)


def _grown(blocks: Iterable[Block], ends: Sequence[StepEnd]) -> dict[Block, int]:
    """Return the blocks by which memory grew in the last half of the steps."""
    return grown_blocks(blocks, [end.time for end in ends], last_half(len(ends)))


def _holders(
    run: Run, devices: Sequence[int], ends: Sequence[StepEnd], recording: Recording | None
) -> dict[int, tuple[Holder, ...]]:
    """Return the holders of live blocks by which memory grew in the last half of the steps.

    ``devices`` are the indexes of the devices with growth. The result has an entry for each of them
    whose grown blocks are known.
    """
    if recording is None or recording.overflowed:
        return {}
    live, found = run.meter.isolation.blocks(), {}
    for index in devices:
        device = run.meter.devices[index]
        grown = _grown(AllocatorLog.of(recording, device).blocks, ends)
        blocks = {
            (device, block.address): nbytes
            for block, nbytes in grown.items()
            if block.end is None and (device, block.address) in live
        }
        if blocks:
            found[index] = holders_of(blocks)
    return found
