"""Advise on a test that ran out of memory: try smaller batches and variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.fit.search import Probe, Search
from pytest_gpumem.meter.peaks import fullest
from pytest_gpumem.notes import NoteKind, notes_of
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.rerun import shown_error
from pytest_gpumem.testrun.second_runs import ADVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.measurement import Peak
    from pytest_gpumem.notes import Note
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run


MAX_TRIALS: Final = 12
"""maximum number of batch sizes to try; a time limit would make the advice depend on the machine"""


def advice(
    runner: Runner, item: MarkedItem, needed: Peak | None, error: BaseException, *, batch_norm: bool
) -> list[Note]:
    """Return hints on how to make a test fit, each tried by running it.

    No smaller batch is tried if ``needed``, the test's peak without limits, is None.
    """
    run = runner.run
    assert run is not None  # noqa: S101 - for the type checker
    hints: list[str] = []
    size = run.spec.batch_size
    if needed and (size or 0) > 1 and run.has_read("batch_size") and run.spec.batch_sizes is None:
        hints += _smaller_batches(runner, item, run, needed, error, batch_norm=batch_norm)
    if run.spec.variants and not run.has_read("variant"):
        unread = "no variant was tried, because the test does not read gpu_memory.variant"
        return [*notes_of(NoteKind.TRIAL, [*hints, unread])]
    for name, options in run.spec.variants.items():
        with runner.trial(
            item, ADVICE, run.inputs._replace(variant=options), handled=error
        ) as trial:
            if trial.passed and trial.left:
                left = f"{format_size(trial.left)} that earlier runs left behind"
                hints.append(f"variant {name!r} fits beside {left}")
            elif trial.passed:
                peak = fullest(run.meter.peaks())
                hints.append(
                    f"variant {name!r} fits: {format_size(peak.reserved)} of "
                    f"{format_size(run.meter.room.capacity)} reserved, "
                    f"{format_size(peak.allocated)} allocated"
                )
            elif trial.out_of_memory and trial.left:
                left = f"{format_size(trial.left)} that earlier runs left behind"
                hints.append(f"variant {name!r} does not fit beside {left}")
            elif trial.out_of_memory:
                hints.append(f"variant {name!r} does not fit")
            else:
                hints.append(f"variant {name!r} fails: {shown_error(trial.error)}")
    return [*notes_of(NoteKind.TRIAL, hints)]


def _smaller_batches(  # noqa: PLR0913 - a test, and all that is known of its failure
    runner: Runner,
    item: MarkedItem,
    run: Run,
    needed: Peak,
    error: BaseException,
    *,
    batch_norm: bool,
) -> Iterator[str]:
    declared = run.spec.batch_size or 1
    run.restore_limits()
    capacity = run.meter.room.capacity

    def tried(size: int) -> Probe | None:
        """Probe a batch size; None if earlier runs left memory, or after an unrelated error."""
        with runner.trial(
            item, ADVICE, run.inputs._replace(batch_size=size), handled=error
        ) as trial:
            # Memory left by earlier runs changes the figures, and may be the reason for not
            # fitting.
            if trial.left or not (trial.passed or trial.out_of_memory):
                return None
            return Probe(
                size, trial.passed, fullest(run.meter.peaks()), fullest(run.meter.passes())
            )

    search = Search(capacity, limit=declared - 1)
    search.add(Probe(declared, fits=False, peak=needed))
    value: int | None = min(max(1, declared * capacity // max(needed.reserved, 1)), declared - 1)
    while value is not None and len(search.probes) <= MAX_TRIALS:  # the first is the failed run
        probe = tried(value)
        if probe is None:
            break
        search.add(probe)
        value = search.next()
    largest = search.result().value
    if not largest:
        smallest = min(probe.value for probe in search.probes)
        if len(search.probes) > 1:
            yield f"not even batch size {smallest} fits in {format_size(capacity)}"
        return
    # Gradient accumulation needs equal sizes that add up to the declared batch.
    even = max(size for size in range(1, largest + 1) if declared % size == 0)
    peaks = (probe.peak for probe in search.probes if probe.fits and probe.value == even)
    peak = next(peaks, None)
    if peak is None:
        probe = tried(even)
        if probe is None or not probe.fits or probe.peak is None:
            return
        peak = probe.peak
    ended = value is None  # otherwise larger sizes were not tried
    phrase = (
        "the largest batch size that fits is {}"
        if ended
        else "{} also fits; larger sizes were not tried"
    )
    limit = "" if largest == even else f"; {phrase.format(largest)}"
    yield (
        f"batch size {even} fits, with {format_size(peak.reserved)} of "
        f"{format_size(capacity)} reserved: {declared // even} accumulation steps make "
        f"{declared}{limit}"
    )
    if batch_norm:
        yield (
            f"batch norm then computes its statistics from {even} samples, not from "
            f"{declared}: the training is not the same"
        )
