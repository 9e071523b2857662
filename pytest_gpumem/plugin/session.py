"""The marked tests of one session: each set up, finished, explained and judged; nothing of pytest.

A test enters here twice: :meth:`MemorySession.begin` before its set-up, and
:meth:`MemorySession.finish` once it has ended, with an error or without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from pytest_gpumem.baselines.store import WHOLE_TEST, BaselineStore
from pytest_gpumem.errors import BaselineError, GpuMemError
from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.result import Result, describe_budget, with_others
from pytest_gpumem.judge.verdict import Lookup
from pytest_gpumem.meter.out_of_memory import find_out_of_memory
from pytest_gpumem.nodeids import module_of, split_nodeid
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.sizes import MIB, format_size
from pytest_gpumem.testrun import batch_sizes, leaks
from pytest_gpumem.testrun.advice import advice
from pytest_gpumem.testrun.edits import EditFinder
from pytest_gpumem.testrun.explain import Explainer, ExplainPolicy, Explanations, ran_again
from pytest_gpumem.testrun.keepers import KeeperFinder
from pytest_gpumem.testrun.rerun import Runner, shown_error
from pytest_gpumem.testrun.size_range import is_ranged, with_ranges
from pytest_gpumem.testrun.unused_device import check_unused, is_unused, unrecorded
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from pytest_gpumem.attribution.recording import Recording
    from pytest_gpumem.devices.select import Choice
    from pytest_gpumem.judge.verdict import Edit
    from pytest_gpumem.measurement import DeviceInfo, Measurement, Peak
    from pytest_gpumem.plugin.settings import Settings
    from pytest_gpumem.relations import Relation
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.run import Run

UNSUPPORTED_REMEDY = "run this test on a real GPU (--gpumem-device=cuda)"

NOT_COMPUTED = (
    "on the virtual GPU values are not computed here: guard it with `if gpu_memory.computes:` or "
    'use values="full"'
)
NOT_COMPUTABLE = (
    "on the virtual GPU some values were not computed, though all are that can be: compiled code, "
    "TorchScript's fused code and CUDA graphs compute none; check it on the CPU or a real GPU"
)
GROWTH: Final = 256 * MIB
"""bytes above its baseline that a test may take beside neighbours; of a large one a twentieth"""
RAN_ALONE: Final = Note(
    NoteKind.RUN,
    "it was run once more alone: beside other processes' tests the GPU had too little for it",
)


class Finished(NamedTuple):
    """A test that was measured and judged."""

    results: list[Result]
    error: BaseException | None
    """the error that it ends with; a run alone may have none, or another than the first"""


def _is_of_values(error: BaseException | None) -> bool:
    """Return whether an error is of the kinds with which a test or a library refuses a value."""
    kinds = (AssertionError, pytest.fail.Exception, ValueError, ArithmeticError, LookupError)
    return isinstance(error, kinds) and not isinstance(error, GpuMemError)


def _is_of_sizes(error: BaseException | None) -> bool:
    """Return whether an error is of the kind with which PyTorch refuses sizes."""
    excluded = (GpuMemError, NotImplementedError, RecursionError)
    if not isinstance(error, RuntimeError) or isinstance(error, excluded):
        return False
    return find_out_of_memory(error) is None


class MemorySession:
    """The marked tests of one process's session: their device, their baselines, their results."""

    def __init__(
        self, settings: Settings, choice: Choice, root: Path, progress: Callable[[str], None]
    ) -> None:
        """Measure a session's tests.

        Args:
            settings: the session's options.
            choice: its device.
            root: pytest's root folder.
            progress: shows the waiting user a line.
        """
        self.settings = settings
        self.runner = Runner(choice, root, progress, settings.values)
        self.explainer = Explainer(
            self.runner,
            ExplainPolicy(
                attribution=settings.attribution,
                snapshots=settings.snapshots,
                snapshot_always=settings.snapshot_when == "always",
                timelines=settings.html is not None,
                updating=settings.update_baselines,
                reporting=settings.json is not None and settings.json_format == "report",
            ),
        )
        self.keepers = KeeperFinder(self.runner)
        self.edits = EditFinder(self.runner.root)
        strict = settings.provenance == "fail"
        self.store = BaselineStore(settings.baseline_dir, follow_provenance=strict)
        self._nearest_stores = [BaselineStore(folder) for folder in settings.nearest_dirs]
        self._rank = current_rank()
        self._leak_recording: Recording | None = None
        """of a test that passed and may have leaked"""

    @property
    def choice(self) -> Choice:
        """The session's device."""
        return self.runner.choice

    @property
    def run(self) -> Run | None:
        """The marked test that runs."""
        return self.runner.run

    def begin(self, item: MarkedItem, spec: MemorySpec) -> None:
        """Open the device for a test; ``run`` stays None where the session has no device.

        Raises:
            DeviceError: the device cannot be what the test asks for.
        """
        record = self._records(spec)

        def expected(info: DeviceInfo) -> int | None:
            return self._expected_bytes(item, spec, info)

        self.runner.begin(
            item,
            spec,
            record=record,
            values=spec.values or self.settings.values,
            expected=expected,
        )

    def _records(self, spec: MemorySpec) -> bool:
        device = self.choice.device
        virtual = device is not None and device.kind == "virtual"
        return self.explainer.records_first_run(spec, virtual=virtual)

    def _expected_bytes(self, item: MarkedItem, spec: MemorySpec, info: DeviceInfo) -> int | None:
        """Return the bytes of each device that a test takes by its baseline; None: it is alone."""
        if self.settings.packing == "off" or not spec.baseline:
            return None
        try:
            entry = self.store.get(info.key, *split_nodeid(item.nodeid), WHOLE_TEST)
        except BaselineError:
            return None
        if entry is None or not any(peak.reserved for peak in entry.peaks):
            return None
        peak = max(peak.reserved for peak in entry.peaks)
        return peak + max(GROWTH, peak // 20)

    def end(self) -> None:
        """Let go of the device."""
        self.runner.end()

    def finish(
        self,
        item: MarkedItem,
        error: BaseException | None,
        *,
        debugging: bool = False,
        in_call: bool = True,
    ) -> Finished:
        """Measure, explain and judge a test that has ended, and its parts.

        Args:
            item: the test.
            error: the error that its set-up or its call ended with; None if it passed.
            debugging: a debugger is to see the error's frames: the test is not run again.
            in_call: whether it ended with its call, rather than with its set-up.

        Returns:
            the results; none where the error is not one of running out of memory.

        Raises:
            GpuMemError: the measurement means nothing.
        """
        run = self.runner.run
        assert run is not None  # noqa: S101 - for the type checker
        if in_call and run.disturbed(error):
            finished = self._finish_alone(item, run, error)
        else:
            finished = Finished(self._finish(item, error, debugging=debugging), error)
        error = finished.error
        of_values = _is_of_values(error)
        if error is None or not (of_values or _is_of_sizes(error)):
            return finished
        if not run.device.has_guessed(failed=of_values):
            return finished
        measured = run.measurement()
        reason = NOT_COMPUTABLE if run.device.computes else NOT_COMPUTED
        # As add_note() of Python 3.11, from which on pytest shows it.
        vars(error).setdefault("__notes__", []).append(
            f"{reason}; the peak until it failed was "
            f"{format_size(measured.peak_allocated)} allocated, "
            f"{format_size(measured.peak_reserved)} reserved"
        )
        return finished

    def _finish_alone(self, item: MarkedItem, run: Run, error: BaseException | None) -> Finished:
        """Run a test once more without neighbours, and finish that run in its place."""
        with self.runner.again(item, error, record=run.meter.records) as attempt:
            run.notes.append(RAN_ALONE)
            again = attempt.error if attempt.passed else attempt.error or error
            return Finished(self._finish(item, again), again)

    def set_up_alone(self, item: MarkedItem, error: BaseException) -> bool:
        """Set a test up once more alone, if its set-up failed where neighbours may be the reason.

        Returns:
            whether that was done.

        Raises:
            BaseException: an error of the set-up, alone.
        """
        run = self.runner.run
        if run is None or not run.disturbed(error):
            return False
        run.notes.append(RAN_ALONE)
        self.runner.set_up_alone(item, error)
        return True

    def _finish(
        self, item: MarkedItem, error: BaseException | None, *, debugging: bool = False
    ) -> list[Result]:
        if error is None:
            run = self.runner.run
            if run is not None and not item.declared and is_unused(run, run.measurement()):
                return []  # a test of something else: nothing is to be said of its memory
            return self._finish_passed(item)
        shortage = find_out_of_memory(error)
        if shortage is None:
            return []
        return self._finish_out_of_memory(item, error, shortage, debugging=debugging)

    def _finish_passed(self, item: MarkedItem) -> list[Result]:
        run = self.runner.ended()
        module = module_of(item.nodeid)
        if module.startswith("../") and run.spec.baseline:
            path = self.store.path(run.info.key, module)
            text = f"the test lies outside of pytest's root folder: its baseline is {path}"
            run.notes.append(Note(NoteKind.BASELINE, text))
        parts = run.part_measurements()
        measured = {"": (run.spec, run.measurement()), **parts}
        relations = {part: run.relations(part) for part in parts}  # of the first run, as the peaks
        searches = run.search_measurements()
        trouble = run.device.trouble()
        if trouble is not None:
            raise WorthlessError(trouble)
        unused = is_unused(run, measured[""][1])
        if unused:
            check_unused(run, self.runner.root / module)
            measured[""] = run.spec, run.measurement()
        leaks.require_steps(run)
        explanations = self._explained(run, measured)
        if run.spec.max_leak_mib is not None:
            self._leak_recording = explanations.recording
        whole = leaks.with_growth(run, measured[""][1], explanations.recording, self.runner.root)
        if run.spec.batch_sizes is not None:
            whole = batch_sizes.with_slope(
                self.runner, item, run, whole, name_lines=self.explainer.enabled
            )
        measured[""] = run.spec, whole
        measured = with_ranges(run, measured, explanations.recording)
        cases = [
            (part, spec, item.measured(part, measurement))
            for part, (spec, measurement) in measured.items()
        ]

        edits: dict[str, tuple[Edit, ...]] = {}

        def judged(explanations: Explanations) -> list[Result]:
            return [
                self._judged(
                    item,
                    run,
                    part,
                    spec,
                    explanations.attached(part, measurement),
                    relations=relations.get(part, ()),
                    edits=edits.get(part, ()),
                )
                for part, spec, measurement in cases
            ]

        results = judged(explanations)
        # Judged again each time more is known: a verdict says by which lines the peak grew, and
        # what keeps their blocks.
        may_rerun = run.meter.records or explanations.recording is not None
        recorded = run.meter.records
        if explanations.recording is None and (
            self.explainer.explains_failure(results)
            or self.explainer.explains_change(results, recorded=recorded)
        ):
            explanations = self.explainer.explain_failure(item, run, measured)
            results = judged(explanations)
        if may_rerun and self.keepers.add_keepers(item, run.spec, results, explanations):
            results = judged(explanations)
        edits.update(self._edits(results, explanations))
        results = judged(explanations) if edits else results
        results = with_others(results)
        results += [
            self._judged(item, run, name, spec, item.measured(name, measurement))
            for name, (spec, measurement) in searches.items()
        ]
        if unused:  # the next run, on the device, would be held to nothing
            results = [unrecorded(result) for result in results]
        return self.explainer.follow_up(item, run, results, explanations.recording, uncapped=False)

    def _explained(self, run: Run, parts: Iterable[str]) -> Explanations:
        """Return where the peaks come from, if that is told of every test, or the test runs on."""
        ended = run.spec.batch_sizes is not None or is_ranged(run)  # its recording is wanted now
        if self.explainer.explains(run.spec) or (ended and run.meter.records):
            return self.explainer.explain(run, parts)
        return Explanations()

    def _finish_out_of_memory(
        self, item: MarkedItem, error: BaseException, shortage: BaseException, *, debugging: bool
    ) -> list[Result]:
        """Judge a test that ran out of memory; ``shortage`` is PyTorch's error behind its own."""
        run = self.runner.ended()
        trouble = run.device.trouble()
        if trouble is not None:  # memory may have been refused for that
            raise WorthlessError(trouble) from error
        record = run.out_of_memory(shortage)
        if error is not shortage:
            run.notes.append(Note(NoteKind.RUN, f"the test raised it as {shown_error(error)}"))
        part, spec, measurement = run.short_measurement(shortage, record)
        # Of the run that failed; if that was not recorded, there are none.
        failed = self.explainer.explain(run, [part]) if run.meter.records else Explanations()
        hints: list[Note] = []
        needed: Peak | None = None
        recording = failed.recording
        if not debugging:
            # Once more without limits: that shows how much it needs, and where its peak comes from.
            with self.runner.again(
                item,
                error,
                record=self.explainer.records_out_of_memory(),
                uncapped=True,
            ) as attempt:
                peaks = run.peaks_of(part) if attempt.passed and not attempt.left else ()
                explanations = self.explainer.explain(run, [part]) if peaks else failed
                recording = explanations.recording or run.meter.recording()
            if attempt.ran:
                explanations.note = ran_again("what it needs")
            if peaks:
                needed = max(peaks, key=lambda peak: peak.reserved)
                record = replace(record, needed=needed, device_index=peaks.index(needed))
                measurement = replace(measurement, out_of_memory=record)
            elif attempt.left:
                text = (
                    f"{format_size(attempt.left)} that its first run left behind would count for "
                    "the second one too: so it is not told how much the test needs"
                )
                notes = (*measurement.notes, Note(NoteKind.RUN, text))
                measurement = replace(measurement, notes=notes)
            failed = explanations
            if not part and self.explainer.enabled and attempt.ran:
                batch_norm = recording is not None and recording.batch_norm
                hints = advice(self.runner, item, needed, error, batch_norm=batch_norm)
        measurement = failed.attached(part, measurement)
        measurement = replace(measurement, hints=(*hints, *measurement.hints))
        result = self._judged(item, run, part, spec, item.measured(part, measurement))
        return self.explainer.follow_up(item, run, [result], recording, uncapped=True)

    def finish_torn_down(self, item: MarkedItem, results: Sequence[Result]) -> list[Result]:
        """Judge the memory that a test left behind, once it has passed and is torn down.

        Returns:
            its results, with a leak in the whole test's; none where it did not leak.
        """
        run = self.run
        recording, self._leak_recording = self._leak_recording, None
        whole = next((result for result in results if not result.part), None)
        if run is None or whole is None or any(result.verdict.failed for result in results):
            return []
        leaked = leaks.judged(
            self.runner, item, run, whole, recording, record=self.explainer.enabled
        )
        if leaked is None:
            return []
        return [leaked if result is whole else result for result in results]

    def _edits(
        self, results: Sequence[Result], explanations: Explanations
    ) -> dict[str, tuple[Edit, ...]]:
        """Return the edits that bear on each part's growth, of parts that have any."""
        edits = {
            result.part: self.edits.edits(
                result, explanations.scenes.get(result.part, ()), self._baseline_file(result)
            )
            for result in results
        }
        return {part: found for part, found in edits.items() if found}

    def _baseline_file(self, result: Result) -> Path:
        """Return the file of a result's baseline: of the first store that has one."""
        place = result.device_key, *split_nodeid(result.nodeid)
        stores = [self.store, *self._nearest_stores]
        paths = [store.path(*place[:2]) for store in stores]
        return next((path for path in paths if path.is_file()), paths[0])

    def _judged(  # noqa: PLR0913 - a test or part, and all that it is judged by
        self,
        item: MarkedItem,
        run: Run,
        part: str,
        spec: MemorySpec,
        measurement: Measurement,
        *,
        relations: Sequence[tuple[Relation, int]] = (),
        edits: tuple[Edit, ...] = (),
    ) -> Result:
        key = self.settings.against or measurement.device.key
        lookup = Lookup()
        if spec.baseline:
            place = (key, *split_nodeid(item.nodeid), part)
            try:
                stores = [self.store, *self._nearest_stores]
                entries = (store.get(*place) for store in stores)
                entry = next((entry for entry in entries if entry is not None), None)
            except BaselineError as error:
                lookup = Lookup(error=str(error))
            else:
                if entry is None:
                    lookup = Lookup(other_devices=tuple(self.store.other_devices(*place)))
                else:
                    lookup = Lookup(entry, edits=edits)
        policy, world, rank = self.settings.policy, spec.world_size, spec.rank
        declared = spec
        if self._rank is not None and world is None:  # the baseline is the fullest rank's
            world, rank = self._rank.size, self._rank.rank
            spec = replace(spec, world_size=world)
            policy = replace(policy, shrinkage="note")  # another rank may have taken more
        if self._rank is not None:
            policy = replace(policy, launcher=self._rank.launcher)
        verdict = judge(
            measurement,
            spec,
            lookup,
            policy,
            nodeid=item.argument,
            card_bytes=run.card.usable_memory if run.card and not part else None,
            relations=relations,
            children=() if part else run.child_peaks(),
        )
        return Result(
            nodeid=item.nodeid,
            verdict=verdict,
            measurement=measurement,
            part=part,
            batch_size=declared.batch_size,
            world_size=world,
            rank=rank,
            card=declared.card or "",
            budget=describe_budget(declared, relations),
            location=item.location(),
            baseline=declared.baseline,
            baseline_entry=lookup.entry,
        )


class WorthlessError(GpuMemError):
    """A measurement that means nothing."""

    def __init__(self, trouble: str) -> None:
        super().__init__("this measurement", trouble, UNSUPPORTED_REMEDY)
