"""Decide which tests are explained, and store the explanations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.explain.attributor import Attributor, lines_before
from pytest_gpumem.judge.result import too_much
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.shared_history import MAX_EVENTS
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.rerun import may_run_again

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.explain.hints import AnalyzedPeak
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Attribution, Measurement, Peak
    from pytest_gpumem.recording.recording import Recorded, Recording
    from pytest_gpumem.spec import MemorySpec


@dataclass(frozen=True)
class ExplainPolicy:
    """The session's options for explaining tests."""

    attribution: Literal["auto", "on", "off"]
    snapshots: Path | None
    """the folder for snapshots; None if none are written"""
    timelines: bool
    """whether a report shows timelines"""
    updating: bool
    """whether baselines, which contain breakdowns, are written"""
    reporting: bool = False
    """whether a report is written that can be accepted as a new baseline"""

    @property
    def enabled(self) -> bool:
        """Whether peaks are explained at all."""
        return self.attribution != "off"

    def records(self, spec: MemorySpec, *, predicted: bool) -> bool:
        """Return whether a test is recorded in its first run, to show why that run failed.

        On the virtual GPU (``predicted``) a recording is cheap (benchmarks/speed/attribution.py),
        and the range of the peaks is computed from it. On a real GPU the cost of a recording has
        not been measured, so a failed test runs once more to be recorded. With a JSON report every
        test is recorded: figures that pass may become a new baseline, and the report has all that
        an update would have written.
        """
        reported = self.reporting and self.attribution == "auto"
        return predicted or reported or self.explains(spec)

    def explains(self, spec: MemorySpec) -> bool:
        """Return whether a test's peaks are explained whatever its verdict is."""
        return (
            (self.enabled and not may_run_again(spec))
            or self.attribution == "on"
            or (self.attribution == "auto" and (self.updating or self.timelines))
        )

    def explains_now(self, results: Iterable[Result], *, recorded: bool) -> bool:
        """Return whether a test's peaks are explained, once the test is judged.

        Peaks that are too high are explained, and peaks that ``gpumem accept`` may write later:
        those of tests that failed because of their figures, and, if the run is recorded anyway, all
        that an update would write. A test that passes is not run again for this.
        """
        if (self.attribution == "auto" or self.snapshots is not None) and too_much(results):
            return True
        if not self.reporting or self.attribution != "auto":
            return False
        for result in results:
            measurement, entry = result.measurement, result.baseline_entry
            if not result.baseline or measurement is None:
                continue
            if result.verdict.kind.by_baseline and (recorded or result.verdict.failed):
                return True
            if recorded and (
                entry is None
                or not entry.breakdowns
                or (entry.peaks, entry.slope, entry.largest, entry.cache_tokens)
                != (
                    *(measurement.peaks, measurement.slope, measurement.largest),
                    measurement.cache_tokens,
                )
            ):
                return True
        return False


@dataclass(frozen=True)
class Explanations:
    """The attributions of the peaks of a test and its parts, by part; "" is the whole test."""

    recording: Recording | None = None
    attributions: dict[str, tuple[Attribution, ...]] = field(default_factory=dict)
    """one per device"""
    analyzed_peaks: dict[str, tuple[AnalyzedPeak, ...]] = field(default_factory=dict)
    """one per device, of the same peaks"""
    peaks: Mapping[str, Sequence[Peak]] = field(default_factory=dict)
    """the peaks of the run that was explained"""
    obstacle: str = ""
    """why a part has no attributions; "" if all parts have them, or if nothing was explained"""
    second_run: Note | None = None
    """note on what a run after the first one found; None if there is none"""

    @property
    def are_settled(self) -> bool:
        """Whether the peaks are explained, or known to have no explanation."""
        return bool(self.attributions or self.obstacle)

    def attached(self, part: str, measurement: Measurement) -> Measurement:
        """Return a part's measurement with its attributions, or with a note on why it has none."""
        attributions = self.attributions.get(part, ())
        second_run = [self.second_run] if self.second_run else []
        if not attributions:
            obstacle = [Note(NoteKind.BREAKDOWN, self.obstacle)] * bool(self.obstacle)
            return replace(measurement, notes=(*measurement.notes, *obstacle, *second_run))
        if measurement.out_of_memory is None and self.peaks[part] != measurement.peaks:
            peak = format_size(max(peak.allocated for peak in self.peaks[part]))
            sentence = f"the breakdown is from a second run, whose peak was {peak} allocated"
            notes = (*measurement.notes, Note(NoteKind.BREAKDOWN, sentence))
            measurement = replace(measurement, notes=notes)
        first, *further = attributions
        first = replace(first, notes=(*first.notes, *second_run))
        return replace(measurement, attributions=(first, *further))


def explanations(recorded: Recorded, root: Path, *, timelines: bool) -> Explanations:
    """Explain the peaks of a recorded run.

    With ``timelines``, each attribution has a timeline for the report.
    """
    recording, obstacle = recorded.recording, ""
    if recording is None or not recorded.windows:
        return Explanations(recording)
    if recording.overflowed:
        obstacle = (
            "it is unknown where the peak comes from: the allocator's history keeps "
            f"{MAX_EVENTS} events, and this test had more"
        )
        return Explanations(recording, obstacle=obstacle)
    attributor = Attributor(recording, root)
    attributions, analyzed_peaks = {}, {}
    for part, spans in recorded.windows.items():
        rows = zip(recorded.devices, recorded.peaks[part], recorded.foreign, strict=True)
        explained = [attributor.explained(*row, spans, timeline=timelines) for row in rows]
        complete = [peak for peak in explained if peak is not None]
        if part:
            complete = [
                (replace(attribution, earlier=lines_before(analyzed, spans, root)), analyzed)
                for attribution, analyzed in complete
            ]
        if complete and len(complete) == len(explained):
            attributions[part] = tuple(attribution for attribution, _ in complete)
            analyzed_peaks[part] = tuple(analyzed for _, analyzed in complete)
        else:
            obstacle = "this recording does not show where the peak comes from"
    return Explanations(recording, attributions, analyzed_peaks, recorded.peaks, obstacle)
