"""What is added to results once they are judged: snapshots, and hints of another run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.hints import fragmentation, is_fragmented
from pytest_gpumem.settling import expandable_segments
from pytest_gpumem.snapshots import write_snapshot
from pytest_gpumem.verdict import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_gpumem.options import Settings
    from pytest_gpumem.recording import Recording
    from pytest_gpumem.records import Peak
    from pytest_gpumem.report.model import Result
    from pytest_gpumem.running import Run

    Again = Callable[[], AbstractContextManager[Run | None]]

_TOO_MUCH = (Kind.REGRESSED, Kind.OVER_BUDGET, Kind.OUT_OF_MEMORY)


def too_much(results: Iterable[Result]) -> bool:
    """Whether any of them failed because it takes too much memory."""
    return any(it.verdict.failed and it.verdict.kind in _TOO_MUCH for it in results)


def with_snapshot(
    results: Sequence[Result], recording: Recording | None, settings: Settings, root: Path
) -> list[Result]:
    """Write a test's snapshot where it is wanted; return the results, which say where it is."""
    wanted = settings.snapshot_when == "always" or too_much(results)
    if settings.snapshots is None or recording is None or not wanted:
        return list(results)
    try:
        path = write_snapshot(recording, settings.snapshots, results[0].nodeid)
    except GpuMemError as error:
        return [replace(it, snapshot_error=str(error)) for it in results]
    with suppress(ValueError):
        path = path.relative_to(root)
    return [replace(it, snapshot=str(path)) for it in results]


def with_fragmentation(
    results: Sequence[Result], settings: Settings, again: Again | None
) -> list[Result]:
    """Add to results of fragmented memory what expandable segments would give them.

    Args:
        results: of one test.
        settings: the session's.
        again: runs the test once more; None: that is too much to ask of this device.
    """
    if settings.attribution == "off" or not (settings.attribution == "on" or too_much(results)):
        return list(results)
    peaks = {it.part: peak for it in results if (peak := _peak(it)) and is_fragmented(peak)}
    if not peaks:
        return list(results)
    expandable = _expandable_peaks(peaks, again) if again else {}
    found = []
    for result in results:
        measurement, peak = result.measurement, peaks.get(result.part)
        text = fragmentation(peak, expandable.get(result.part)) if peak else ""
        if measurement is not None and text:
            measurement = replace(measurement, hints=(*measurement.hints, text))
        found.append(replace(result, measurement=measurement))
    return found


def _peak(result: Result) -> Peak | None:
    """Return the peak of the device that reserved most; of what ran out of memory, what it needs.

    None where it is not known.
    """
    if result.measurement is None:
        return None
    if result.measurement.out_of_memory is not None:
        return result.measurement.out_of_memory.needed
    return _fullest(result.measurement.peaks)


def _fullest(peaks: Sequence[Peak]) -> Peak | None:
    return max(peaks, key=lambda it: it.reserved, default=None)


def _expandable_peaks(parts: Iterable[str], again: Again) -> dict[str, Peak | None]:
    """Return the peaks of a test's parts, run with expandable segments; none if it fails so."""
    with expandable_segments() as anew:
        if not anew:
            return {}
        with again() as run:
            return {part: _fullest(run.peaks_of(part)) for part in parts} if run else {}
