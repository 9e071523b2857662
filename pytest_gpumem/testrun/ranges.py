"""The stage that gives peaks as ranges where they depend on choices that only a GPU makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.replay.size_range import is_replayed, with_ranges

if TYPE_CHECKING:
    from pytest_gpumem.testrun.judging import EndedTest


class RangesStage:
    """Adds the ranges of :mod:`pytest_gpumem.replay.size_range`; the body does not run again."""

    def applies(self, test: EndedTest) -> bool:
        """See :class:`Stage`."""
        return test.recording is not None and is_replayed(test.run)

    def __call__(self, test: EndedTest) -> EndedTest:
        """See :class:`Stage`."""
        return test._replace(measured=with_ranges(test.run, test.measured, test.recording))
