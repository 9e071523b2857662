"""What is added to results once they are judged: snapshots, and hints of another run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.attribution.attributor import Attributor, Subject
from pytest_gpumem.attribution.hints import fragmentation, is_fragmented
from pytest_gpumem.attribution.recording import MOST_EVENTS
from pytest_gpumem.attribution.snapshots import write_snapshot
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.allocator import expandable_segments
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_gpumem.attribution.recording import Recording
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Attribution, Measurement, Peak
    from pytest_gpumem.testrun.run import Run

    Again = Callable[[], AbstractContextManager[Run | None]]

_TOO_MUCH = (Kind.REGRESSED, Kind.OVER_BUDGET, Kind.OUT_OF_MEMORY)


def too_much(results: Iterable[Result]) -> bool:
    """Whether any of them failed because it takes too much memory."""
    return any(it.verdict.failed and it.verdict.kind in _TOO_MUCH for it in results)


def with_snapshot(
    results: Sequence[Result],
    recording: Recording | None,
    folder: Path | None,
    root: Path,
    *,
    always: bool,
) -> list[Result]:
    """Write a test's snapshot where it is wanted; return the results, which say where it is."""
    wanted = always or too_much(results)
    if folder is None or recording is None or not wanted:
        return list(results)
    try:
        path = write_snapshot(recording, folder, results[0].nodeid)
    except GpuMemError as error:
        return [replace(it, snapshot_error=str(error)) for it in results]
    with suppress(ValueError):
        path = path.relative_to(root)
    return [replace(it, snapshot=str(path)) for it in results]


def with_fragmentation(
    results: Sequence[Result], attribution: str, again: Again | None
) -> list[Result]:
    """Add to results of fragmented memory what expandable segments would give them.

    Args:
        results: of one test.
        attribution: the option's value.
        again: runs the test once more; None: that is too much to ask of this device.
    """
    if attribution == "off" or not (attribution == "on" or too_much(results)):
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


class Explanations:
    """Where the peaks of a test and of its parts come from, one attribution a device."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Attribution, ...]] = {}
        self._peaks: dict[str, tuple[Peak, ...]] = {}
        self._why_not = ""
        self.recording: Recording | None = None

    def add(self, part: str, found: Sequence[Attribution | None], peaks: tuple[Peak, ...]) -> None:
        """Take what was found for a part; with any of its devices missing it is of no use."""
        known = tuple(it for it in found if it is not None)
        if known and len(known) == len(found):
            self._found[part], self._peaks[part] = known, peaks
        elif not self._why_not:
            self._why_not = "where the peak comes from cannot be told of this recording"

    def useless(self, reason: str) -> None:
        """Note that a recording says nothing, and why."""
        self._why_not = reason

    def attached(self, part: str, measurement: Measurement) -> Measurement:
        """Return the measurement of a part with what explains it."""
        found = self._found.get(part)
        if found is None:
            if not self._why_not:
                return measurement
            return replace(measurement, notes=(*measurement.notes, self._why_not))
        oom = measurement.out_of_memory
        if oom is None and self._peaks[part] != measurement.peaks:
            again = format_size(max(peak.allocated for peak in self._peaks[part]))
            note = f"the breakdown is that of a second run, which peaked at {again} allocated"
            measurement = replace(measurement, notes=(*measurement.notes, note))
        return replace(measurement, attributions=found)


def explain(run: Run, parts: Iterable[str], root: Path, *, timelines: bool) -> Explanations:
    """End a run's recording, and say where its peaks come from.

    Args:
        run: with a recording or without.
        parts: names; "" is the whole test.
        root: the project's folder, for the names of files.
        timelines: whether they are wanted.
    """
    explanations = Explanations()
    if not run.meter.records:
        return explanations
    windows = {part: run.windows(part) for part in parts}
    peaks = {part: run.peaks_of(part) for part in windows}
    recording = run.meter.recording()
    if recording is None:
        return explanations
    explanations.recording = recording
    if recording.overflowed:
        explanations.useless(
            f"where the peak comes from is unknown: the allocator's history keeps {MOST_EVENTS} "
            "events and this test had more"
        )
        return explanations
    attributor = Attributor(recording, root)
    for part, spans in windows.items():
        found = [
            attributor.attribution(Subject(index, peak, other, spans), timeline=timelines)
            for index, peak, other in zip(
                run.meter.devices, peaks[part], run.meter.foreign, strict=True
            )
        ]
        explanations.add(part, found, peaks[part])
    return explanations
