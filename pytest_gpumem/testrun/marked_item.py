"""A marked test's interface for running and judging it; plugin/pytest_item.py implements it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.notes import Note
    from pytest_gpumem.testrun.second_runs import SecondRun

FixtureKey = Hashable


class Attempt(NamedTuple):
    """The outcome of running a test once more."""

    passed: bool
    error: BaseException | None = None
    """the error of the run, with cleared frames; None if the test passed or did not run again"""
    left: int = 0
    """bytes that earlier runs of the test left behind, which this run's figures include"""
    out_of_memory: bool = False
    """whether a trial failed by running out of memory"""
    second_run: SecondRun | None = None

    @property
    def note(self) -> Note | None:
        """The note that the test ran a second time; None if it did not, or another note says so."""
        return (
            self.second_run.note
            if self.second_run is not None and self.second_run.finds and self.ran
            else None
        )

    @property
    def ran(self) -> bool:
        """Whether the test ran once more; a rank of torchrun, for example, cannot."""
        return self.passed or self.error is not None


class MarkedItem(Protocol):
    """The methods of a pytest item that running and judging a marked test needs."""

    @property
    def declared(self) -> bool:
        """Whether the test has the marker or the fixture; if not, ``--gpumem-all`` selected it."""

    @property
    def nodeid(self) -> str:
        """Pytest's node ID."""

    @property
    def argument(self) -> str:
        """The node ID for a command line, relative to the working folder."""

    def location(self) -> tuple[str, int]:
        """Return the test's file and the line of its marker, from 1."""

    def finish_replaced(self, live: Collection[FixtureKey], outdated: Sequence[FixtureKey]) -> None:
        """Tear down the live instances of fixtures that this test replaces.

        These are fixtures in ``live`` that the test requests with other parameters, and fixtures in
        ``outdated`` that it requests.
        """

    def finish_fixtures(self, fixtures: Iterable[FixtureKey]) -> None:
        """Tear fixtures down in reverse order, ignoring their errors."""

    def runtest(self) -> None:
        """Call the test's function."""

    def run_again(
        self, error: BaseException | None, prepare: Callable[[], None], execute: Callable[[], None]
    ) -> Attempt:
        """Tear the test down, set it up and run it once more, discarding its output.

        The caller then has to tear it down (:meth:`tear_down`).

        ``prepare`` is called between tear-down and set-up; ``execute`` calls :meth:`runtest`.
        """

    def tear_down(self) -> None:
        """Tear the test down, discarding its output and its errors."""

    def measured(self, part: str, measurement: Measurement) -> Measurement:
        """Return the measurement to judge: this one, or a hook's replacement."""
