"""Process a marked test after its body has ended: measure, judge, explain, judge again.

A plain test is measured and judged. Every further feature is a stage, which applies to some tests.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices import virtual
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.result import describe_budget, too_much, with_others
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.meter.out_of_memory import find_out_of_memory
from pytest_gpumem.nodeids import module_of
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.snapshots import write_snapshot
from pytest_gpumem.replay.size_range import is_replayed
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.child_processes import ChildProcessesStage
from pytest_gpumem.testrun.judging import EndedTest
from pytest_gpumem.testrun.leaks import judged_leak
from pytest_gpumem.testrun.part_limits import bounds
from pytest_gpumem.testrun.ranges import RangesStage
from pytest_gpumem.testrun.rerun import shown_error
from pytest_gpumem.testrun.searches import search_measurements
from pytest_gpumem.testrun.second_runs import OUT_OF_MEMORY
from pytest_gpumem.testrun.server_starts import ServerStartsStage, with_servers
from pytest_gpumem.testrun.slope import SlopeStage
from pytest_gpumem.testrun.stage import through
from pytest_gpumem.testrun.steady import SteadyStage
from pytest_gpumem.testrun.timed_plans import TimedPlansStage
from pytest_gpumem.testrun.unknown_sizes import UnknownSizesStage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.devices.children import Child
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.recording.recording import Recording
    from pytest_gpumem.testrun.explainer import Explainer
    from pytest_gpumem.testrun.judging import Judging, Measured
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Ended, Runner
    from pytest_gpumem.testrun.run import Run
    from pytest_gpumem.testrun.stage import Stage

UNSUPPORTED_REMEDY = "run this test on a real GPU (--gpumem-device=cuda)"
MEMORY_LIMITS: Final = (
    *("max_gib", "max_allocated_gib", "max_reserved_gib", "card"),
    *("max_mib_per_sample", "max_fixed_gib", "max_pinned_gib"),
)
"""the marker's limits that a step without any device memory always meets"""
UNUSED_REMEDY: Final = "create the model and its data on gpu_memory.device, or remove the marker"


class Pipeline:
    """Makes results of marked tests that have ended.

    ``snapshots`` is the folder for snapshots; None writes none.
    """

    def __init__(
        self, runner: Runner, judging: Judging, explainer: Explainer, snapshots: Path | None
    ) -> None:
        self._runner = runner
        self._judging = judging
        self._explainer = explainer
        self._snapshots = snapshots
        self._unknown_sizes = UnknownSizesStage(runner, judging)
        self._before_verdict: tuple[Stage, ...] = (
            *(
                SteadyStage(runner, explainer),
                SlopeStage(runner, explainer),
                RangesStage(),
                ChildProcessesStage(),
                ServerStartsStage(),
            ),
        )
        self._after_verdict: tuple[Stage, ...] = (TimedPlansStage(runner), self._unknown_sizes)
        self._leak_recording: Recording | None = None
        """the recording of a passed test with ``max_leak_mib``, until the test is torn down"""

    def finish(
        self, item: MarkedItem, error: BaseException | None, *, debugging: bool
    ) -> list[Result]:
        """Return the results of a test and its parts.

        There are none if the test failed with another error than running out of memory or a
        server's refusal to start, or if only an option selected it and it allocated nothing.

        With ``debugging`` the test is not run again, so that a debugger finds the error's frames.

        Raises:
            GpuMemError: the measurement is worthless.
        """
        run = self._runner.run
        assert run is not None  # noqa: S101 - for the type checker
        is_short = error is not None and find_out_of_memory(error) is not None
        ended = self._runner.ended()
        is_refused = error is not None and any(start.refusal for start in ended.servers)
        unused = not item.declared and run.is_unused
        if not (is_short or is_refused) and (error is not None or unused):
            return []
        trouble = run.device.trouble()
        if trouble is not None:  # it may also be what caused an out-of-memory error
            raise GpuMemError("this measurement", trouble, UNSUPPORTED_REMEDY) from error
        if error is None:
            return self._passed(item, run, ended)
        if is_refused:
            return self._refused(item, run, ended, error)
        return self._out_of_memory(item, run, ended, error, debugging=debugging)

    def finish_torn_down(self, item: MarkedItem, results: Sequence[Result]) -> list[Result]:
        """Judge the memory that a test left behind, after it has passed and been torn down.

        A test that leaked may run again (:func:`judged_leak`).

        Returns:
            the test's results, with a verdict on the leak for the whole test; none without a leak.
        """
        run = self._runner.run
        recording, self._leak_recording = self._leak_recording, None
        whole = next((result for result in results if not result.part), None)
        if run is None or whole is None or any(result.verdict.failed for result in results):
            return []
        leaked = judged_leak(self._runner, self._explainer, item, run, whole, recording)
        if leaked is None:
            return []
        return [leaked if result is whole else result for result in results]

    # -- a test that passed --

    def _passed(self, item: MarkedItem, run: Run, ended: Ended) -> list[Result]:
        spec, explainer = run.spec, self._explainer
        module, notes = module_of(item.nodeid), list(ended.notes)
        if module.startswith("../") and spec.baseline:
            path = self._judging.store.path(run.info.key, module)
            sentence = f"the test is outside pytest's root folder: its baseline is {path}"
            notes.append(Note(NoteKind.BASELINE, sentence))
        parts, found = run.part_measurements(), search_measurements(run)
        unused = run.is_unused
        if unused:
            notes += unused_notes(run, ended.children, self._runner.root / module)
        test = EndedTest(
            *(item, run, {"": (spec, run.measurement(notes)), **parts}),
            relations={part: bounds(run.parts, part) for part in parts},
            children=ended.children,
            servers=ended.servers,
        )
        # End the recording before the stages run: ranges are computed from it, and the runs with
        # other batch sizes would be added to it.
        runs_on = spec.batch_sizes is not None or is_replayed(run)
        if explainer.explains(spec) or (runs_on and run.meter.recording.is_running):
            test = test._replace(recorded=run.recorded(test.measured))
        self._leak_recording = test.recording if spec.max_leak_mib is not None else None
        test = through(self._before_verdict, test)
        test = self._judged(test._replace(measured=by_hook(item, test.measured)))
        for stage in self._after_verdict:
            if stage.applies(test):
                test = self._judged(stage(test))
        results, recording = explainer.explained(test, [*test.results], test.recorded)
        results = with_others(results, self._judging.explain)
        results += self._judging.results(EndedTest(item, run, by_hook(item, found)))
        if unused:  # a baseline of nothing would fail every run that uses the device
            below = test.measured.keys() - {"", *parts}
            results = [result if result.part in below else unrecorded(result) for result in results]
        return self._followed_up(test, results, recording, uncapped=False)

    def _judged(self, test: EndedTest) -> EndedTest:
        return test._replace(results=self._judging.results(test))

    # -- a test whose inference server refused to start --

    def _refused(
        self, item: MarkedItem, run: Run, ended: Ended, error: BaseException
    ) -> list[Result]:
        """Return the result of a test whose server refused to start for lack of device memory.

        The test is not run again, because that would start the server again.
        """
        measurement = with_servers(run.measurement(ended.notes), ended.servers)
        measured = by_hook(item, {"": (run.spec, measurement)})
        return self._judging.results(EndedTest(item, run, measured, error=error))

    # -- a test that ran out of memory --

    def _out_of_memory(
        self, item: MarkedItem, run: Run, ended: Ended, error: BaseException, *, debugging: bool
    ) -> list[Result]:
        """Return the result of a test that ran out of memory, or of the part that did.

        Unless a debugger is active, the test runs again: without limits, to find how much memory it
        needs and which lines take it, and with smaller batch sizes and other variants, to find
        which of them fit.
        """
        shortage = find_out_of_memory(error) or error
        refusal, notes = run.out_of_memory(shortage), ended.notes
        if error is not shortage:
            sentence = f"the test turned the out-of-memory error into {shown_error(error)}"
            notes = (*notes, Note(NoteKind.RUN, sentence))
        part, spec, measurement = run.short_measurement(shortage, refusal, notes)
        recorded = run.recorded([part]) if run.meter.recording.is_running else None
        second_run = needed = None
        if not debugging:
            records = self._explainer.enabled or self._snapshots is not None
            with self._runner.again(
                item, OUT_OF_MEMORY, error, record=records, uncapped=True
            ) as attempt:
                peaks = run.peaks_of(part) if attempt.passed and not attempt.left else ()
                if peaks:
                    recorded = run.recorded([part])
                elif recorded is None or recorded.recording is None:
                    recorded = run.recorded([])
            if peaks:
                needed = max(peaks, key=lambda peak: peak.reserved)
                record = replace(refusal, needed=needed, device_index=peaks.index(needed))
                measurement = replace(measurement, out_of_memory=record)
            elif attempt.left:
                sentence = (
                    f"{format_size(attempt.left)} that the first run left behind would also "
                    "count in a second run: so the memory that the test needs is unknown"
                )
                notes = (*measurement.notes, Note(NoteKind.RUN, sentence))
                measurement = replace(measurement, notes=notes)
            if not part and attempt.ran:
                recording = recorded.recording
                batch_norm = recording is not None and recording.batch_norm
                hints = self._explainer.advice(item, needed, error, batch_norm=batch_norm)
                measurement = replace(measurement, hints=(*hints, *measurement.hints))
            second_run = attempt.note
        measured = by_hook(item, {part: (spec, measurement)})
        test = self._judged(EndedTest(item, run, measured, error=error, debugging=debugging))
        if self._unknown_sizes.applies(test):
            test = self._judged(self._unknown_sizes(test))
        results, recording = self._explainer.explained(
            test, [*test.results], recorded, second_run, again=False
        )
        return self._followed_up(test, results, recording, uncapped=True)

    # -- every test --

    def _followed_up(
        self, test: EndedTest, results: list[Result], recording: Recording | None, *, uncapped: bool
    ) -> list[Result]:
        """Return a test's results with the snapshot's path and hints about fragmentation.

        Only a recorded test that failed because of too much device memory has a snapshot.
        """
        if self._snapshots and recording is not None and too_much(results):
            try:
                snapshot = self._explainer.snapshot(recording)
                path = write_snapshot(snapshot, self._snapshots, test.item.nodeid)
                with suppress(ValueError):
                    path = path.relative_to(self._runner.root)
                results = [replace(result, snapshot=str(path)) for result in results]
            except GpuMemError as error:
                results = [replace(result, snapshot_error=str(error)) for result in results]
        return self._explainer.hinted(test, results, uncapped=uncapped)


def by_hook(item: MarkedItem, measured: Mapping[str, Measured]) -> dict[str, Measured]:
    """Return specs and measurements by part, after a hook may have replaced each measurement."""
    return {
        part: (spec, item.measured(part, measurement))
        for part, (spec, measurement) in measured.items()
    }


# -- a test that allocated nothing on its device --


def unused_notes(run: Run, children: Sequence[Child], path: Path) -> list[Note]:
    """Return a note on a test that allocated nothing on its device; none if a child process did.

    Raises:
        GpuMemError: the test declares a limit, which would always hold.
    """
    if any(child.peaks for child in children):
        return []
    problem, cause = f"the test allocated no memory on {run.info.name}", ""
    if run.info.is_predicted:  # then the cause may be a step that ran on the CPU
        cause = virtual.unused_cause(path, run.root)
    if any(getattr(run.spec, name) is not None for name in MEMORY_LIMITS):
        declared = f"@pytest.mark.gpu_memory({describe_budget(run.spec)})"
        raise GpuMemError(declared, problem + cause, UNUSED_REMEDY)
    sentence = f"{problem}, and no baseline is recorded{cause}"
    return [Note(NoteKind.UNRECORDED, sentence)]


def unrecorded(result: Result) -> Result:
    """Return a result without a baseline or a command to record one: the test allocated nothing."""
    notes = tuple(note for note in result.verdict.notes if note.kind is not NoteKind.RECORDED)
    # A server in a process of its own may have refused to start: that has other remedies.
    advice = result.verdict.advice if result.verdict.kind is Kind.NO_START else UNUSED_REMEDY
    verdict = replace(result.verdict, notes=notes, advice=advice, command=None)
    return replace(result, baseline=False, verdict=verdict)
