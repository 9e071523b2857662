"""A test with several batch sizes: run with each of them, for the line of its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.fit.scaling import Scaling, grows_evenly, uneven
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.explain import explain
from pytest_gpumem.testrun.rerun import shown_error

if TYPE_CHECKING:
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run


def with_slope(
    runner: Runner, item: MarkedItem, run: Run, measurement: Measurement, *, name_lines: bool
) -> Measurement:
    """Run a test with its smaller batch sizes; return its measurement with its slope.

    The line is through the peaks outside of optimizers' steps, on the fullest device: an
    optimizer's step does not grow with the batch, and at small batches would hide the growth.

    ``name_lines``: find out which lines of source are not on a line.

    Raises:
        GpuMemError: it fails with one of them.
    """
    sizes = run.spec.batch_sizes or ()
    passes = run.meter.passes()
    device = passes.index(max(passes, key=lambda peak: peak.allocated))
    points = {sizes[-1]: passes[device]}
    left = 0
    for size in sizes[:-1]:
        with runner.trial(item, run.inputs._replace(batch_size=size)) as trial:
            if not trial.passed:
                raise GpuMemError(
                    f"@pytest.mark.gpu_memory(batch_sizes={list(sizes)})",
                    f"the test failed with batch size {size}: "
                    f"{shown_error(trial.error) or 'one rank cannot run again without the others'}",
                    "make the test pass with every size, or leave out the sizes that fail",
                )
            points[size] = run.meter.passes()[device]
            left = max(left, trial.left)
    scaling = Scaling.of(points)
    notes = list(measurement.notes)
    if left:
        sentence = (
            f"{format_size(left)} that runs with other batch sizes left behind are counted "
            "in the figures of smaller sizes: the real growth is larger than shown"
        )
        notes.append(Note(NoteKind.SLOPE, sentence))
    if name_lines and not grows_evenly(scaling):
        breakdowns = {}
        for size in sizes:
            inputs = run.inputs._replace(batch_size=size)
            with runner.trial(item, inputs, record=True) as trial:
                if trial.passed:
                    explained = explain(run, [""], runner.root, timelines=False)
                    for attribution in explained.attributions.get("", ())[device : device + 1]:
                        breakdowns[size] = attribution.breakdown
        lines = uneven(breakdowns)
        off = f"{format_size(scaling.residual)} off the line through batch sizes"
        listed = ", ".join(map(str, sizes))
        sentence = f"{off} {listed}{': ' if lines else ''}{'; '.join(lines)}"
        notes.append(Note(NoteKind.SLOPE, sentence))
    return replace(measurement, slope=scaling.slope, notes=tuple(notes))
