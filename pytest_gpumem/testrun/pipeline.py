"""The way of a marked test that has ended: measured, judged, explained, and judged by all of it.

Each method's docstring says when it runs the test's body again (docs/explanation/second-runs.md).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.benchmark_mode import TIMED
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.result import with_others
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.meter.allocator import expandable_segments
from pytest_gpumem.meter.out_of_memory import find_out_of_memory
from pytest_gpumem.nodeids import module_of
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.snapshots import write_snapshot
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.edits import EditFinder
from pytest_gpumem.testrun.explain import Explanations, Recorded, too_much
from pytest_gpumem.testrun.ranges.size_range import is_replayed, with_ranges
from pytest_gpumem.testrun.rerun import may_run_again, ran_again, shown_error
from pytest_gpumem.testrun.second_runs import batch_sizes, growth_search, leaks
from pytest_gpumem.testrun.second_runs.advice import advice
from pytest_gpumem.testrun.second_runs.keeper_search import KeeperFinder
from pytest_gpumem.testrun.second_runs.pinned_lines import PinWatch
from pytest_gpumem.testrun.unused_device import check_unused, is_unused, unrecorded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Edit
    from pytest_gpumem.measurement import Measurement, Peak
    from pytest_gpumem.recording.recording import Recording
    from pytest_gpumem.relations import Bound
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.explain import ExplainPolicy
    from pytest_gpumem.testrun.judging import Judging
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run

UNSUPPORTED_REMEDY = "run this test on a real GPU (--gpumem-device=cuda)"
TIMED_BEFORE: Final = Note(
    NoteKind.RUN, "the peaks are those of a second run, for which cuDNN had timed its plans"
)


Measured = tuple["MemorySpec", "Measurement"]
"""a declaration, and its measurement"""


class EndedTest(NamedTuple):
    """A marked test that has ended, as it is judged."""

    item: MarkedItem
    run: Run
    measured: dict[str, Measured]
    """of the parts that are judged, by name; "" is the whole test"""
    relations: Mapping[str, Sequence[Bound]] = MappingProxyType({})
    """limits that other parts tell, by part: of the first run, as the peaks"""


class Pipeline:
    """Brings marked tests that have ended to their results."""

    def __init__(self, runner: Runner, policy: ExplainPolicy, judging: Judging) -> None:
        self._runner = runner
        self._policy = policy
        self._judging = judging
        self._keepers = KeeperFinder(runner)
        self._edits = EditFinder(runner.root)
        self._leak_recording: Recording | None = None
        """of a test that passed and may have leaked"""

    def finish(
        self, item: MarkedItem, error: BaseException | None, *, debugging: bool
    ) -> list[Result]:
        """Return the results of a test and its parts; none where its memory is not in question.

        That is where it failed by an error other than running out of memory; and where an option
        has an unmarked test measured, and it took no memory.

        With ``debugging`` a debugger is to see the error's frames: the test is not run again.

        Raises:
            GpuMemError: the measurement means nothing.
        """
        run = self._runner.run
        assert run is not None  # noqa: S101 - for the type checker
        shortage = None if error is None else find_out_of_memory(error)
        if shortage is None and (error is not None or (not item.declared and is_unused(run))):
            return []
        run = self._runner.ended()
        trouble = run.device.trouble()
        if trouble is not None:  # memory may have been refused for the same reason
            raise GpuMemError("this measurement", trouble, UNSUPPORTED_REMEDY) from error
        if error is None or shortage is None:
            return self._passed(item, run)
        return self._out_of_memory(item, run, error, shortage, debugging=debugging)

    def finish_torn_down(self, item: MarkedItem, results: Sequence[Result]) -> list[Result]:
        """Judge the memory that a test left behind, once it has passed and is torn down.

        A test that leaked runs again.

        Returns:
            its results, with a leak in the whole test's; none where it did not leak.
        """
        run = self._runner.run
        recording, self._leak_recording = self._leak_recording, None
        whole = next((result for result in results if not result.part), None)
        if run is None or whole is None or any(result.verdict.failed for result in results):
            return []
        leaked = leaks.judged(
            self._runner, item, run, whole, recording, record=self._policy.enabled
        )
        if leaked is None:
            return []
        return [leaked if result is whole else result for result in results]

    def _explanations(self, recorded: Recorded) -> Explanations:
        """Return where the peaks of a recorded run come from, if an option allows that."""
        if not self._policy.enabled:
            return Explanations(recorded.recording)  # for its snapshot
        return recorded.explanations(self._runner.root, timelines=self._policy.timelines)

    def _judged(
        self,
        test: EndedTest,
        explanations: Explanations,
        edits: Mapping[str, tuple[Edit, ...]] = MappingProxyType({}),
    ) -> list[Result]:
        """Return the results of a test and its parts, by all that is known."""
        return [
            self._judging.result(
                test.item,
                test.run,
                part,
                spec,
                explanations.attached(part, measurement),
                relations=test.relations.get(part, ()),
                edits=edits.get(part, ()),
            )
            for part, (spec, measurement) in test.measured.items()
        ]

    # -- a test that passed --

    def _passed(self, item: MarkedItem, run: Run) -> list[Result]:
        """Return the results of a test that passed.

        A test with memory that grows from step to step runs again, and one with several batch sizes
        runs with each.
        """
        spec, policy, runner = run.spec, self._policy, self._runner
        module = module_of(item.nodeid)
        if module.startswith("../") and spec.baseline:
            path = self._judging.store.path(run.info.key, module)
            sentence = f"the test is outside pytest's root folder: its baseline is {path}"
            run.notes.append(Note(NoteKind.BASELINE, sentence))
        parts, searches = run.part_measurements(), run.search_measurements()
        relations = {part: run.bounds(part) for part in parts}
        unused = is_unused(run)
        if unused:
            check_unused(run, runner.root / module)
        whole = run.measurement()
        growth_search.require_steps(run)
        explains, recorded, explanations = policy.explains(spec), None, Explanations()
        runs_on = spec.batch_sizes is not None or is_replayed(run)  # its recording is wanted now
        if explains or (runs_on and run.meter.records):
            recorded = Recorded(run, ["", *parts])
            explanations = Explanations(recorded.recording)
            if explains:
                explanations = self._explanations(recorded)
        recording = explanations.recording
        self._leak_recording = recording if spec.max_leak_mib is not None else None
        of_growth = recording if policy.enabled else None
        whole = growth_search.with_growth(runner, item, run, whole, of_growth)
        if spec.batch_sizes is not None:
            whole = batch_sizes.with_slope(runner, item, run, whole, name_lines=policy.enabled)
        measured = with_ranges(run, {"": (spec, whole), **parts}, recording)
        below = run.child_measurements()
        measured |= below
        test = EndedTest(item, run, by_hook(item, measured), relations)
        results = self._judged(test, explanations)
        grew = any(result.verdict.kind is Kind.REGRESSED for result in results)
        if grew and TIMED in whole.notes and may_run_again(spec):
            test = self._with_timed_plans(test)
            results = self._judged(test, explanations)
        results, explanations = self._explained(test, results, recorded, explanations)
        results = with_others(results)
        of_searches = EndedTest(item, run, by_hook(item, searches))
        results += self._judged(of_searches, Explanations())
        if unused:  # the next run, on the device, would be held to nothing
            results = [result if result.part in below else unrecorded(result) for result in results]
        return self._followed_up(item, run, results, explanations.recording, uncapped=False)

    def _with_timed_plans(self, test: EndedTest) -> EndedTest:
        """Run a test again if plans that cuDNN timed may be the growth; return it with the peaks.

        A second run times none, in whichever order tests run.
        """
        with self._runner.again(test.item, record=False) as attempt:
            if not attempt.passed or attempt.left:
                return test
            measured = {
                part: (spec, replace(kept, peaks=test.run.peaks_of(part) or kept.peaks))
                for part, (spec, kept) in test.measured.items()
            }
        spec, whole = measured[""]
        measured[""] = spec, replace(whole, notes=(*whole.notes, TIMED_BEFORE))
        return test._replace(measured=measured)

    def _explained(
        self,
        test: EndedTest,
        results: list[Result],
        recorded: Recorded | None,
        explanations: Explanations,
    ) -> tuple[list[Result], Explanations]:
        """Explain the results of a test that its verdict fails, and judge it by the findings.

        The test runs again at most once: for where its peak comes from, if it was not recorded;
        else for the keepers of its peak's blocks, or for the lines that pin host memory.
        """
        item, run, measured = test.item, test.run, test.measured
        found, is_recorded = explanations, recorded is not None or run.meter.records
        if not found.told and self._policy.explains_now(results, recorded=is_recorded):
            if is_recorded:
                found = self._explanations(recorded or Recorded(run, measured))
            else:
                with self._runner.again(item, record=True) as attempt:
                    if attempt.passed:
                        note = ran_again("where its peak comes from")
                        told = self._explanations(Recorded(run, measured))
                        found = replace(told, second_run=note)
                    else:
                        found = Explanations(run.meter.recording())
        if not any(result.verdict.kind.too_much for result in results):
            return results if found is explanations else self._judged(test, found), found
        explained = [found.of(result) for result in results]
        if found.second_run is None and may_run_again(run.spec):
            found = self._keepers.with_keepers(item, explained, found)
            explained = [found.of(result) for result in results]
        pinned = [result.part for result in results if result.is_pinned_too_much]
        if pinned and found.second_run is None and may_run_again(run.spec):
            watch = PinWatch()
            with watch.watching(), self._runner.again(item, record=False) as attempt:
                lines = watch.lines(self._runner.root) if attempt.passed else ()
            notes = [ran_again("which lines pin memory")] * attempt.ran
            measured = {
                part: (
                    spec,
                    replace(kept, pinned_lines=lines, notes=(*kept.notes, *notes))
                    if part in pinned
                    else kept,
                )
                for part, (spec, kept) in measured.items()
            }
        edits = {
            result.part: edits
            for result in explained
            if (
                edits := self._edits.edits(
                    result,
                    found.scenes.get(result.part, ()),
                    self._judging.baseline_file(result),
                )
            )
        }
        if found is not explanations or pinned or edits:
            results = self._judged(test._replace(measured=measured), found, edits)
        return results, found

    # -- a test that ran out of memory --

    def _out_of_memory(
        self,
        item: MarkedItem,
        run: Run,
        error: BaseException,
        shortage: BaseException,
        *,
        debugging: bool,
    ) -> list[Result]:
        """Return the result of a test that ran out of memory, or of its part that did.

        The test runs again without limits, unless a debugger is to see it.
        """
        record = run.out_of_memory(shortage)
        if error is not shortage:
            sentence = f"the test turned the out-of-memory error into {shown_error(error)}"
            run.notes.append(Note(NoteKind.RUN, sentence))
        part, spec, measurement = run.short_measurement(shortage, record)
        explanations = Explanations()
        if run.meter.records:
            explanations = self._explanations(Recorded(run, [part]))
        if not debugging:
            measurement, explanations = self._run_without_limits(
                item, run, part, measurement, error, explanations
            )
        test = EndedTest(item, run, by_hook(item, {part: (spec, measurement)}))
        results = self._judged(test, explanations)
        return self._followed_up(item, run, results, explanations.recording, uncapped=True)

    def _run_without_limits(  # noqa: PLR0913, PLR0917 - a test, and all that is known of its failure
        self,
        item: MarkedItem,
        run: Run,
        part: str,
        measurement: Measurement,
        error: BaseException,
        explanations: Explanations,
    ) -> tuple[Measurement, Explanations]:
        """Run a test again without limits: for its need, and the origin of that.

        Smaller batch sizes and variants that are tried for the advice run it further.

        Returns:
            the measurement with the findings, and its explanations.
        """
        policy, recording, needed = self._policy, explanations.recording, None
        records = policy.enabled or policy.snapshots is not None
        with self._runner.again(item, error, record=records, uncapped=True) as attempt:
            peaks = run.peaks_of(part) if attempt.passed and not attempt.left else ()
            if peaks:
                explanations = self._explanations(Recorded(run, [part]))
                recording = explanations.recording
            else:
                recording = recording or run.meter.recording()
        if attempt.ran:
            explanations = replace(explanations, second_run=ran_again("what it needs"))
        if peaks and measurement.out_of_memory is not None:
            needed = max(peaks, key=lambda peak: peak.reserved)
            record = replace(
                measurement.out_of_memory, needed=needed, device_index=peaks.index(needed)
            )
            measurement = replace(measurement, out_of_memory=record)
        elif attempt.left:
            sentence = (
                f"{format_size(attempt.left)} that the first run left behind would also "
                "count in a second run: so the memory that the test needs is unknown"
            )
            notes = (*measurement.notes, Note(NoteKind.RUN, sentence))
            measurement = replace(measurement, notes=notes)
        if not part and policy.enabled and attempt.ran:
            batch_norm = recording is not None and recording.batch_norm
            hints = advice(self._runner, item, needed, error, batch_norm=batch_norm)
            measurement = replace(measurement, hints=(*hints, *measurement.hints))
        return measurement, replace(explanations, recording=recording)

    # -- every test --

    def _followed_up(
        self,
        item: MarkedItem,
        run: Run,
        results: list[Result],
        recording: Recording | None,
        *,
        uncapped: bool,
    ) -> list[Result]:
        """Write a test's snapshot; add hints at fragmented memory.

        On the virtual GPU a test that failed with fragmented memory runs again with expandable
        segments.
        """
        policy, is_too_much = self._policy, too_much(results)
        if policy.snapshots and recording is not None and is_too_much:
            try:
                path = write_snapshot(recording, policy.snapshots, item.nodeid)
                with suppress(ValueError):
                    path = path.relative_to(self._runner.root)
                results = [replace(result, snapshot=str(path)) for result in results]
            except GpuMemError as error:
                results = [replace(result, snapshot_error=str(error)) for result in results]
        if not (policy.attribution == "on" or (policy.enabled and is_too_much)):
            return results
        from pytest_gpumem.attribution.hints import fragmentation, is_fragmented

        peaks = {
            result.part: peak
            for result in results
            if (peak := _needed_peak(result)) and is_fragmented(peak)
        }
        if not peaks:
            return results
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


def by_hook(item: MarkedItem, measured: Mapping[str, Measured]) -> dict[str, Measured]:
    """Return measurements, or those that a hook puts in their place."""
    return {
        part: (spec, item.measured(part, measurement))
        for part, (spec, measurement) in measured.items()
    }


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
