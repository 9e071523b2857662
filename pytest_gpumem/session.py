"""One session of tests: its device, its baselines, its results; nothing of pytest."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.baseline import BaselineStore, Change, UpdateSummary
from pytest_gpumem.errors import BaselineError, GpuMemError
from pytest_gpumem.records import BaselineEntry
from pytest_gpumem.report import terminal
from pytest_gpumem.report.model import Result, describe_budget
from pytest_gpumem.report.wire import from_dict
from pytest_gpumem.sizes import format_size
from pytest_gpumem.verdict import Lookup, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pytest_gpumem.devices.choose import Choice
    from pytest_gpumem.options import Settings
    from pytest_gpumem.records import Measurement, Peak
    from pytest_gpumem.running import Retained, Run
    from pytest_gpumem.spec import MemorySpec

    Ask = Callable[[str, Measurement], Measurement]
    Place = tuple[str, int]

UNSUPPORTED_REMEDY = "run this test on a real GPU (--gpumem-device=cuda)"


class TestSession:
    """What a pytest session knows of memory: one a process."""

    __test__ = False  # for pytest, whose name for tests it begins with

    def __init__(self, settings: Settings, choice: Choice, root: Path) -> None:
        self.settings = settings
        self.choice = choice
        self.root = root
        self.store = BaselineStore(settings.baseline_dir)
        self.gather = Gathering()
        self.run: Run | None = None
        """the marked test that runs now"""
        self.fixtures: dict[Any, Retained] = {}
        """what live fixtures of wider scope retain, by their definitions"""
        self._left: list[tuple[str, int]] = []
        """tests that left memory behind, and how many bytes"""
        self._nodeid = ""

    def header(self) -> str:
        """Return the lines for the head of the session."""
        device = self.choice.device
        if device is None:
            return terminal.header(None, reason=self.choice.reason)
        expected = device.expected()
        if expected is None:
            return f"gpumem: {device.kind} device"
        return terminal.header(expected)

    # -- one test --

    def begin(self, nodeid: str, spec: MemorySpec, fixture_names: Sequence[str]) -> None:
        """Open the device for a test; ``run`` stays None where there is none.

        Raises:
            DeviceError: the device cannot be what the test asks for.
        """
        from pytest_gpumem.context import activate
        from pytest_gpumem.running import Run

        self.end()
        if self.choice.device is None:
            return
        owned = [
            held
            for held in self.fixtures.values()
            if held.name in fixture_names and len(held.held) == spec.devices
        ]
        self.run = Run.open(spec, self.choice.device, self.root, owned)
        self._nodeid = nodeid
        activate(self.run.meter)
        self.run.notes.extend(self._held_notes(self.run))

    def _held_notes(self, run: Run) -> Iterator[str]:
        """Say who holds memory that is not counted."""
        held = sum(other.allocated for other in run.meter.others)
        if not held:
            self._left.clear()
            return
        strangers = [it for it in self.fixtures.values() if it not in run.owned]
        holders = [f"fixture {it.name!r}" for it in strangers if any(p.allocated for p in it.held)]
        holders += [nodeid for nodeid, _ in self._left]
        names = ", ".join(holders[-3:]) or "code outside of marked tests"
        yield f"{format_size(held)} held when it began, by {names}, are not counted"

    @contextmanager
    def fixture(self, name: str, key: object) -> Iterator[None]:
        """Note what the set-up of a fixture of wider scope retains, where a marked test runs."""
        if self.run is None:
            yield
            return
        with self.run.fixture(name, self.fixtures, key):
            yield

    def end(self) -> None:
        """Let go of the device, and note what the test left behind."""
        run, self.run = self.run, None
        if run is None:
            return
        from pytest_gpumem.context import deactivate

        deactivate(run.meter)
        with suppress(Exception):  # the device may be in no state to answer
            self._note_left(run)
        run.close()

    def _note_left(self, run: Run) -> None:
        import gc

        alive = [it for it in run.owned if it in self.fixtures.values()]
        kept = sum(peak.allocated for it in alive for peak in it.held)
        left = sum(peak.allocated for peak in run.meter.counted()) - kept
        if left > 0:
            gc.collect()
            left = sum(peak.allocated for peak in run.meter.counted()) - kept
        if left > 0:
            self._left.append((self._nodeid, left))

    # -- judging --

    def judge(self, nodeid: str, place: Place, ask: Ask) -> list[Result]:
        """Measure and judge the test that ran, and its parts."""
        if self.run is None:
            return []
        parts = self.run.part_measurements()
        whole = self.run.measurement()
        trouble = self.run.device.trouble()
        if trouble is not None:
            raise WorthlessError(trouble)
        results = [self._judged(nodeid, "", self.run.spec, ask("", whole), place)]
        for name, (spec, measurement) in parts.items():
            results.append(self._judged(nodeid, name, spec, ask(name, measurement), place))
        return results

    def judge_out_of_memory(
        self,
        nodeid: str,
        place: Place,
        measurement: Measurement,
        needed: tuple[Peak, ...] | None,
        ask: Ask,
    ) -> list[Result]:
        """Judge a test that ran out of memory; ``needed`` is its peaks without the cap."""
        if self.run is None or measurement.out_of_memory is None:
            return []
        if needed is not None:
            most = max(needed, key=lambda peak: peak.reserved)
            record = replace(measurement.out_of_memory, needed=most)
            measurement = replace(measurement, out_of_memory=record)
        return [self._judged(nodeid, "", self.run.spec, ask("", measurement), place)]

    def _judged(
        self, nodeid: str, part: str, spec: MemorySpec, measurement: Measurement, place: Place
    ) -> Result:
        card = self.run.card if self.run else None
        verdict = judge(
            measurement,
            spec,
            self._look_up(measurement.device.key, nodeid, part) if spec.baseline else Lookup(),
            self.settings.policy,
            nodeid=nodeid,
            card_bytes=card.usable_memory if card and not part else None,
        )
        return Result(
            nodeid=nodeid,
            verdict=verdict,
            measurement=measurement,
            part=part,
            batch_size=spec.batch_size,
            budget=describe_budget(spec),
            location=place,
            baseline=spec.baseline,
        )

    def _look_up(self, device_key: str, nodeid: str, part: str) -> Lookup:
        module, test = split(nodeid)
        try:
            entry = self.store.get(device_key, module, test, part)
        except BaselineError as error:
            return Lookup(error=str(error))
        if entry is not None:
            return Lookup(entry)
        return Lookup(others=tuple(self.store.other_devices(device_key, module, test, part)))

    @staticmethod
    def failure_text(results: Sequence[Result]) -> str:
        """Return what a failed test's report says; "" where nothing failed."""
        return "\n\n".join(terminal.failure(it) for it in results if it.verdict.failed)

    # -- the end --

    def update_baselines(self) -> UpdateSummary:
        """Write the baselines of the tests that ran and passed."""
        self.gather.updates = self.store.update(self.gather.changes())
        return self.gather.updates

    def summary(self, *, verbosity: int, width: int, encoding: str) -> list[str]:
        """Return the paragraphs for the end of the session; none where no marked test ran."""
        gather = self.gather
        results = gather.results()
        ascii_only = not _can_encode("…→", encoding)
        texts = []
        if gather.broken:
            texts += [f"gpumem: {text}" for text in gather.broken]
        if verbosity >= 0:
            table = terminal.summary_table(results, verbosity, width, ascii_only=ascii_only)
            texts += [table, ""] if table else []
            texts += [line for line in [terminal.counts(results)] if line]
            for reason in dict.fromkeys(gather.skipped):
                number = gather.skipped.count(reason)
                texts.append(f"gpumem: {number} skipped: {reason}")
        if gather.updates is not None:
            texts.append(
                terminal.update_summary(gather.updates, width=width, ascii_only=ascii_only)
            )
        if verbosity >= 0:
            command = terminal.next_command(results, updating=self.settings.update_baselines)
            texts += [f"gpumem: to record baselines: {command}"] if command else []
        return texts


class WorthlessError(GpuMemError):
    """A measurement that means nothing."""

    def __init__(self, trouble: str) -> None:
        super().__init__("this measurement", trouble, UNSUPPORTED_REMEDY)


class Gathering:
    """What the controller has been told so far, by test."""

    def __init__(self) -> None:
        self._results: dict[str, list[Result]] = {}
        self._failed: set[str] = set()
        self._complete: set[str] = set()
        self.updates: UpdateSummary | None = None
        self.skipped: list[str] = []
        """the reason of each marked test that was skipped for want of a device"""
        self.broken: list[str] = []
        """results that could not be read"""

    def add(self, nodeid: str, when: str, *, passed: bool, data: object) -> None:
        """Take one report: a test's set-up, call or tear-down; a rerun begins with a set-up."""
        if when == "setup":
            self._results.pop(nodeid, None)
            self._failed.discard(nodeid)
            self._complete.discard(nodeid)
        if not passed:
            self._failed.add(nodeid)
        if when == "teardown":
            self._complete.add(nodeid)
        try:
            results = [from_dict(Result, one) for one in data] if isinstance(data, list) else []
        except GpuMemError as error:
            self.broken.append(str(error))
        else:
            if results:
                self._results[nodeid] = results

    def results(self) -> list[Result]:
        """Return all results, in the order in which their tests ended."""
        return [result for results in self._results.values() for result in results]

    def changes(self) -> list[Change]:
        """Return what the tests that ran and passed are to have as baselines."""
        found = []
        for nodeid, results in self._results.items():
            if nodeid in self._failed or nodeid not in self._complete:
                continue
            parts = {it.part: _entry(it) for it in results if it.baseline and it.measurement}
            device = next((it.measurement.device for it in results if it.measurement), None)
            if parts and device is not None:
                found.append(Change(device, *split(nodeid), parts))
        return found


def _entry(result: Result) -> BaselineEntry:
    assert result.measurement is not None  # noqa: S101 - for the type checker
    measurement = result.measurement
    return BaselineEntry(measurement.peaks, measurement.provenance, result.batch_size)


def split(nodeid: str) -> tuple[str, str]:
    """Return a nodeid's test module and the test in it."""
    module, _, test = nodeid.partition("::")
    return module, test


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
