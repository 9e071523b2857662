"""The marked test that runs now, on its device, and who else holds memory there."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun import pytest_item
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_gpumem.devices.select import Choice
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.run import Retained, Run


LONGEST_ERROR: Final = 200
"""characters of an error that are shown"""


@dataclass(frozen=True)
class Trial:
    """What became of a test that was run once more with something else."""

    run: Run
    passed: bool
    out_of_memory: bool
    """whether it failed by that"""
    error: str
    """what it failed with"""


class Stage:
    """Where one marked test after the other runs."""

    def __init__(self, choice: Choice, root: Path) -> None:
        self.choice = choice
        self.root = root
        self.run: Run | None = None
        """the marked test that runs now"""
        self.fixtures: dict[Any, Retained] = {}
        """what live fixtures of wider scope retain, by their definitions"""
        self._left: list[tuple[str, int]] = []
        """tests that left memory behind, and how many bytes"""
        self._nodeid = ""
        self.tell: Callable[[str], object] = bool
        """shows a line to who waits"""

    def records(self, spec: MemorySpec) -> bool:
        """Whether a test is recorded from the start."""
        raise NotImplementedError

    def begin(self, item: Any, spec: MemorySpec) -> None:  # noqa: ANN401 - a pytest.Item
        """Open the device for a test; ``run`` stays None where there is none.

        Raises:
            DeviceError: the device cannot be what the test asks for.
        """
        from pytest_gpumem.meter.block import activate
        from pytest_gpumem.testrun.run import Run

        self.end()
        if self.choice.device is None:
            return
        with Run.open(spec, self.choice.device, self.root, record=self.records(spec)) as run:
            pytest_item.finish_replaced(item, self.fixtures)
            run.start(self._live(pytest_item.fixture_defs(item)))
        run.tell = self._tell
        self.run = run
        self._nodeid = item.nodeid
        activate(run.meter)

    def _tell(self, text: str) -> None:
        self.tell(f"{self._nodeid}: {text}")

    def _live(self, definitions: Iterable[Any]) -> list[Retained]:
        used = set(definitions)
        return [held for it, held in self.fixtures.items() if it in used]

    def _held_notes(self, run: Run) -> Iterator[str]:
        """Say who holds memory that is not counted."""
        held = sum(other.allocated for other in run.meter.foreign)
        if not held:
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
        from pytest_gpumem.meter.block import deactivate

        deactivate(run.meter)
        with suppress(Exception):  # the device may be in no state to answer
            self._note_left(run)
        run.close()

    def _note_left(self, run: Run) -> None:
        import gc

        left = sum(self.left_by(run))
        if left > 0:
            gc.collect()
            left = sum(self.left_by(run))
        if not any(other.allocated for other in run.meter.foreign):
            self._left.clear()
        if left > 0:
            self._left.append((self._nodeid, left))

    def left_by(self, run: Run) -> list[int]:
        """Return the bytes that a test still holds on each device, live fixtures' not counted."""
        alive = [it for it in run.owned if it in self.fixtures.values()]
        return run.held_besides(alive)

    # -- a test that ran --

    def _running(self, item: Any) -> Run:  # noqa: ANN401 - a pytest.Item
        """Return the run, with all that the test turned out to use."""
        assert self.run is not None  # noqa: S101 - for the type checker
        self.run.adopt(self._live(pytest_item.fixture_defs_used(item)))
        self.run.notes.extend(self._held_notes(self.run))
        return self.run

    def again(self, item: Any, *, record: bool) -> AbstractContextManager[Run | None]:  # noqa: ANN401
        """Run a test that passed once more, now warm, and tear it down at the end of the block."""
        return self._again(item, None, uncapped=False, record=record, warm=True)

    @contextmanager
    def trial(self, item: Any, spec: MemorySpec, *, record: bool = False) -> Iterator[Trial]:  # noqa: ANN401
        """Run a test once more as another spec has it, on the same devices, within their limits.

        It is torn down at the end of the block.
        """
        assert self.run is not None  # noqa: S101 - for the type checker
        run = self.run
        declared = run.spec
        errors: list[tuple[bool, str]] = []
        handled = sys.exc_info()[1]  # the test's own error, where this is for the sake of that

        def failed(error: BaseException) -> None:
            short = find_out_of_memory(error, handled) is not None
            errors.append((short, shown_error(error)))

        from pytest_gpumem.meter.out_of_memory import find_out_of_memory

        try:
            with self._again(
                item, None, uncapped=False, record=record, spec=spec, failed=failed
            ) as passed:
                short, error = errors[0] if errors else (False, "")
                yield Trial(run, passed=passed is not None, out_of_memory=short, error=error)
        finally:
            run.spec = declared

    @contextmanager
    def _again(  # noqa: PLR0913 - all that makes a second run another one
        self,
        item: Any,  # noqa: ANN401
        error: BaseException | None,
        *,
        uncapped: bool,
        record: bool,
        spec: MemorySpec | None = None,
        warm: bool = False,
        failed: Callable[[BaseException], object] = bool,
    ) -> Iterator[Run | None]:
        """Run the test once more; give the run, or None if it did not pass this time.

        Where it is warm, it needs no warm-up. One rank of torchrun's is not run again alone: the
        others would not be there for its collectives.
        """
        if current_rank() is not None:
            yield None
            return
        assert self.run is not None  # noqa: S101 - for the type checker
        run, before = self.run, list(self.fixtures)

        def prepare() -> None:
            run.meter.await_release(sum(peak.allocated for peak in run.owned_peaks()))
            if spec is not None:
                run.spec = spec
                if run.free:
                    run.cap_again()
            if uncapped:
                run.uncap()
            run.begin_again(record=record)

        def execute() -> None:
            for _ in range(0 if warm else run.spec.warmup):
                item.runtest()
                run.begin_again(record=False)
            item.runtest()

        passed = pytest_item.run_again(item, error, prepare, execute, failed)
        try:
            yield run if passed else None
        finally:
            pytest_item.tear_down(item)
            made = [it for key, it in self.fixtures.items() if key not in before and it.weighs]
            pytest_item.finish_all(item, [key for key, it in self.fixtures.items() if it in made])


def shown_error(error: BaseException) -> str:
    """Return an error's class and the first line of what it says, cut short."""
    lines = str(error).splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."
