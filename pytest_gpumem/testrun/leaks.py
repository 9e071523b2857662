"""What a test left behind, and what its steps heaped up: found, explained, judged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.attribution.attributor import MOST_SITES, origin_of
from pytest_gpumem.attribution.categories import Blocks
from pytest_gpumem.attribution.referrers import holders
from pytest_gpumem.attribution.sites import sites
from pytest_gpumem.errors import SpecError
from pytest_gpumem.judge.judge import judge_left
from pytest_gpumem.measurement import Stayed
from pytest_gpumem.sizes import format_size
from pytest_gpumem.step_growth import LEAST_STEPS, WARM, growth

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from pytest_gpumem.attribution.history_replay import Block
    from pytest_gpumem.attribution.recording import Recording
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Measurement, Site
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run

Place = tuple[int, int]
"""device and address of a block"""

MOST_SHARE: Final = 8
"""a test that left a larger part of the device's memory behind is not run again"""

# -- growth --


def require_steps(run: Run) -> None:
    """Refuse to judge a test that is to be steady and has too few steps.

    Raises:
        SpecError: so it is.
    """
    number = len(run.meter.steps.allocated)
    if run.spec.steady and number < LEAST_STEPS:
        raise SpecError(
            "steady=True",
            f"the test had {number} steps, and growth can be told of {LEAST_STEPS} or more "
            "(a step ends with the optimizer's)",
            "run more steps; where there is no optimizer, call gpu_memory.step() after each",
        )


def with_growth(
    run: Run, measurement: Measurement, recording: Recording | None, root: Path
) -> Measurement:
    """Return a test's measurement, with the lines whose memory makes its steps grow."""
    steps = run.meter.steps
    grown = [(it.final - it.initial if (it := growth(one)) else 0) for one in measurement.steps]
    most = max(grown, default=0)
    if not run.spec.steady or not most:
        return measurement
    device = grown.index(most)
    found = _heaped(recording, run.meter.devices[device], steps.times, root) if recording else ()
    return replace(measurement, stayed=Stayed(device, most, found, steps.holders))


def _heaped(
    recording: Recording, device: int, times: Sequence[float], root: Path
) -> tuple[Site, ...]:
    """Return the sites of what was allocated in later steps and outlived the next one."""

    def outlived(block: Block) -> bool:
        ends = [time for time in times if time >= block.time]
        return block.time > times[WARM] and len(ends) > 1 and block.end_time > ends[1]

    return _sites(recording, device, outlived, root)


def _sites(
    recording: Recording, device: int, wanted: Callable[[Block], bool], root: Path
) -> tuple[Site, ...]:
    if recording.overflowed:
        return ()
    known = Blocks(recording, device)
    origins = [origin_of(known, it) for it in known.blocks if it.start >= 0 and wanted(it)]
    return sites(origins, root)[:MOST_SITES]


# -- what is left --


class _Left(NamedTuple):
    """What one run of a test left behind."""

    sizes: tuple[int, ...]
    """bytes, one figure a device"""
    blocks: dict[Place, int]
    """what there was not before, and how large each is"""


def judged(  # noqa: PLR0913 - a test, its run, and all that came of it
    runner: Runner,
    item: MarkedItem,
    run: Run,
    whole: Result,
    recording: Recording | None,
    *,
    record: bool,
) -> Result | None:
    """Return the result of a test that left too much behind; None if it did not.

    A test with a warm-up is run once more: what counts is what that leaves. So are others, to say
    whether each run leaves as much.
    """
    assert whole.measurement is not None  # noqa: S101 - judge_left was asked for a measured test
    left = _left(runner, run, run.excused_blocks)
    measurement = replace(whole.measurement, left=left.sizes)
    if judge_left(measurement, run.spec) is None:
        return None
    stayed = _stayed(run, left, recording, runner.root)  # now: a second run leaves more
    again, recorded = _left_again(runner, item, run, left, record=record)
    if run.spec.warmup and again is not None:
        measurement = replace(measurement, left=again.sizes)
        stayed = _stayed(run, again, recorded, runner.root)
        note = ""
    else:
        note = _compared(again, warmup=run.spec.warmup)
    measurement = replace(measurement, stayed=stayed)
    verdict = judge_left(measurement, run.spec)
    if verdict is None:
        return None
    notes = (*verdict.notes, note) if note else verdict.notes
    return replace(whole, measurement=measurement, verdict=replace(verdict, notes=notes))


def _left(runner: Runner, run: Run, known: Collection[Place], before: Sequence[int] = ()) -> _Left:
    run.meter.release()
    held = runner.left_by(run)
    more = [now - past for now, past in zip(held, before or [0] * len(held), strict=True)]
    blocks = {it: size for it, size in run.meter.blocks().items() if it not in known}
    return _Left(tuple(max(0, it) for it in more), blocks)


def _left_again(
    runner: Runner,
    item: MarkedItem,
    run: Run,
    first: _Left,
    *,
    record: bool,
) -> tuple[_Left | None, Recording | None]:
    """Return what a second run of the test leaves besides; None if there was none that passed."""
    if max(first.sizes) > run.info.total_memory // MOST_SHARE:
        return None, None
    with runner.again(item, record=record, warm=True) as attempt:
        recording = run.meter.recording()
    if not attempt.passed:
        return None, recording
    known = {*run.excused_blocks, *first.blocks}
    return _left(runner, run, known, first.sizes), recording


def _compared(again: _Left | None, *, warmup: int) -> str:
    if again is None:
        tried = "with what the warm-up left: a second run did not pass, or was not tried"
        return tried if warmup else ""
    size = max(again.sizes, default=0)
    if size:
        return f"run once more it left {format_size(size)} more"
    return "run once more it left nothing more: something is kept once, as a cache is"


def _stayed(run: Run, left: _Left, recording: Recording | None, root: Path) -> Stayed:
    index = left.sizes.index(max(left.sizes))
    device = run.meter.devices[index]
    blocks = {place: size for place, size in left.blocks.items() if place[0] == device}

    def stays(block: Block) -> bool:
        return block.end is None and (device, block.address) in blocks

    found = _sites(recording, device, stays, root) if recording else ()
    return Stayed(index, left.sizes[index], found, holders(blocks))
