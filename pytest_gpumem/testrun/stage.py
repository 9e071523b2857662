"""The interface of the stages that some marked tests go through after their body has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.testrun.judging import EndedTest


class Stage(Protocol):
    """One feature's work on a test that has ended, such as ``steady``.

    A stage changes nothing in place: it returns the test with its findings, which are measurements
    and their notes. A stage that runs the body again declares why in ``second_runs.py``.
    """

    def applies(self, test: EndedTest) -> bool:
        """Return whether the test's marker, device or verdict calls for this stage."""

    def __call__(self, test: EndedTest) -> EndedTest:
        """Return the test with the stage's findings.

        Raises:
            GpuMemError: the test cannot be judged.
        """


def through(stages: Iterable[Stage], test: EndedTest) -> EndedTest:
    """Return a test with the findings of the stages that apply to it."""
    for stage in stages:
        if stage.applies(test):
            test = stage(test)
    return test
