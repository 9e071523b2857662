"""The way of a marked test that has ended: measured, explained, judged, stage by stage.

Each stage adds to a :class:`EndedTest` what it finds out. :attr:`Pipeline.PASSED` and
:attr:`Pipeline.OUT_OF_MEMORY` have the stages in their order; the docstring of a stage says when it
runs the test's body again (docs/explanation/second-runs.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Final

from pytest_gpumem.devices.benchmark_mode import TIMED
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.result import with_others
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.meter.out_of_memory import find_out_of_memory
from pytest_gpumem.nodeids import module_of
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun import batch_sizes, growth_search, leaks
from pytest_gpumem.testrun.advice import advice
from pytest_gpumem.testrun.edits import EditFinder
from pytest_gpumem.testrun.explain import Explanations, ran_again
from pytest_gpumem.testrun.keeper_search import KeeperFinder
from pytest_gpumem.testrun.pinned_lines import PinWatch
from pytest_gpumem.testrun.rerun import shown_error
from pytest_gpumem.testrun.size_range import is_replayed, with_ranges
from pytest_gpumem.testrun.unused_device import check_unused, is_unused, unrecorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.attribution.recording import Recording
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Edit
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.relations import Bound
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.explain import Explainer
    from pytest_gpumem.testrun.judging import Judging
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run

Measured = tuple["MemorySpec", "Measurement"]
"""a declaration, and what was measured under it"""

UNSUPPORTED_REMEDY = "run this test on a real GPU (--gpumem-device=cuda)"
TIMED_BEFORE: Final = Note(
    NoteKind.RUN, "the peaks are those of a second run, for which cuDNN had timed its plans"
)


class WorthlessError(GpuMemError):
    """A measurement that means nothing."""

    def __init__(self, trouble: str) -> None:
        super().__init__("this measurement", trouble, UNSUPPORTED_REMEDY)


@dataclass
class EndedTest:
    """A marked test that has ended, and the findings on it so far."""

    item: MarkedItem
    run: Run
    error: BaseException | None = None
    """the error that it ended with"""
    shortage: BaseException | None = None
    """PyTorch's error of running out of memory, behind the test's own"""
    debugging: bool = False
    """whether a debugger is to see the error's frames: the test is not run again"""
    measured: dict[str, Measured] = field(default_factory=dict)
    """of the parts that are judged, by name; "" is the whole test"""
    searches: dict[str, Measured] = field(default_factory=dict)
    """of searches with a baseline, by name"""
    relations: dict[str, Sequence[Bound]] = field(default_factory=dict)
    """limits that other parts tell, by part: of the first run, as the peaks"""
    is_unused: bool = False
    """whether it took no memory of its device"""
    explanations: Explanations = field(default_factory=Explanations)
    edits: dict[str, tuple[Edit, ...]] = field(default_factory=dict)
    """the lines that changed since the baseline's commit, by part"""
    results: list[Result] = field(default_factory=list)

    def update_whole(self, measurement: Measurement) -> None:
        """Put another measurement of the whole test in the place of the one before."""
        self.measured[""] = self.run.spec, measurement


class Pipeline:
    """Brings marked tests that have ended to their results."""

    def __init__(self, runner: Runner, explainer: Explainer, judging: Judging) -> None:
        """Bring tests to their results.

        Args:
            runner: runs the tests.
            explainer: tells where their peaks come from.
            judging: judges their measurements.
        """
        self._runner = runner
        self._explainer = explainer
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

        Args:
            item: the test.
            error: the error that its set-up or its call ended with; None if it passed.
            debugging: a debugger is to see the error's frames: the test is not run again.

        Raises:
            GpuMemError: the measurement means nothing.
        """
        run = self._runner.run
        assert run is not None  # noqa: S101 - for the type checker
        shortage = None if error is None else find_out_of_memory(error)
        if error is None and not item.declared and is_unused(run):
            return []
        if error is not None and shortage is None:
            return []
        case = EndedTest(item, self._runner.ended(), error, shortage, debugging)
        for stage in self.PASSED if error is None else self.OUT_OF_MEMORY:
            stage(self, case)
        return case.results

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
            self._runner, item, run, whole, recording, record=self._explainer.enabled
        )
        if leaked is None:
            return []
        return [leaked if result is whole else result for result in results]

    # -- stages of every test --

    def _refuse_worthless(self, case: EndedTest) -> None:
        """Refuse figures that mean nothing; memory may have been refused for the same reason.

        Raises:
            WorthlessError: an event of the device made them worthless.
        """
        trouble = case.run.device.trouble()
        if trouble is not None:
            raise WorthlessError(trouble) from case.error

    def _consult_hook(self, case: EndedTest) -> None:
        """Let a hook put other measurements in the place of these."""
        for part, (spec, measurement) in case.measured.items():
            case.measured[part] = spec, case.item.measured(part, measurement)

    def _judge(self, case: EndedTest) -> None:
        """Judge by all that is known: again each time more is, as a verdict tells the causes."""
        case.results = [
            self._judging.result(
                case.item,
                case.run,
                part,
                spec,
                case.explanations.attached(part, measurement),
                relations=case.relations.get(part, ()),
                edits=case.edits.get(part, ()),
            )
            for part, (spec, measurement) in case.measured.items()
        ]

    def _follow_up(self, case: EndedTest) -> None:
        """Write the snapshot, add hints at fragmented memory.

        On the virtual GPU a test that failed with fragmented memory runs again with expandable
        segments.
        """
        case.results = self._explainer.follow_up(
            case.item,
            case.run,
            case.results,
            case.explanations.recording,
            uncapped=case.error is not None,
        )

    # -- stages of a test that passed --

    def _note_outside(self, case: EndedTest) -> None:
        """Tell where the baseline of a test outside of pytest's root folder is."""
        module = module_of(case.item.nodeid)
        if module.startswith("../") and case.run.spec.baseline:
            path = self._judging.store.path(case.run.info.key, module)
            sentence = f"the test is outside pytest's root folder: its baseline is {path}"
            case.run.notes.append(Note(NoteKind.BASELINE, sentence))

    def _measure(self, case: EndedTest) -> None:
        run = case.run
        parts = run.part_measurements()
        case.relations = {part: run.bounds(part) for part in parts}
        case.searches = run.search_measurements()
        case.is_unused = is_unused(run)
        if case.is_unused:
            check_unused(run, self._runner.root / module_of(case.item.nodeid))
        case.measured = {"": (run.spec, run.measurement()), **parts}

    def _explain(self, case: EndedTest) -> None:
        """Tell where the peaks come from, if that is told of every test, or the test runs on."""
        run, spec = case.run, case.run.spec
        growth_search.require_steps(run)
        explains = self._explainer.explains(spec)
        runs_on = spec.batch_sizes is not None or is_replayed(run)  # its recording is wanted now
        if explains or (runs_on and run.meter.records):
            case.explanations = self._explainer.explain(run, case.measured, later=not explains)
        if spec.max_leak_mib is not None:
            self._leak_recording = case.explanations.recording

    def _find_growth(self, case: EndedTest) -> None:
        """Tell what grows from step to step: a test whose memory grows runs again."""
        explanations, whole = case.explanations, case.measured[""][1]
        recording = explanations.recording if self._explainer.enabled else None
        case.update_whole(
            growth_search.with_growth(self._runner, case.item, case.run, whole, recording)
        )

    def _run_batch_sizes(self, case: EndedTest) -> None:
        """Run the test with its other batch sizes, where it declares several."""
        if case.run.spec.batch_sizes is None:
            return
        whole = batch_sizes.with_slope(
            self._runner,
            case.item,
            case.run,
            case.measured[""][1],
            name_lines=self._explainer.enabled,
        )
        case.update_whole(whole)

    def _find_ranges(self, case: EndedTest) -> None:
        case.measured = with_ranges(case.run, case.measured, case.explanations.recording)

    def _time_no_plans(self, case: EndedTest) -> None:
        """Measure a growth that may be of plans which cuDNN timed: the test runs again, with them.

        A second run times none, in whichever order tests run.
        """
        whole, regressed = case.measured[""][1], Kind.REGRESSED
        if TIMED not in whole.notes or all(r.verdict.kind is not regressed for r in case.results):
            return
        with self._runner.again(case.item, record=False) as attempt:
            if not attempt.passed or attempt.left:
                return
            for part, (spec, measurement) in case.measured.items():
                peaks = case.run.peaks_of(part) or measurement.peaks
                case.measured[part] = spec, replace(measurement, peaks=peaks)
        case.update_whole(replace(case.measured[""][1], notes=(*whole.notes, TIMED_BEFORE)))
        self._judge(case)

    def _explain_failure(self, case: EndedTest) -> None:
        """Tell where the peaks of a failed test come from; one that is not recorded runs again."""
        explanations, explainer = case.explanations, self._explainer
        if explanations.recording is not None and explanations.pending is None:
            return
        recorded = explanations.pending is not None or case.run.meter.records
        if not (
            explainer.explains_failure(case.results)
            or explainer.explains_change(case.results, recorded=recorded)
        ):
            return
        if explanations.pending is not None:
            explanations.complete()
        else:
            case.explanations = explainer.explain_failure(case.item, case.run, case.measured)
        self._judge(case)

    def _find_keepers(self, case: EndedTest) -> None:
        """Tell what keeps the blocks of a peak that is too high: a failed test runs again.

        Unless it has run again for where its peak comes from.
        """
        if not case.explanations.of_second_run and self._keepers.add_keepers(
            case.item, case.run.spec, case.results, case.explanations
        ):
            self._judge(case)

    def _find_pinned_lines(self, case: EndedTest) -> None:
        """Tell which lines pin the host memory that is too much: the failed test runs again.

        Unless it has run again for another reason, or a second run would leave more.
        """
        spec = case.run.spec
        parts = [result.part for result in case.results if result.is_pinned_too_much]
        has_run_again = case.explanations.of_second_run
        if not parts or has_run_again or spec.steady or spec.max_leak_mib is not None:
            return
        watch = PinWatch()
        with watch.watching(), self._runner.again(case.item, record=False) as attempt:
            lines = watch.lines(self._runner.root) if attempt.passed else ()
        for part in parts:
            part_spec, measurement = case.measured[part]
            note = ran_again("which lines pin memory")
            measurement = replace(
                measurement, pinned_lines=lines, notes=(*measurement.notes, *[note] * attempt.ran)
            )
            case.measured[part] = part_spec, measurement
        self._judge(case)

    def _find_edits(self, case: EndedTest) -> None:
        """Tell which edits since the baseline's commit bear on a growth."""
        for result in case.results:
            scenes = case.explanations.scenes.get(result.part, ())
            edits = self._edits.edits(result, scenes, self._judging.baseline_file(result))
            if edits:
                case.edits[result.part] = edits
        if case.edits:
            self._judge(case)

    def _join(self, case: EndedTest) -> None:
        """Put parts beside those whose limits they tell; add the results of searches."""
        case.results = with_others(case.results)
        case.results += [
            self._judging.result(
                case.item, case.run, name, spec, case.item.measured(name, measurement)
            )
            for name, (spec, measurement) in case.searches.items()
        ]
        if case.is_unused:  # the next run, on the device, would be held to nothing
            case.results = [unrecorded(result) for result in case.results]

    # -- stages of a test that ran out of memory --

    def _measure_shortage(self, case: EndedTest) -> None:
        run, shortage = case.run, case.shortage
        assert shortage is not None  # noqa: S101 - for the type checker
        record = run.out_of_memory(shortage)
        if case.error is not None and case.error is not shortage:
            sentence = f"the test turned the out-of-memory error into {shown_error(case.error)}"
            run.notes.append(Note(NoteKind.RUN, sentence))
        part, spec, measurement = run.short_measurement(shortage, record)
        case.measured = {part: (spec, measurement)}
        if run.meter.records:
            case.explanations = self._explainer.explain(run, [part])

    def _run_without_limits(self, case: EndedTest) -> None:
        """Run the test again without limits: for how much it needs, and where that comes from.

        Smaller batch sizes and variants that are tried for the advice run it further.
        """
        error = case.error
        if case.debugging or error is None:
            return
        run, failed = case.run, case.explanations
        ((part, (spec, measurement)),) = case.measured.items()
        recording, needed = failed.recording, None
        with self._runner.again(
            case.item, error, record=self._explainer.records_out_of_memory(), uncapped=True
        ) as attempt:
            peaks = run.peaks_of(part) if attempt.passed and not attempt.left else ()
            explanations = self._explainer.explain(run, [part]) if peaks else failed
            recording = explanations.recording or run.meter.recording()
        if attempt.ran:
            explanations.note = ran_again("what it needs")
        record = measurement.out_of_memory
        if peaks and record is not None:
            needed = max(peaks, key=lambda peak: peak.reserved)
            record = replace(record, needed=needed, device_index=peaks.index(needed))
            measurement = replace(measurement, out_of_memory=record)
        elif attempt.left:
            sentence = (
                f"{format_size(attempt.left)} that the first run left behind would also "
                "count in a second run: so the memory that the test needs is unknown"
            )
            notes = (*measurement.notes, Note(NoteKind.RUN, sentence))
            measurement = replace(measurement, notes=notes)
        if not part and self._explainer.enabled and attempt.ran:
            batch_norm = recording is not None and recording.batch_norm
            hints = advice(self._runner, case.item, needed, error, batch_norm=batch_norm)
            measurement = replace(measurement, hints=(*hints, *measurement.hints))
        explanations.recording = recording  # for the snapshot
        case.explanations = explanations
        case.measured[part] = spec, measurement

    PASSED: ClassVar[tuple[Callable[[Pipeline, EndedTest], None], ...]] = (
        _refuse_worthless,
        _note_outside,
        _measure,
        _explain,
        _find_growth,
        _run_batch_sizes,
        _find_ranges,
        _consult_hook,
        _judge,
        _time_no_plans,
        _explain_failure,
        _find_keepers,
        _find_pinned_lines,
        _find_edits,
        _join,
        _follow_up,
    )
    """the stages of a test that passed, in their order"""
    OUT_OF_MEMORY: ClassVar[tuple[Callable[[Pipeline, EndedTest], None], ...]] = (
        _refuse_worthless,
        _measure_shortage,
        _run_without_limits,
        _consult_hook,
        _judge,
        _follow_up,
    )
    """the stages of a test that ran out of memory, in their order"""
