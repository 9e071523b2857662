"""The origin of a test's peaks; snapshots of its memory, and hints from running it again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.allocator_view import MAX_EVENTS
from pytest_gpumem.attribution.attributor import Attributor, Subject
from pytest_gpumem.attribution.hints import fragmentation, is_fragmented
from pytest_gpumem.attribution.snapshots import write_snapshot
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.meter.allocator import expandable_segments
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.sizes import format_size
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from pytest_gpumem.attribution.attributor import Explained
    from pytest_gpumem.attribution.hints import Scene
    from pytest_gpumem.attribution.recording import Recording
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Attribution, BaselineEntry, Keeper, Measurement, Peak
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run


def _would_be_written(entry: BaselineEntry | None, measurement: Measurement) -> bool:
    """Whether an update would write an entry anew: for its figures, or for its first breakdown."""
    if entry is None or not entry.breakdowns:
        return True
    old = (entry.peaks, entry.slope, entry.largest)
    return old != (measurement.peaks, measurement.slope, measurement.largest)


def ran_again(purpose: str) -> Note:
    """Return the note on a second run of a test, for a purpose."""
    sentence = f"the test failed, and ran a second time to find {purpose}"
    return Note(NoteKind.RUN, sentence)


def too_much(results: Iterable[Result]) -> bool:
    """Whether any of them failed because it takes too much memory of its device."""
    return any(
        result.verdict.failed and result.verdict.kind.too_much and not result.is_host_too_much
        for result in results
    )


@dataclass(frozen=True)
class ExplainPolicy:
    """The session's options that bear on explaining a test."""

    attribution: Literal["auto", "on", "off"]
    snapshots: Path | None
    """the folder for snapshots; None: none are written"""
    snapshot_always: bool
    """whether a test that passes gets a snapshot as well"""
    timelines: bool
    """whether a report shows them"""
    updating: bool
    """whether baselines are written, which keep breakdowns"""
    reporting: bool = False
    """whether a report is written from which a new baseline may be accepted"""


class Explainer:
    """Says of tests where their peaks come from, running them again where that is needed."""

    def __init__(self, runner: Runner, policy: ExplainPolicy) -> None:
        self._runner = runner
        self.policy = policy

    @property
    def enabled(self) -> bool:
        """Whether peaks are explained at all."""
        return self.policy.attribution != "off"

    def records_first_run(self, spec: MemorySpec, *, virtual: bool) -> bool:
        """Whether a test is recorded from the start, so that its own run tells why it failed.

        On the virtual GPU a recording is cheap (benchmarks/speed/attribution.py), and the range of
        its workspaces comes of it. What it takes on a real GPU has not been measured: a test that
        failed there runs once more for it. With a JSON report it is recorded there too: what passes
        may be a new baseline, and the report has what an update would have written.
        """
        reported = self.policy.reporting and self.policy.attribution == "auto"
        return virtual or reported or self.explains(spec)

    def explains(self, spec: MemorySpec) -> bool:
        """Whether a test's peaks are explained whatever its verdict is."""
        policy = self.policy
        # A rank, a steady test and one that may leak are not run again to be recorded.
        if self.enabled and (current_rank() or spec.steady or spec.max_leak_mib is not None):
            return True
        if policy.snapshots is not None and policy.snapshot_always:
            return True
        return policy.attribution == "on" or (
            policy.attribution == "auto" and (policy.updating or policy.timelines)
        )

    def records_out_of_memory(self) -> bool:
        """Whether a test that ran out of memory is recorded when it runs again without limits."""
        return self.enabled or self.policy.snapshots is not None

    def explains_failure(self, results: Iterable[Result]) -> bool:
        """Whether it is told where the peaks of a test come from that was not explained."""
        enabled = self.policy.attribution == "auto" or self.policy.snapshots is not None
        return enabled and too_much(results)

    def explains_change(self, results: Iterable[Result], *, recorded: bool) -> bool:
        """Whether it is told where peaks come from that a later ``gpumem accept`` may write.

        So are those of failures by their figures, and, where the run is recorded anyhow, any that
        an update would write. A test that passes does not run again for it.
        """
        if not self.policy.reporting or self.policy.attribution != "auto":
            return False
        return any(
            result.baseline
            and result.measurement is not None
            and (
                (result.verdict.kind.by_baseline and (recorded or result.verdict.failed))
                or (recorded and _would_be_written(result.baseline_entry, result.measurement))
            )
            for result in results
        )

    def explain(self, run: Run, parts: Iterable[str], *, later: bool = False) -> Explanations:
        """End a run's recording, and say where its peaks come from.

        Args:
            run: the run.
            parts: names; "" is the whole test.
            later: :meth:`Explanations.complete` says it, if it is called.
        """
        if self.enabled:
            explanations = record(run, parts, self._runner.root, timelines=self.policy.timelines)
            if not later:
                explanations.complete()
            return explanations
        explanations = Explanations()
        explanations.recording = run.meter.recording()  # for its snapshot
        return explanations

    def explain_failure(self, item: MarkedItem, run: Run, parts: Iterable[str]) -> Explanations:
        """Say where the peaks of a failed test come from: by its recording, or by a second run."""
        if run.meter.records:
            return self.explain(run, parts)
        with self._runner.again(item, record=True) as attempt:
            if attempt.passed:
                explanations = self.explain(run, parts)
                explanations.note = ran_again("where its peak comes from")
                return explanations
            explanations = Explanations()
            explanations.recording = run.meter.recording()
            return explanations

    def follow_up(
        self,
        item: MarkedItem,
        run: Run,
        results: Sequence[Result],
        recording: Recording | None,
        *,
        uncapped: bool,
    ) -> list[Result]:
        """Write a test's snapshot; add hints at fragmented memory, tried with expandable segments.

        Args:
            item: the test.
            run: its run.
            results: of the test and its parts.
            recording: for the snapshot.
            uncapped: whether its figures are those of a run without limits.
        """
        results = self._with_snapshot(results, recording)
        policy = self.policy
        hinted = policy.attribution == "on" or (self.enabled and too_much(results))
        peaks = {result.part: peak for result in results if (peak := _needed_peak(result))}
        peaks = {part: peak for part, peak in peaks.items() if is_fragmented(peak)}
        if not hinted or not peaks:
            return list(results)
        expandable: dict[str, Peak | None] = {}
        if not run.device.values.all_computed:  # a run on a real GPU may take long
            with expandable_segments() as switched:
                if switched:
                    with self._runner.again(item, record=False, uncapped=uncapped) as attempt:
                        if attempt.passed and not attempt.left:
                            expandable = {part: _fullest(run.peaks_of(part)) for part in peaks}
        explained = []
        for result in results:
            measurement, peak = result.measurement, peaks.get(result.part)
            hint = fragmentation(peak, expandable.get(result.part)) if peak else ""
            if measurement is not None and hint:
                note = Note(NoteKind.FRAGMENTATION, hint)
                measurement = replace(measurement, hints=(*measurement.hints, note))
            explained.append(replace(result, measurement=measurement))
        return explained

    def _with_snapshot(
        self, results: Sequence[Result], recording: Recording | None
    ) -> Sequence[Result]:
        folder = self.policy.snapshots
        is_kept = self.policy.snapshot_always or too_much(results)
        if folder is None or recording is None or not is_kept:
            return results
        try:
            path = write_snapshot(recording, folder, results[0].nodeid)
        except GpuMemError as error:
            return [replace(result, snapshot_error=str(error)) for result in results]
        with suppress(ValueError):
            path = path.relative_to(self._runner.root)
        return [replace(result, snapshot=str(path)) for result in results]


def _needed_peak(result: Result) -> Peak | None:
    """Return the peak of the device that reserved most; after out of memory the peak it needs.

    None where it is not known, or where code before a part had reserved it: a hint says so.
    """
    hints = result.measurement.hints if result.measurement else ()
    if result.measurement is None or any(hint.kind is NoteKind.STILL_HELD for hint in hints):
        return None
    if result.measurement.out_of_memory is not None:
        return result.measurement.out_of_memory.needed
    return _fullest(result.measurement.peaks)


def _fullest(peaks: Sequence[Peak]) -> Peak | None:
    return max(peaks, key=lambda peak: peak.reserved, default=None)


class Explanations:
    """Attributions of the peaks of a test and of its parts, one a device."""

    def __init__(self) -> None:
        self._attributions: dict[str, tuple[Attribution, ...]] = {}
        self._peaks: dict[str, tuple[Peak, ...]] = {}
        self.obstacle = ""
        """the reason why there are none"""
        self.note: Note | None = None
        """on the run that they are of, where that is not the test's first one"""
        self.recording: Recording | None = None
        self.scenes: dict[str, tuple[Scene, ...]] = {}
        """of each part's peaks, one a device"""
        self.pending: Callable[[], None] | None = None
        """adds the attributions of all parts, where that is still to be done"""

    def complete(self) -> None:
        """Tell where the peaks come from, unless that is told already."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    @property
    def of_second_run(self) -> bool:
        """Whether they are of a run after the first."""
        return self.note is not None

    def add(
        self, part: str, explained: Sequence[Explained | None], peaks: tuple[Peak, ...]
    ) -> None:
        """Add the attributions of a part; with one of its devices missing they are of no use."""
        complete = [peak for peak in explained if peak is not None]
        if complete and len(complete) == len(explained):
            self._attributions[part] = tuple(peak.attribution for peak in complete)
            self.scenes[part] = tuple(peak.scene for peak in complete)
            self._peaks[part] = peaks
        elif not self.obstacle:
            self.obstacle = "this recording does not show where the peak comes from"

    def add_keepers(
        self, part: str, device: int, keepers: tuple[Keeper, ...], *notes: Note
    ) -> None:
        """Add the keepers of blocks at the peak of one of a part's devices, and notes on them."""
        attributions = list(self._attributions.get(part, ()))
        if len(attributions) <= device:
            return
        told = attributions[device]
        attributions[device] = replace(told, keepers=keepers, notes=(*told.notes, *notes))
        self._attributions[part] = tuple(attributions)

    def attached(self, part: str, measurement: Measurement) -> Measurement:
        """Return the measurement of a part with its attributions, or with a note of the reason."""
        attributions = self._attributions.get(part)
        if attributions is None:
            obstacle = [Note(NoteKind.BREAKDOWN, self.obstacle)] * bool(self.obstacle)
            own = [self.note] if self.note else []
            return replace(measurement, notes=(*measurement.notes, *obstacle, *own))
        oom = measurement.out_of_memory
        if oom is None and self._peaks[part] != measurement.peaks:
            peak = format_size(max(peak.allocated for peak in self._peaks[part]))
            sentence = f"the breakdown is from a second run, whose peak was {peak} allocated"
            notes = (*measurement.notes, Note(NoteKind.BREAKDOWN, sentence))
            measurement = replace(measurement, notes=notes)
        if self.note:
            first, *further = attributions
            attributions = (replace(first, notes=(*first.notes, self.note)), *further)
        return replace(measurement, attributions=attributions)


def record(run: Run, parts: Iterable[str], root: Path, *, timelines: bool) -> Explanations:
    """End a run's recording; return explanations that tell by it where its peaks come from.

    Args:
        run: with a recording or without.
        parts: names; "" is the whole test.
        root: the project's folder, for the names of files.
        timelines: whether a report shows them.
    """
    explanations = Explanations()
    if not run.meter.records:
        return explanations
    windows = {part: run.windows(part) for part in parts}
    peaks = {part: run.peaks_of(part) for part in windows}
    foreign = run.meter.kept_foreign
    recording = run.meter.recording()
    if recording is None:
        return explanations
    explanations.recording = recording
    if recording.overflowed:
        explanations.obstacle = (
            "it is unknown where the peak comes from: the allocator's history keeps "
            f"{MAX_EVENTS} events, and this test had more"
        )
        return explanations

    def attribute() -> None:
        attributor = Attributor(recording, root)
        for part, spans in windows.items():
            explained = [
                attributor.explained(Subject(index, peak, held, spans), timeline=timelines)
                for index, peak, held in zip(run.meter.devices, peaks[part], foreign, strict=True)
            ]
            explanations.add(part, explained, peaks[part])

    explanations.pending = attribute
    return explanations


def explain(run: Run, parts: Iterable[str], root: Path, *, timelines: bool) -> Explanations:
    """End a run's recording, and say where its peaks come from; see :func:`record`."""
    explanations = record(run, parts, root, timelines=timelines)
    explanations.complete()
    return explanations
