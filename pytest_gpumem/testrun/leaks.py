"""Judge the memory that a test has left after its tear-down (``max_leak_mib``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.judge.judge import judge_left
from pytest_gpumem.measurement import Stayed
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.referrers import holders as holders_of
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.second_runs import LEAK

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Recording
    from pytest_gpumem.testrun.explainer import Explainer
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run

BlockKey = tuple[int, int]

MAX_SHARE: Final = 8
"""A test that left more than 1/N of the device's memory is not run again: the second run would have
to fit in the rest."""


class _Leftover(NamedTuple):
    """The memory that one run of a test left behind."""

    sizes: tuple[int, ...]
    """bytes, one figure per device"""
    blocks: dict[BlockKey, int]


def judged_leak(  # noqa: PLR0913, PLR0917 - a test, its run, and all that came of it
    runner: Runner,
    explainer: Explainer,
    item: MarkedItem,
    run: Run,
    whole: Result,
    recording: Recording | None,
) -> Result | None:
    """Return the result of a test that left too much behind; None if it did not.

    A leaking test is run once more, unless it left too much memory for a second run. With
    ``warmup`` the second run's leftover counts, as the first run fills caches; otherwise a note
    says whether the second run leaks as well.
    """
    assert whole.measurement is not None  # noqa: S101 - the caller has a measured test
    of_fixtures = (fixture.known for fixture in run.fixtures.used)
    excused = run.excused_blocks.union(*of_fixtures) - run.meter.isolation.returned
    left = _leftover(runner, run, excused)
    measurement = replace(whole.measurement, left=left.sizes)
    if judge_left(measurement, run.spec, whole.verdict) is None:
        return None
    stayed = _stayed(explainer, run, left, recording)  # look before the second run leaves more
    left_again: _Leftover | None = None
    recorded: Recording | None = None
    if max(left.sizes) <= run.info.total_memory // MAX_SHARE:
        with runner.again(item, LEAK, record=explainer.enabled, warm=True) as attempt:
            recorded = run.meter.recording.stop()
        if attempt.passed:
            left_again = _leftover(runner, run, {*excused, *left.blocks}, left.sizes)
    if run.spec.warmup and left_again is not None:
        measurement = replace(measurement, left=left_again.sizes)
        stayed = _stayed(explainer, run, left_again, recorded)
        note = ""
    elif left_again is None:
        note = (
            "this includes the memory that the warm-up left: a second run did not pass, or was "
            "not tried"
        )
        note = note if run.spec.warmup else ""
    elif size := max(left_again.sizes, default=0):
        note = f"a second run leaked {format_size(size)} more"
    else:
        note = "a second run leaked nothing more: the memory is kept once, like a cache"
    measurement = replace(measurement, stayed=stayed)
    verdict = judge_left(measurement, run.spec, whole.verdict)
    if verdict is None:
        return None
    notes = (*verdict.notes, Note(NoteKind.RUN, note)) if note else verdict.notes
    return replace(whole, measurement=measurement, verdict=replace(verdict, notes=notes))


def _leftover(
    runner: Runner, run: Run, excused: Collection[BlockKey], held_before: Sequence[int] = ()
) -> _Leftover:
    """Return what a test has left: bytes beyond ``held_before``, blocks not in ``excused``."""
    run.meter.release()
    held = runner.left_by(run)
    sizes = [
        max(0, size - size_before)
        for size, size_before in zip(held, held_before or [0] * len(held), strict=True)
    ]
    blocks = {
        place: size for place, size in run.meter.isolation.blocks().items() if place not in excused
    }
    return _Leftover(tuple(sizes), blocks)


def _stayed(explainer: Explainer, run: Run, left: _Leftover, recording: Recording | None) -> Stayed:
    """Return the source lines and the holders of leftover memory, on the device with most of it."""
    index = left.sizes.index(max(left.sizes))
    device = run.meter.devices[index]
    blocks = {place: size for place, size in left.blocks.items() if place[0] == device}

    def left_blocks(history: Iterable[Block]) -> dict[Block, int]:
        return {
            block: block.size
            for block in history
            if block.end is None and (device, block.address) in blocks
        }

    lines = explainer.lines(recording, device, left_blocks)
    return Stayed(index, left.sizes[index], lines, holders_of(blocks))
