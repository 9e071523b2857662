"""The one place by which a test's run asks for reasons: the room ``explain`` has the answers.

The explainer here explains nothing. It is the session's with ``--gpumem-attribution=off``, which
imports nothing of that room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import unexplained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.fit.scaling import Scaling
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Why
    from pytest_gpumem.measurement import Breakdown, Peak, Site
    from pytest_gpumem.notes import Note
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Recorded, Recording
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.judging import EndedTest, Judging
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.run import Run


class Explainer:
    """Explains nothing: its methods are the questions."""

    enabled = False
    """whether peaks are explained at all"""
    why: Why = staticmethod(unexplained)
    """tells the causes of a growth"""

    def __init__(self, judging: Judging) -> None:
        """Explain; ``judging`` judges tests again, by the findings."""
        self._judging = judging

    def records(self, spec: MemorySpec, *, predicted: bool) -> bool:
        """Return whether a test is recorded from the start.

        Where memory is ``predicted``, the range of its peaks comes of the recording.
        """
        return predicted

    def explains(self, spec: MemorySpec) -> bool:
        """Return whether a test's peaks are explained whatever its verdict is."""
        return False

    def of_children(self, root: Path) -> str:
        """Return the class that explains child processes (``devices/children.py``); "" for none."""
        return ""

    def breakdown(self, recorded: Recorded) -> Breakdown | None:
        """Return the breakdown of a run's peak on its first device; None where it is not known."""
        return None

    def explained(
        self,
        test: EndedTest,
        results: list[Result],
        recorded: Recorded | None,
        second_run: Note | None = None,
        *,
        again: bool = True,
    ) -> tuple[list[Result], Recording | None]:
        """Return the results of a test with the reasons for its peaks, and a recording of a run.

        ``recorded`` is its run, if the recording has ended, and ``second_run`` the note on a run
        after the first, which is the recorded one; ``again``: the test may run again.
        """
        if second_run is not None:
            results = self._judging.results(test.noted(second_run))
        return results, recorded.recording if recorded else None

    def advice(
        self, item: MarkedItem, needed: Peak | None, error: BaseException, *, batch_norm: bool
    ) -> list[Note]:
        """Return advice to make a test fit that ran out of memory.

        ``needed`` is its peak without limits; with ``batch_norm``, its model has a module with
        statistics that depend on the batch.
        """
        return []

    def off_the_line(
        self, item: MarkedItem, run: Run, scaling: Scaling, device: int
    ) -> tuple[Note, ...]:
        """Return why the memory of several batch sizes is not on a line."""
        return ()

    def lines(
        self,
        recording: Recording | None,
        device: int,
        choose: Callable[[Sequence[Block]], Mapping[Block, int]],
    ) -> tuple[Site, ...]:
        """Return the source lines of some blocks of a device; none where they are not known.

        ``choose`` returns the blocks in question, each with the bytes that count.
        """
        return ()

    def hinted(self, test: EndedTest, results: list[Result], *, uncapped: bool) -> list[Result]:
        """Return the results of a test with hints at fragmented memory."""
        return results
