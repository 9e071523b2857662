"""A marked test, as running and judging it needs it; plugin/pytest_item.py adapts items to it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pytest_gpumem.measurement import Measurement

FixtureKey = Hashable
"""the identity of a fixture's definition"""


class Attempt(NamedTuple):
    """The outcome of running a test once more."""

    passed: bool
    error: BaseException | None = None
    """the error that it failed with, its frames cleared; None where it could not be run again"""
    left: int = 0
    """bytes that earlier runs of the test had left behind, and which count for this one too"""
    out_of_memory: bool = False
    """of a trial: whether it failed by running out of memory"""

    @property
    def ran(self) -> bool:
        """Whether the test ran: a rank of torchrun's, say, does not run again."""
        return self.passed or self.error is not None


class MarkedItem(Protocol):
    """A marked test."""

    @property
    def declared(self) -> bool:
        """Whether the test has the marker or the fixture; else an option has all measured."""

    @property
    def nodeid(self) -> str:
        """The test's name, as pytest has it."""

    @property
    def argument(self) -> str:
        """The test's name on a command line: its file is named from the working folder."""

    def location(self) -> tuple[str, int]:
        """Return the test's file and the line of its marker, from 1."""

    def finish_replaced(self, live: Collection[FixtureKey], outdated: Sequence[FixtureKey]) -> None:
        """Tear down the live instances of fixtures that this test replaces.

        Those in ``live`` with other parameters, and those in ``outdated`` that the test asks for.
        """

    def finish_fixtures(self, fixtures: Iterable[FixtureKey]) -> None:
        """Tear fixtures down in reverse order, ignoring their errors."""

    def runtest(self) -> None:
        """Call the test's function."""

    def run_again(
        self, error: BaseException | None, prepare: Callable[[], None], execute: Callable[[], None]
    ) -> Attempt:
        """Tear the test down, set it up and run it once more; its output is dropped.

        Afterwards it has to be torn down (:meth:`tear_down`).

        ``prepare`` is called between tear-down and set-up, and ``execute`` to call :meth:`runtest`.
        """

    def tear_down(self) -> None:
        """Tear the test down; its output and its errors are dropped."""

    def measured(self, part: str, measurement: Measurement) -> Measurement:
        """Return the measurement to judge: this one, or another one of a hook's."""
