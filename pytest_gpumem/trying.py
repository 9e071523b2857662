"""Running a test again with something else: its other batch sizes, and what a report advises."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.attribution import explain
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.fit import Probe, Search
from pytest_gpumem.scaling import Scaling, grows_evenly, uneven
from pytest_gpumem.sizes import format_size
from pytest_gpumem.tally import fullest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.records import Breakdown, Measurement, Peak
    from pytest_gpumem.running import Run
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.stage import Stage

LONGEST_S: Final = 60.0
"""seconds after which no further batch size is tried for the sake of advice"""


# -- several batch sizes --


def with_slope(
    stage: Stage,
    item: Any,  # noqa: ANN401 - a pytest.Item
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


def advice(stage: Stage, item: Any, needed: Peak, *, batch_norm: bool) -> list[str]:  # noqa: ANN401
    """Say what would make a test fit, each tried by running it.

    Args:
        stage: where it runs.
        item: the test, which has run without limits.
        needed: what it took then.
        batch_norm: whether its model looks at statistics of the batch.
    """
    run = stage.run
    if run is None:
        return []
    found: list[str] = []
    size = run.spec.batch_size
    if size is not None and size > 1 and run.batch_size_asked and run.spec.batch_sizes is None:
        found += _micro_batches(stage, item, run, needed, batch_norm=batch_norm)
    return found + list(_variants(stage, item, run))


def _micro_batches(
    stage: Stage,
    item: Any,  # noqa: ANN401
    run: Run,
    needed: Peak,
    *,
    batch_norm: bool,
) -> Iterator[str]:
    declared = run.spec.batch_size or 1
    run.cap_again()
    capacity = run.meter.capacity
    search = Search(capacity, limit=declared - 1)
    search.add(Probe(declared, fits=False, peak=needed))
    began = time.monotonic()
    value: int | None = min(max(1, declared * capacity // max(needed.reserved, 1)), declared - 1)
    while value is not None and time.monotonic() - began < LONGEST_S:
        probe = _probe(stage, item, run, value)
        if probe is None:  # it fails with something else
            break
        search.add(probe)
        value = search.next()
    largest = search.result().value
    if not largest:
        tried = min(probe.value for probe in search.probes)
        if len(search.probes) > 1:
            yield f"not even batch size {tried} fits in {format_size(capacity)}"
        return
    even = max(size for size in range(1, largest + 1) if declared % size == 0)
    taken = next((it.peak for it in search.probes if it.fits and it.value == even), None)
    if taken is None:
        probe = _probe(stage, item, run, even)
        taken = probe.peak if probe is not None and probe.fits else None
    if taken is None:
        return
    most = "" if largest == even else f"; the largest batch size that fits is {largest}"
    yield (
        f"batch size {even} fits, with {format_size(taken.reserved)} of {format_size(capacity)} "
        f"reserved: {declared // even} accumulation steps of it make {declared}{most}"
    )
    if batch_norm:
        yield (
            f"its batch norm takes statistics of each micro-batch: of {even} samples, not of "
            f"{declared}, which is not the same training"
        )


def _probe(stage: Stage, item: Any, run: Run, size: int) -> Probe | None:  # noqa: ANN401
    """Run the test with another batch size; return None if it fails by something else."""
    with stage.trial(item, replace(run.spec, batch_size=size)) as trial:
        if not trial.passed and not trial.out_of_memory:
            return None
        return Probe(size, trial.passed, fullest(run.meter.peaks()), fullest(run.meter.passes()))


def _variants(stage: Stage, item: Any, run: Run) -> Iterator[str]:  # noqa: ANN401
    if run.spec.variants and not run.variant_asked:
        yield "none of its variants was tried: the test does not ask for gpu_memory.variant"
        return
    for name, options in run.spec.variants.items():
        with stage.trial(item, replace(run.spec, variant=options)) as trial:
            if trial.passed:
                peak = fullest(run.meter.peaks())
                yield (
                    f"variant {name!r} fits: {format_size(peak.reserved)} of "
                    f"{format_size(run.meter.capacity)} reserved, "
                    f"{format_size(peak.allocated)} allocated"
                )
            elif trial.out_of_memory:
                yield f"variant {name!r} does not fit"
            else:
                yield f"variant {name!r} fails: {trial.error}"
