"""The growth of a test's memory with its batch size (``batch_sizes``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.fit.scaling import Scaling, grows_evenly
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.rerun import shown_error
from pytest_gpumem.testrun.second_runs import SIZES

if TYPE_CHECKING:
    from pytest_gpumem.testrun.explainer import Explainer
    from pytest_gpumem.testrun.judging import EndedTest
    from pytest_gpumem.testrun.rerun import Runner


class SlopeStage:
    """Runs a test with its smaller batch sizes, and adds the slope to its measurement.

    The line is fitted to the peaks outside of optimizer steps, on the fullest device: an
    optimizer step's memory does not grow with the batch, and would hide the growth at small
    batches.
    """

    def __init__(self, runner: Runner, explainer: Explainer) -> None:
        self._runner = runner
        self._explainer = explainer

    def applies(self, test: EndedTest) -> bool:
        """See :class:`Stage`."""
        return test.run.spec.batch_sizes is not None

    def __call__(self, test: EndedTest) -> EndedTest:
        """See :class:`Stage`; the test must pass with each size."""
        run, sizes = test.run, test.run.spec.batch_sizes or ()
        passes = run.meter.passes()
        device = passes.index(max(passes, key=lambda peak: peak.allocated))
        points = {sizes[-1]: passes[device]}
        left = 0
        for size in sizes[:-1]:
            inputs = run.inputs._replace(batch_size=size)
            with self._runner.trial(test.item, SIZES, inputs) as trial:
                if not trial.passed:
                    error = shown_error(trial.error)
                    raise GpuMemError(
                        f"@pytest.mark.gpu_memory(batch_sizes={list(sizes)})",
                        f"the test failed with batch size {size}: "
                        f"{error or 'one rank cannot run again without the others'}",
                        "make the test pass with every size, or leave out the sizes that fail",
                    )
                points[size] = run.meter.passes()[device]
                left = max(left, trial.left)
        scaling = Scaling.of(points)
        notes = list(test.whole.notes)
        if left:
            sentence = (
                f"{format_size(left)} that runs with other batch sizes left behind are counted "
                "in the figures of smaller sizes: the real growth is larger than shown"
            )
            notes.append(Note(NoteKind.SLOPE, sentence))
        if not grows_evenly(scaling):
            notes += self._explainer.off_the_line(test.item, run, scaling, device)
        return test.with_whole(replace(test.whole, slope=scaling.slope, notes=tuple(notes)))
