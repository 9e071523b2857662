"""Implement :mod:`testrun.explainer`: where a test's peaks come from, and what would help."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_gpumem.explain.advice import advice
from pytest_gpumem.explain.attributor import MAX_SITES, breakdown_of, origin_of
from pytest_gpumem.explain.categories import Blocks, snapshot_with_categories
from pytest_gpumem.explain.edits import EditFinder, edited_since
from pytest_gpumem.explain.explanations import Explanations, explanations
from pytest_gpumem.explain.hints import fragmentation, wastes_much
from pytest_gpumem.explain.keeper_finder import KeeperFinder, PinWatch
from pytest_gpumem.explain.lead import explain_growth
from pytest_gpumem.explain.sites import sites
from pytest_gpumem.fit.scaling import uneven
from pytest_gpumem.judge.result import too_much
from pytest_gpumem.meter.allocator import expandable_segments
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.explainer import Explainer
from pytest_gpumem.testrun.rerun import may_run_again
from pytest_gpumem.testrun.second_runs import EXPANDABLE, LINES, PINNED, SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.explain.explanations import ExplainPolicy
    from pytest_gpumem.explain.source_changes import Edits
    from pytest_gpumem.fit.scaling import Scaling
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import ExplainGrowth
    from pytest_gpumem.measurement import Breakdown, Peak, Site
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Recorded, Recording
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.judging import EndedTest, Judging
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run


class PeakExplainer(Explainer):
    """Explains the peaks of a session's tests."""

    explain: ExplainGrowth = staticmethod(explain_growth)

    def __init__(self, runner: Runner, judging: Judging, policy: ExplainPolicy) -> None:
        super().__init__(judging)
        self._runner = runner
        self.enabled = policy.enabled
        self._policy = policy
        self._keepers = KeeperFinder(runner)
        self._edits = EditFinder(runner.root)

    def records(self, spec: MemorySpec, *, predicted: bool) -> bool:
        """See :meth:`ExplainPolicy.records`."""
        return self._policy.records(spec, predicted=predicted)

    def explains(self, spec: MemorySpec) -> bool:
        """See :meth:`ExplainPolicy.explains`."""
        return self._policy.explains(spec)

    def of_children(self, root: Path) -> str:
        """Return "module:class:folder" of what explains a child process; "" if disabled."""
        return f"pytest_gpumem.explain.attributor:RecordedChild:{root}" if self.enabled else ""

    def _explanations(self, recorded: Recorded) -> Explanations:
        """Explain the peaks of a recorded run, unless an option disables explanations."""
        if not self.enabled:
            return Explanations(recorded.recording)  # for its snapshot
        return explanations(recorded, self._runner.root, timelines=self._policy.timelines)

    def breakdown(self, recorded: Recorded) -> Breakdown | None:
        """Return the breakdown of a run's peak on its first device; None if it is not known."""
        return breakdown_of(recorded, self._runner.root)

    def explained(
        self,
        test: EndedTest,
        results: list[Result],
        recorded: Recorded | None,
        second_run: Note | None = None,
        *,
        again: bool = True,
    ) -> tuple[list[Result], Recording | None]:
        """Return a test's results with explained peaks, and the recording used; None without one.

        The test runs again at most once: to find where its peak comes from, if it was not recorded,
        or else to find the keepers of its blocks, or the lines that pin host memory.
        """
        run = test.run
        nothing = found = Explanations(recorded.recording if recorded else None)
        is_recorded = recorded is not None or run.meter.recording.is_running
        if recorded is not None and self.explains(run.spec):
            found = self._explanations(recorded)
        if not found.are_settled and self._policy.explains_now(results, recorded=is_recorded):
            if is_recorded:
                found = self._explanations(recorded or run.recorded(test.measured))
            elif again:
                with self._runner.again(test.item, LINES, record=True) as attempt:
                    second_run = attempt.note
                    if attempt.passed:
                        found = self._explanations(run.recorded(test.measured))
                    else:
                        found = Explanations(run.meter.recording.stop())
        if second_run is not None:
            found = replace(found, second_run=second_run)
        if found is not nothing:
            results = self._judged(test, found)
        if any(result.verdict.kind.too_much for result in results):
            again &= found.second_run is None and may_run_again(run.spec)
            results, found = self._with_causes(test, results, found, again=again)
        return results, found.recording

    def snapshot(self, recording: Recording) -> Mapping[str, object]:
        """Return a recording's snapshot, with each block's category if explanations are enabled."""
        return snapshot_with_categories(recording) if self.enabled else recording.snapshot

    def _judged(
        self,
        test: EndedTest,
        found: Explanations,
        edits: Mapping[str, Edits] = MappingProxyType({}),
    ) -> list[Result]:
        """Return the results of a test and its parts, judged again with the findings.

        ``edits`` maps parts to the edits that may have caused their growth.
        """
        measured = {
            part: (spec, found.attached(part, measurement))
            for part, (spec, measurement) in test.measured.items()
        }
        explain_parts: dict[str, ExplainGrowth] = {
            part: partial(explain_growth, edits=each) for part, each in edits.items()
        }
        return self._judging.results(test._replace(measured=measured), explain_parts)

    def _with_causes(
        self, test: EndedTest, results: list[Result], found: Explanations, *, again: bool
    ) -> tuple[list[Result], Explanations]:
        """Return the results of a test that needs too much, and the findings with more causes.

        These are keepers, lines that pin host memory, and edits since the baseline.
        """
        more = self._keepers.with_keepers(test.item, results, found) if again else found
        if more is not found:
            found, results = more, self._judged(test, more)
        pinned = [result.part for result in results if result.is_pinned_too_much]
        if pinned and again and found.second_run is None:
            watch = PinWatch()
            with watch.watching(), self._runner.again(test.item, PINNED, record=False) as attempt:
                lines = watch.lines(self._runner.root) if attempt.passed else ()
            notes = [attempt.note] if attempt.note else []
            measured = {**test.measured}
            for part in pinned:
                spec, kept = measured[part]
                kept = replace(kept, pinned_lines=lines, notes=(*kept.notes, *notes))
                measured[part] = spec, kept
            test = test._replace(measured=measured)
            results = self._judged(test, found)
        edits = {}
        for result in results:
            analyzed_peaks = found.analyzed_peaks.get(result.part, ())
            since = self._edits.edits(result, analyzed_peaks, self._judging.baseline_file(result))
            if since.number:
                edits[result.part] = since
        if edits:
            results = self._judged(test, found, edits)
            results = [_with_edits(result, edits.get(result.part)) for result in results]
        return results, found

    def advice(
        self, item: MarkedItem, needed: Peak | None, error: BaseException, *, batch_norm: bool
    ) -> list[Note]:
        """Return advice on a test that ran out of memory; see :mod:`explain.advice`."""
        return advice(self._runner, item, needed, error, batch_norm=batch_norm)

    def off_the_line(
        self, item: MarkedItem, run: Run, scaling: Scaling, device: int
    ) -> tuple[Note, ...]:
        """Run a test with each batch size, and note the source lines that do not grow linearly."""
        sizes = [size for size, _ in scaling.points]
        breakdowns = {}
        for size in sizes:
            inputs = run.inputs._replace(batch_size=size)
            with self._runner.trial(item, SIZES, inputs, record=True) as trial:
                if trial.passed:
                    explained = explanations(run.recorded([""]), self._runner.root, timelines=False)
                    for attribution in explained.attributions.get("", ())[device : device + 1]:
                        breakdowns[size] = attribution.breakdown
        lines = uneven(breakdowns)
        off = f"{format_size(scaling.residual)} off the line through batch sizes"
        listed = ", ".join(map(str, sizes))
        sentence = f"{off} {listed}{': ' if lines else ''}{'; '.join(lines)}"
        return (Note(NoteKind.SLOPE, sentence),)

    def lines(
        self,
        recording: Recording | None,
        device: int,
        choose: Callable[[Sequence[Block]], Mapping[Block, int]],
    ) -> tuple[Site, ...]:
        """Return the source lines of a device's chosen blocks; () where they are not known."""
        if recording is None or recording.overflowed or not self.enabled:
            return ()
        on_device = Blocks(recording, device)
        # Blocks from before the recording have no line.
        origins = [
            replace(origin_of(on_device, block), nbytes=nbytes)
            for block, nbytes in choose(on_device.blocks).items()
            if block.start >= 0
        ]
        return sites(origins, self._runner.root)[:MAX_SITES]

    def hinted(self, test: EndedTest, results: list[Result], *, uncapped: bool) -> list[Result]:
        """Return a test's results with hints on fragmentation.

        On the virtual GPU a test with fragmented memory runs again with expandable segments.
        """
        run = test.run
        if self._policy.attribution != "on" and not (self.enabled and too_much(results)):
            return results
        if not VIEW.backend.lists_blocks:  # free blocks of earlier tests are not known
            return results
        peaks = {
            result.part: peak
            for result in results
            if (peak := _needed_peak(result)) and wastes_much(peak)
        }
        if not peaks:
            return results
        expandable: dict[str, Peak | None] = {}
        if run.info.is_predicted:  # on a real GPU a run may take long
            with expandable_segments() as switched:
                if switched:
                    with self._runner.again(
                        test.item, EXPANDABLE, record=False, uncapped=uncapped
                    ) as attempt:
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


def _with_edits(result: Result, edits: Edits | None) -> Result:
    """Return a result with the edits that may be its cause, and the ``gpumem blame`` command."""
    lead, command = result.verdict.lead, result.verdict.command
    leads = lead is not None and lead.kind == "edit"
    if edits is None or (leads and edits.number == 1):
        return result
    if not leads:
        notes = (Note(NoteKind.EDITED, edited_since(edits)), *result.verdict.notes)
        result = replace(result, verdict=replace(result.verdict, notes=notes))
    if command is None or command.launcher != ("pytest",):
        return result
    words = ["gpumem", "blame", edits.commit[:12], *command.targets]
    words += ["--", *command.options] if command.options else []
    return replace(result, verdict=replace(result.verdict, blame=shlex.join(words)))


def _needed_peak(result: Result) -> Peak | None:
    """Return the peak of the device that reserved most; after out of memory, the peak needed.

    None if that peak is not known, or if code before the part had already reserved this memory.
    """
    measurement = result.measurement
    if measurement is None:
        return None
    if measurement.out_of_memory is not None:
        return measurement.out_of_memory.needed
    peak = _fullest(measurement.peaks)
    inherited = peak is not None and measurement.reserved_before(measurement.peaks.index(peak))
    return None if inherited else peak


def _fullest(peaks: Sequence[Peak]) -> Peak | None:
    return max(peaks, key=lambda peak: peak.reserved, default=None)
