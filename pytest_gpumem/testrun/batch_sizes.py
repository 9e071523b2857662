"""Running a test again with something else: its other batch sizes, and what a report advises."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.fit.scaling import Scaling, grows_evenly, uneven
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.explain import explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.measurement import Breakdown, Measurement
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.rerun import Stage
    from pytest_gpumem.testrun.run import Run


# -- several batch sizes --


def with_slope(
    stage: Stage,
    item: Any,  # noqa: ANN401
    run: Run,
    measurement: Measurement,
    *,
    named: bool,
) -> Measurement:
    """Run a test with the rest of its batch sizes; return its measurement with its slope.

    The line is through what it took outside of optimizers' steps, on the device that took most: an
    optimizer's step does not grow with the batch, and at small batches would hide what does.

    Args:
        stage: where it runs.
        item: the test.
        run: with the largest of them, which has ended.
        measurement: of that.
        named: find out which lines of source are not on a line.

    Raises:
        GpuMemError: it fails with one of them.
    """
    sizes = run.spec.batch_sizes or ()
    passes = run.meter.passes()
    device = passes.index(max(passes, key=lambda peak: peak.allocated))
    points = {sizes[-1]: passes[device]}
    for size in sizes[:-1]:
        with stage.trial(item, replace(run.spec, batch_size=size)) as trial:
            if not trial.passed:
                raise _failed(run.spec, size, trial.error)
            points[size] = run.meter.passes()[device]
    scaling = Scaling.of(points)
    notes = list(measurement.notes)
    if named and not grows_evenly(scaling):
        known = {size: _breakdown(stage, item, run, size, device) for size in sizes}
        found = uneven({size: it for size, it in known.items() if it is not None})
        off = f"{format_size(scaling.residual)} off the line through batch sizes"
        notes.append(f"{off} {_listed(sizes)}{': ' if found else ''}{'; '.join(found)}")
    return replace(measurement, slope=scaling.slope, notes=tuple(notes))


def _breakdown(stage: Stage, item: Any, run: Run, size: int, device: int) -> Breakdown | None:  # noqa: ANN401
    with stage.trial(item, replace(run.spec, batch_size=size), record=True) as trial:
        if not trial.passed:
            return None
        found = explain(run, [""], stage.root, timelines=False)
        attributions = found.attached("", run.measurement()).attributions
    return attributions[device].breakdown if attributions else None


def _failed(spec: MemorySpec, size: int, error: str) -> GpuMemError:
    return GpuMemError(
        f"@pytest.mark.gpu_memory(batch_sizes={list(spec.batch_sizes or ())})",
        f"with batch size {size} the test failed: {error or 'a rank is not run again alone'}",
        "make it pass with every one of them, or leave out those with which it cannot",
    )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


# -- what does not fit --
