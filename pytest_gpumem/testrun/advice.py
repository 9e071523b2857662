"""Advice for a test that ran out of memory, each tried: smaller batches, variants."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.fit.search import Probe, Search
from pytest_gpumem.meter.peaks import fullest
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.measurement import Peak
    from pytest_gpumem.testrun.rerun import Stage
    from pytest_gpumem.testrun.run import Run


LONGEST_S: Final = 60.0
"""seconds after which no further batch size is tried for the sake of advice"""


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
