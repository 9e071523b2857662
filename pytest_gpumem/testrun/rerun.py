"""Run marked tests once, and again if needed; note memory that is not the test's own."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.children import CHILDREN, process_notes
from pytest_gpumem.devices.cuda_graphs import GRAPHS
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.notes import Note, NoteKind, notes_of
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.sizes import MIB, format_size
from pytest_gpumem.testrun.marked_item import Attempt
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pytest_gpumem.devices.base import Values
    from pytest_gpumem.devices.children import Child, ChildWatch
    from pytest_gpumem.devices.select import Choice
    from pytest_gpumem.measurement import ServerStart
    from pytest_gpumem.recording.recording import Recording
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.explainer import Explainer
    from pytest_gpumem.testrun.marked_item import FixtureKey, MarkedItem
    from pytest_gpumem.testrun.run import Inputs, Run
    from pytest_gpumem.testrun.second_runs import SecondRun
    from pytest_gpumem.testrun.wide_fixture import WideFixture

MAX_ERROR_LENGTH: Final = 200
"""maximum number of characters shown of an error's class and message"""
MIN_LEFT: Final = MIB
"""smaller leftovers, such as RNG state, are ignored"""
MAX_SHOWN: Final = 4
"""with more processes on a device, a note gives only the maximum and the sum of their peaks"""


def may_run_again(spec: MemorySpec) -> bool:
    """Return whether a test may run again for its report.

    A rank of torchrun may not: its collectives would wait for the other ranks. A ``steady`` test or
    one with ``max_leak_mib`` may not: a second run would leave more memory.
    """
    return current_rank() is None and not spec.steady and spec.max_leak_mib is None


class Ended(NamedTuple):
    """Child processes and notes of a test that has ended."""

    children: Sequence[Child]
    """the test's child processes that used a GPU"""
    notes: tuple[Note, ...]
    """notes on memory that is not counted, on fixtures' values, and on the child processes"""
    servers: tuple[ServerStart, ...] = ()
    """starts of an inference server, one per device"""


class Runner:
    """Runs the session's marked tests on its device, one at a time."""

    def __init__(
        self,
        choice: Choice,
        root: Path,
        progress: Callable[[str], None],
        values: Values = "off",
        children: ChildWatch = CHILDREN,
    ) -> None:
        """Create the runner.

        Args:
            choice: the session's device.
            root: pytest's root folder.
            progress: shows a line to the waiting user.
            values: which values are computed while an unmarked test sets up a fixture.
            children: watches the processes that the tests start.
        """
        self.choice = choice
        self.root = root
        self.run: Run | None = None
        """the running marked test; None between tests"""
        self._children = children
        self.fixtures: dict[FixtureKey, WideFixture] = {}
        """live fixtures of wider scope than a test"""
        self._progress = progress
        self._leftovers: list[tuple[str, int]] = []
        """(node ID, bytes) of tests that left memory behind"""
        self._nodeid = ""
        self._session_values = self._values = values
        """which values are computed for the running test"""
        self._broken: DeviceError | None = None
        """the error that all later tests raise, once an earlier error has left CUDA unusable in
        this process; None until then"""

    def begin(
        self,
        item: MarkedItem,
        spec: MemorySpec,
        *,
        record: bool,
        values: Values = "off",
        explainer: Explainer,
    ) -> None:
        """Open the device for a test; ``run`` stays None if the session has no device."""
        from pytest_gpumem.testrun.run import Run

        self.end()
        device, nodeid = self.choice.device, item.nodeid
        if device is None:
            return

        self._look_at_cuda("a test before this one")
        if self._broken is not None:
            raise self._broken

        def progress(line: str) -> None:
            self._progress(f"{nodeid}: {line}")

        with Run.open(
            *(spec, device, self.root),
            record=record,
            values=values,
            progress=progress,
            of_children=explainer.of_children(self.root) if record else "",
            breakdown=explainer.breakdown if explainer.enabled else None,
        ) as run:
            devices = run.fixtures.devices
            item.finish_replaced(
                self.fixtures,
                [key for key, fixture in self.fixtures.items() if not fixture.suits(devices)],
            )
            if values == "off":
                for fixture in self.fixtures.values():
                    fixture.values_lost_by = nodeid
            self._values = values
            device.values.compute(values)
            run.start()
        self.run, self._nodeid = run, nodeid

    def _look_at_cuda(self, culprit: str) -> None:
        """End CUDA graph captures; check if all CUDA calls fail, as after an illegal address."""
        if self._broken is not None or "torch" not in sys.modules:
            return
        if not VIEW.backend.is_initialized():
            return
        GRAPHS.end_captures()
        try:
            VIEW.backend.synchronize()
        except RuntimeError as error:
            self._broken = DeviceError(
                f"the {VIEW.backend.title} device",
                f"an error in {culprit} left {VIEW.backend.title} unusable in this process "
                f"({str(error).splitlines()[0]})",
                "correct that test; until then run it in a session of its own (--deselect)",
            )

    @contextmanager
    def fixture(self, name: str, fixture: FixtureKey) -> Iterator[None]:
        """Measure a fixture of wider scope that is set up in the block.

        An unmarked test may set up a fixture that marked tests use: then the device is opened for
        the set-up alone.
        """
        if self.run is None and self.choice.device is None:
            yield
            return
        with self._run_for_set_up() as run:
            with run.device.values.separately(), run.fixtures.set_up(name) as retained:
                yield
            if self._values == "off" and self._session_values != "off":
                retained.values_lost_by = self._nodeid
            self.fixtures[fixture] = retained

    @contextmanager
    def _run_for_set_up(self) -> Iterator[Run]:
        if self.run is not None:
            yield self.run
            return
        from pytest_gpumem.spec import MemorySpec
        from pytest_gpumem.testrun.run import Run

        assert self.choice.device is not None  # noqa: S101 - for the type checker
        values = self._session_values
        with Run.open(MemorySpec(), self.choice.device, self.root, values=values) as run:
            run.device.values.compute(values)
            run.start()
        self.run, self._values = run, values
        try:
            yield run
        finally:
            self.run = None
            run.close()

    def use(self, fixture: FixtureKey) -> None:
        """Count a live fixture's memory for the running test, if there is one.

        A fixture that was set up on other devices does not count. Code that requests a fixture by a
        computed name may get such a fixture, which could not be replaced before the test.
        """
        retained = self.fixtures.get(fixture)
        if retained is None or self.run is None:
            return
        if retained.suits(self.run.fixtures.devices):
            self.run.fixtures.use(retained)

    def forget(self, fixture: FixtureKey) -> None:
        """Forget a fixture that was torn down."""
        retained = self.fixtures.pop(fixture, None)
        if retained is not None:
            retained.forget()

    def end(self) -> None:
        """Close the device, and remember how much memory the test left behind."""
        run, self.run = self.run, None
        if run is None:
            return
        self._look_at_cuda(self._nodeid)
        if self._broken is not None:
            with suppress(RuntimeError):
                run.close()
            return
        with suppress(Exception):  # an error may have left the device unusable
            leftover = sum(self.left_by(run))
            if leftover > 0:
                gc.collect()  # garbage in reference cycles is no leftover
                leftover = sum(self.left_by(run))
            if not any(held.allocated for held in run.meter.isolation.foreign):
                self._leftovers.clear()  # everything that earlier tests left has since been freed
            if leftover > 0:
                self._leftovers.append((self._nodeid, leftover))
        run.close()

    def left_by(self, run: Run) -> list[int]:
        """Return the bytes that a test still holds on each device, without live fixtures."""
        pairs = zip(run.meter.counted(), run.fixtures.held(), strict=True)
        return [counted.allocated - held.allocated for counted, held in pairs]

    # -- a test that has ended --

    def ended(self) -> Ended:
        """Return child processes and notes of the test that has ended."""
        assert self.run is not None  # noqa: S101 - for the type checker
        run, notes = self.run, []
        uncounted = sum(held.allocated for held in run.meter.isolation.initial_foreign)
        if uncounted:
            holders = [
                f"fixture {fixture.name!r}"
                for fixture in self.fixtures.values()
                if fixture not in run.fixtures.used and fixture.holds_memory
            ]
            holders += [nodeid for nodeid, _ in self._leftovers]
            names = ", ".join(holders[-3:]) or "code outside of marked tests"
            sentence = f"{format_size(uncounted)} that {names} left behind are not counted"
            notes.append(Note(NoteKind.LEFTOVER, sentence))
        if run.device.values.has_guessed():
            notes += [
                Note(
                    NoteKind.VALUES,
                    f"the values of fixture {fixture.name!r} are unknown: {fixture.values_lost_by} "
                    'used the fixture, or ran while the fixture was alive, with values="off"',
                )
                for fixture in run.fixtures.used
                if fixture.holds_memory and fixture.values_lost_by not in {"", self._nodeid}
            ]
        children = self._children.children()
        servers = self._children.server_starts()
        return Ended(children, (*notes, *child_notes(run, children)), servers)

    @contextmanager
    def again(  # noqa: PLR0913 - the options of a second run, by name
        self,
        item: MarkedItem,
        second_run: SecondRun,
        error: BaseException | None = None,
        *,
        record: bool,
        uncapped: bool = False,
        warm: bool = False,
        inputs: Inputs | None = None,
        at_moment: Callable[[Recording], None] | None = None,
    ) -> Iterator[Attempt]:
        """Run a test once more, and tear it down at the end of the block.

        A rank of torchrun is not run again: its collectives would wait for the other ranks.

        ``record`` records the run; the recording calls ``at_moment`` at the start and the end of
        each module call, backward pass and optimizer step. ``uncapped`` lifts the limits, ``warm``
        skips the warm-up, and ``inputs`` replaces the batch size and the variant.
        """
        if current_rank() is not None:
            yield Attempt(passed=False)
            return
        assert self.run is not None  # noqa: S101 - for the type checker
        run, fixtures_before = self.run, set(self.fixtures)
        left = 0

        def prepare() -> None:
            nonlocal left
            run.meter.await_release(sum(peak.allocated for peak in run.fixtures.held()))
            if inputs is not None:
                run.inputs = inputs
                run.restore_limits()
            if uncapped:
                run.lift_limits()
            run.begin_again(record=record, at_moment=at_moment)
            left = sum(self.left_by(run))

        def execute() -> None:
            if not warm:
                run.warm_up(item)
            item.runtest()

        attempt = item.run_again(error, prepare, execute)
        attempt = attempt._replace(left=left if left >= MIN_LEFT else 0, second_run=second_run)
        try:
            yield attempt
        finally:
            item.tear_down()
            # Later tests must not use fixtures that only this run set up.
            item.finish_fixtures(
                [
                    fixture
                    for fixture, retained in self.fixtures.items()
                    if fixture not in fixtures_before and retained.holds_memory
                ]
            )

    @contextmanager
    def trial(
        self,
        item: MarkedItem,
        second_run: SecondRun,
        inputs: Inputs,
        *,
        handled: BaseException | None = None,
        record: bool = False,
    ) -> Iterator[Attempt]:
        """Run a test once more with other inputs, on the same devices, within the limits.

        The test is torn down at the end of the block.

        ``handled`` is the error of the test's earlier run. Python makes it the context of the
        trial's error, where it must not be mistaken for an out-of-memory error of the trial.
        """
        from pytest_gpumem.meter.out_of_memory import find_out_of_memory

        assert self.run is not None  # noqa: S101 - for the type checker
        run, declared = self.run, self.run.inputs
        try:
            with self.again(item, second_run, record=record, inputs=inputs) as attempt:
                error = attempt.error
                short = error is not None and find_out_of_memory(error, handled) is not None
                yield attempt._replace(out_of_memory=short)
        finally:
            run.inputs = declared


def shown_error(error: BaseException | None) -> str:
    """Return an error's class and the first line of its message, truncated; "" for None."""
    if error is None:
        return ""
    lines = str(error).splitlines()
    shown = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return shown if len(shown) <= MAX_ERROR_LENGTH else f"{shown[:MAX_ERROR_LENGTH]}..."


def child_notes(run: Run, children: Sequence[Child]) -> Iterator[Note]:
    """Yield notes on the child processes of a test that has ended.

    The notes contain no process IDs, so that they are the same in every run.
    """
    if not children:
        return
    reserved: dict[int, list[int]] = {}
    for child in children:
        for device, peak in child.peaks.items():
            reserved.setdefault(device, []).append(peak.reserved)
    shown, excesses, own_peaks = [], [], run.meter.peaks()
    for device, sizes in sorted(reserved.items()):
        sizes_text = " and ".join(format_size(size) for size in sorted(sizes, reverse=True))
        if len(sizes) > MAX_SHOWN:
            sizes_text = (
                f"at most {format_size(max(sizes))} each, {format_size(sum(sizes))} in all,"
            )
        shown.append(f"{sizes_text} of device {device}")
        limits = [] if run.limit is None else [run.limit]
        if run.info.total_memory:  # 0: unknown
            # Each process has its own CUDA context.
            limits.append(run.info.total_memory - run.info.context * (1 + len(sizes)))
        total = sum(sizes) + (own_peaks[device].reserved if device < len(own_peaks) else 0)
        limit = min(limits, default=total)
        if total > limit:  # the sum is an upper bound: each process is measured separately
            excesses.append(
                "together with the test's own memory, child processes may use up to "
                f"{format_size(total)} on device {device} at the same time: the limit is "
                f"{format_size(limit)}"
            )
    if shown:
        number = sum(bool(child.peaks) for child in children)
        parts = dict.fromkeys(child.part for child in children if child.peaks)
        only = f"part {min(parts)} includes" if len(parts) == 1 else "parts of the ranks include"
        sentence = f"{_counted(number)} reserved {', '.join(shown)}, which only the {only}"
        yield Note(NoteKind.CHILD_PROCESS, sentence)
    yield from notes_of(NoteKind.CHILD_PROCESS, excesses)
    yield from process_notes(children, run.root)
    silent = Counter(child.use for child in children if not child.ended)
    for use, number in silent.items():
        sentence = (
            f"{_counted(number)} {use} and reported no peak: a process reports its "
            "peak at its normal end, and not after a signal or os._exit()"
        )
        yield Note(NoteKind.CHILD_PROCESS, sentence)


def _counted(number: int) -> str:
    return "1 child process" if number == 1 else f"{number} child processes"
