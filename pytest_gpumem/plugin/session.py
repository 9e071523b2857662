"""One session of tests: its device, its baselines, its results; nothing of pytest."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.baselines.store import BaselineStore, NewBaseline, UpdateSummary
from pytest_gpumem.errors import BaselineError, GpuMemError
from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.result import Result, describe_budget
from pytest_gpumem.judge.verdict import Lookup
from pytest_gpumem.nodeids import split_nodeid
from pytest_gpumem.report.card_matrix import cards_matrix
from pytest_gpumem.report.terminal import session_text, update_text
from pytest_gpumem.report.terminal.failure_text import MOST_ROWS, failure_sections
from pytest_gpumem.report.terminal.summary_table import summary_table
from pytest_gpumem.report.terminal.toolchain_lead import lead_lines
from pytest_gpumem.report.text import can_encode
from pytest_gpumem.testrun import advice, batch_sizes, leaks, pytest_item
from pytest_gpumem.testrun.explain import (
    Explanations,
    explain,
    too_much,
    with_fragmentation,
    with_snapshot,
)
from pytest_gpumem.testrun.rerun import Stage, shown_error
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_gpumem.attribution.recording import Recording
    from pytest_gpumem.devices.select import Choice
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.plugin.results import Gathering
    from pytest_gpumem.plugin.settings import Settings
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.run import Run

    Ask = Callable[[str, Measurement], Measurement]

LEAST_WIDTH = 80
"""columns that a failure's text is laid out for at least"""
UNSUPPORTED_REMEDY = "run this test on a real GPU (--gpumem-device=cuda)"


class Shortage(NamedTuple):
    """A test, or a part of it, that ran out of memory."""

    part: str
    spec: MemorySpec
    measurement: Measurement
    recording: Recording | None = None
    """of the second run, or of the first where there was no other"""


class TestSession(Stage):
    """What a pytest session knows of memory: one a process."""

    __test__ = False  # for pytest, whose name for tests it begins with

    def __init__(self, settings: Settings, choice: Choice, root: Path, verbosity: int = 0) -> None:
        super().__init__(choice, root)
        self.rank = current_rank()
        self.settings = settings
        strict = settings.provenance == "fail"
        self.store = BaselineStore(settings.baseline_dir, follow_provenance=strict)
        self.updates: UpdateSummary | None = None
        self.verbosity = verbosity
        self._recording_kept: Recording | None = None
        """of a test that may have leaked"""

    def header(self) -> str:
        """Return the lines for the head of the session."""
        device = self.choice.device
        if device is None:
            return session_text.header(None, reason=self.choice.reason)
        expected = device.expected()
        if expected is None:
            return f"gpumem: {device.kind} device"
        return session_text.header(expected)

    # -- judging --

    def judge(self, item: Any, ask: Ask) -> list[Result]:  # noqa: ANN401 - a pytest.Item
        """Measure and judge the test that ran, and its parts."""
        run = self._running(item)
        parts = run.part_measurements()
        measured = {"": (run.spec, run.measurement()), **parts}
        trouble = run.device.trouble()
        if trouble is not None:
            raise WorthlessError(trouble)
        leaks.require_steps(run)
        found = self._explained(run, measured)
        self._recording_kept = found.recording if run.spec.max_leak_mib is not None else None
        measured[""] = leaks.with_growth(run, measured[""][1], found.recording, self.root)
        if run.spec.batch_sizes is not None:
            spec, measurement = measured[""]
            named = self.settings.attribution != "off"
            measured[""] = spec, batch_sizes.with_slope(self, item, run, measurement, named=named)
        cases = [
            (part, spec, found.attached(part, ask(part, measurement)))
            for part, (spec, measurement) in measured.items()
        ]
        results = [self._judged(item, *case) for case in cases]
        if found.recording is None and self._explains(results):
            found = self._explained_again(item, measured)
            results = [
                self._judged(item, part, spec, found.attached(part, measurement))
                for part, spec, measurement in cases
            ]
        return self._followed_up(item, results, found.recording)

    def judge_left(self, item: Any, results: Sequence[Result]) -> list[Result]:  # noqa: ANN401
        """Judge what a test that passed left behind, once it is torn down; none: all is well."""
        run = self.run
        whole = next((it for it in results if not it.part), None)
        if run is None or whole is None or any(it.verdict.failed for it in results):
            return []
        recording, self._recording_kept = self._recording_kept, None
        judged = leaks.judged(
            self, item, run, whole, recording, record=self.settings.attribution != "off"
        )
        return [] if judged is None else [judged if it is whole else it for it in results]

    # -- explaining --

    def records(self, spec: MemorySpec) -> bool:
        """Whether a test is recorded from the start."""
        settings = self.settings
        once = self.rank is not None or spec.steady or spec.max_leak_mib is not None
        if once and settings.attribution != "off":  # it is not run again to be recorded
            return True
        if settings.snapshots is not None and settings.snapshot_when == "always":
            return True
        return settings.attribution == "on" or (
            settings.attribution == "auto" and (settings.update_baselines or self._timelines)
        )

    @property
    def _timelines(self) -> bool:
        """Whether anybody is to see them."""
        return self.settings.html is not None

    def _explains(self, results: Iterable[Result]) -> bool:
        """Whether a test is run once more to say where its peak comes from."""
        wanted = self.settings.attribution == "auto" or self.settings.snapshots is not None
        return wanted and too_much(results)

    def _explained(self, run: Run, parts: Iterable[str]) -> Explanations:
        if self.settings.attribution != "off":
            return explain(run, parts, self.root, timelines=self._timelines)
        explanations = Explanations()
        explanations.recording = run.meter.recording()  # for its snapshot
        return explanations

    def _explained_again(self, item: Any, parts: Iterable[str]) -> Explanations:  # noqa: ANN401
        """Run a test once more, as before but recorded."""
        with self._again(item, None, uncapped=False, record=True) as run:
            if run is not None:
                return self._explained(run, parts)
            explanations = Explanations()
            explanations.recording = self._recording()
            return explanations

    def _recording(self) -> Recording | None:
        """End the recording of a run that has nothing else to say."""
        return self.run.meter.recording() if self.run else None

    def _followed_up(
        self,
        item: Any,  # noqa: ANN401
        results: Sequence[Result],
        recording: Recording | None,
        *,
        uncapped: bool = False,
    ) -> list[Result]:
        """Keep a test's snapshot, and say what expandable segments would give it."""

        def again() -> AbstractContextManager[Run | None]:
            return self._again(item, None, uncapped=uncapped, record=False)

        kept = with_snapshot(
            results,
            recording,
            self.settings.snapshots,
            self.root,
            always=self.settings.snapshot_when == "always",
        )
        real = self.run is None or self.run.device.computes
        return with_fragmentation(kept, self.settings.attribution, None if real else again)

    def ran_out(self, item: Any, cause: BaseException, error: BaseException) -> Shortage:  # noqa: ANN401
        """Return what there is to say of a test that has just run out of memory.

        Args:
            item: the test.
            cause: PyTorch's error.
            error: what the test raised: the same, or one that came of it.
        """
        run = self._running(item)
        record = run.out_of_memory(cause)
        if error is not cause:
            text = shown_error(error)
            run.notes.append(f"the test raised it as {text}")
        part, spec, measurement = run.short_measurement(cause, record)
        return Shortage(part, spec, measurement)

    def run_again(self, item: Any, shortage: Shortage, error: BaseException) -> Shortage:  # noqa: ANN401
        """Run the test once more, without any cap, and add what it needed."""
        part, measurement = shortage.part, shortage.measurement
        wanted = self.settings.attribution != "off" or self.settings.snapshots is not None
        with self._again(item, error, uncapped=True, record=wanted) as run:
            peaks = run.peaks_of(part) if run else ()
            record = measurement.out_of_memory
            if run is None or not peaks or record is None:
                return shortage._replace(recording=self._recording())
            most = max(peaks, key=lambda peak: peak.reserved)
            record = replace(record, needed=most, device_index=peaks.index(most))
            measurement = replace(measurement, out_of_memory=record)
            found = self._explained(run, [part])
            measurement = found.attached(part, measurement)
        if not part and self.settings.attribution != "off":
            batch_norm = found.recording is not None and found.recording.batch_norm
            hints = advice.advice(self, item, most, batch_norm=batch_norm)
            measurement = replace(measurement, hints=(*hints, *measurement.hints))
        return shortage._replace(measurement=measurement, recording=found.recording)

    def judge_out_of_memory(self, item: Any, shortage: Shortage, ask: Ask) -> list[Result]:  # noqa: ANN401
        """Judge a test that ran out of memory."""
        measurement = ask(shortage.part, shortage.measurement)
        results = [self._judged(item, shortage.part, shortage.spec, measurement)]
        recording = shortage.recording or self._recording()
        return self._followed_up(item, results, recording, uncapped=True)

    def _judged(self, item: Any, part: str, spec: MemorySpec, measurement: Measurement) -> Result:  # noqa: ANN401
        nodeid = item.nodeid
        card = self.run.card if self.run else None
        key = self.settings.against or measurement.device.key
        lookup = self._look_up(key, nodeid, part) if spec.baseline else Lookup()
        policy, world, rank = self.settings.policy, spec.world_size, spec.rank
        held_to = spec
        if self.rank is not None and world is None:  # the baseline is the fullest rank's
            world, rank = self.rank.size, self.rank.rank
            held_to = replace(spec, world_size=world)
            policy = replace(policy, shrinkage="note")  # others may have taken more
        verdict = judge(
            measurement,
            held_to,
            lookup,
            policy,
            nodeid=nodeid,
            card_bytes=card.usable_memory if card and not part else None,
        )
        return Result(
            nodeid=nodeid,
            verdict=verdict,
            measurement=measurement,
            part=part,
            batch_size=spec.batch_size,
            world_size=world,
            rank=rank,
            card=spec.card or "",
            budget=describe_budget(spec),
            location=pytest_item.place(item),
            baseline=spec.baseline,
            baseline_entry=lookup.entry,
        )

    def _look_up(self, device_key: str, nodeid: str, part: str) -> Lookup:
        module, test = split_nodeid(nodeid)
        try:
            entry = self.store.get(device_key, module, test, part)
        except BaselineError as error:
            return Lookup(error=str(error))
        if entry is not None:
            return Lookup(entry)
        return Lookup(other_devices=tuple(self.store.other_devices(device_key, module, test, part)))

    def failure_text(self, results: Sequence[Result]) -> str:
        """Return what a failed test's report says; "" where nothing failed."""
        if not any(it.verdict.failed for it in results):
            return ""
        return failure_sections(
            results,
            width=max(LEAST_WIDTH, shutil.get_terminal_size().columns),
            most_rows=None if self.verbosity > 1 else MOST_ROWS,
        )

    # -- the end --

    def update_baselines(self, changes: Iterable[NewBaseline]) -> UpdateSummary:
        """Write the baselines of the tests that ran and passed."""
        self.updates = self.store.update(changes)
        return self.updates

    def summary(self, gather: Gathering, *, verbosity: int, width: int, encoding: str) -> list[str]:
        """Return the paragraphs for the end of the session; none where no marked test ran."""
        results = gather.results()
        ascii_only = not can_encode("…→", encoding)
        texts = []
        if gather.broken:
            texts += [f"gpumem: {text}" for text in gather.broken]
        texts += lead_lines(results, width, ascii_only=ascii_only)
        if verbosity >= 0:
            texts += [""] if texts else []
            table = summary_table(results, verbosity, width, ascii_only=ascii_only)
            texts += [table, ""] if table else []
            cards = cards_matrix(results, width)
            texts += [cards, ""] if cards else []
            texts += [line for line in [session_text.counts(results)] if line]
            texts += session_text.comparison_lines(results, width=width)
            for reason in dict.fromkeys(gather.skipped):
                number = gather.skipped.count(reason)
                texts.append(f"gpumem: {number} skipped: {reason}")
        texts += session_text.snapshots(results, width=width)
        if self.updates is not None:
            texts.append(
                update_text.update_summary(
                    self.updates, width=width, ascii_only=ascii_only, brief=verbosity < 0
                )
            )
        if verbosity >= 0:
            command = session_text.next_command(results, updating=self.settings.update_baselines)
            texts += [f"gpumem: to record baselines: {command}"] if command else []
        return texts


class WorthlessError(GpuMemError):
    """A measurement that means nothing."""

    def __init__(self, trouble: str) -> None:
        super().__init__("this measurement", trouble, UNSUPPORTED_REMEDY)
