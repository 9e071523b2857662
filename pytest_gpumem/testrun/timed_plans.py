"""Peaks that cuDNN's timing of plans may have raised (``torch.backends.cudnn.benchmark``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.benchmark_mode import TIMED
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.testrun.rerun import may_run_again
from pytest_gpumem.testrun.second_runs import TIMED_PLANS

if TYPE_CHECKING:
    from pytest_gpumem.testrun.judging import EndedTest
    from pytest_gpumem.testrun.rerun import Runner

TIMED_BEFORE: Final = Note(
    NoteKind.RUN, "the peaks are those of a second run, after cuDNN had timed its plans"
)


class TimedPlansStage:
    """Runs a test a second time if a peak grew, and uses the new peaks.

    A second run times no plans, so its peaks do not depend on the order of the tests.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def applies(self, test: EndedTest) -> bool:
        """See :class:`Stage`."""
        grew = any(result.verdict.kind is Kind.REGRESSED for result in test.results)
        return grew and TIMED in test.whole.notes and may_run_again(test.run.spec)

    def __call__(self, test: EndedTest) -> EndedTest:
        """See :class:`Stage`."""
        with self._runner.again(test.item, TIMED_PLANS, record=False) as attempt:
            if not attempt.passed or attempt.left:
                return test
            measured = {
                part: (spec, replace(kept, peaks=test.run.peaks_of(part) or kept.peaks))
                for part, (spec, kept) in test.measured.items()
            }
        test = test._replace(measured=measured)
        return test.with_whole(replace(test.whole, notes=(*test.whole.notes, TIMED_BEFORE)))
