"""The range of peaks that depend on unknown values: a second run gives its lower end.

In the first run, sizes that depend on unknown values have their upper bound.
``replay/size_range.py`` makes ranges for a GPU's own choices, without a second run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import unexplained
from pytest_gpumem.measurement import PeakRange
from pytest_gpumem.meter.peaks import fullest
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.part_limits import bounds
from pytest_gpumem.testrun.rerun import may_run_again
from pytest_gpumem.testrun.second_runs import LEAST_SIZES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Measurement, Peak
    from pytest_gpumem.relations import Bound
    from pytest_gpumem.testrun.judging import EndedTest, Judging
    from pytest_gpumem.testrun.rerun import Runner


class UnknownSizesStage:
    """Runs a test again with the smallest sizes if it needs too much memory with the largest."""

    def __init__(self, runner: Runner, judging: Judging) -> None:
        self._runner, self._judging = runner, judging

    def applies(self, test: EndedTest) -> bool:
        """See :class:`Stage`."""
        needs_too_much = any(map(_needs_too_much, test.results))
        return needs_too_much and bool(test.run.device.values.bounds(test.run.root))

    def __call__(self, test: EndedTest) -> EndedTest:
        """See :class:`Stage`."""
        run, recorded = test.run, test.recorded
        # End the recording here: otherwise it would include the second run.
        if recorded is None and run.meter.recording.is_running:
            recorded = run.recorded(test.measured)
        places = run.device.values.bounds(run.root)
        least: dict[str, tuple[Peak, ...]] = {}
        relations: dict[str, Sequence[Bound]] = {}
        if may_run_again(run.spec) and not test.debugging:
            with (
                run.device.values.least_sizes(),
                self._runner.again(
                    *(test.item, LEAST_SIZES, test.error),
                    record=False,
                    uncapped=test.error is not None,
                ) as attempt,
            ):
                if attempt.passed and not attempt.left:
                    least = {part: run.peaks_of(part) for part in test.measured}
                    relations = {part: bounds(run.parts, part) for part in run.parts}
        anyway = self._too_much(test._replace(relations=relations), least)
        measured = {
            part: (spec, bounded(kept, least.get(part, ()), places, too_much_anyway=part in anyway))
            for part, (spec, kept) in test.measured.items()
        }
        return test._replace(measured=measured, recorded=recorded)

    def _too_much(self, test: EndedTest, least: Mapping[str, tuple[Peak, ...]]) -> set[str]:
        """Return the parts that need too much memory with the least sizes as well."""
        measured = {
            part: (spec, replace(kept, peaks=least[part], out_of_memory=None))
            for part, (spec, kept) in test.measured.items()
            if least.get(part)
        }
        explain = dict.fromkeys(measured, unexplained)
        results = self._judging.results(test._replace(measured=measured), explain)
        return {result.part for result in results if _needs_too_much(result)}


def _needs_too_much(result: Result) -> bool:
    """Return whether a test failed by device memory; unlike ``too_much``, also by memory held."""
    verdict = result.verdict
    return verdict.failed and verdict.kind.too_much and not result.is_host_too_much


def bounded(
    measurement: Measurement, least: tuple[Peak, ...], places: str, *, too_much_anyway: bool
) -> Measurement:
    """Return a measurement with a note that it is an upper bound, and with its range if known.

    ``least`` are the peaks with the least sizes, or (); ``too_much_anyway`` is whether these are
    too high as well. ``places`` are the source lines whose unknown sizes are at their maximum.
    """
    needed = measurement.out_of_memory.needed if measurement.out_of_memory else None
    most = measurement.peaks if needed is None else (needed,)
    sentence = (
        f"how much {places} takes depends on unknown values, so the figures are an upper bound: "
        "all is taken"
    )
    if least:
        low, high = fullest(least), fullest(most)
        sentence += (
            f" (allocated {format_size(low.allocated)} to {format_size(high.allocated)}, reserved "
            f"{format_size(low.reserved)} to {format_size(high.reserved)}, from none to all)"
        )
        if measurement.range is None and needed is None:
            reason = f"sizes that depend on unknown values ({places})"
            spanned = PeakRange(least, measurement.peaks, reason, judged=True)
            measurement = replace(measurement, range=spanned)
    if too_much_anyway:
        sentence += ": the test needs too much in either case"
    note = Note(NoteKind.RANGE if too_much_anyway else NoteKind.BOUND, sentence)
    return replace(measurement, notes=(note, *measurement.notes))
