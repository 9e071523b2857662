"""The interface through which a run gets explanations; the package ``explain`` implements it.

The class here explains nothing. A session uses it with ``--gpumem-attribution=off``, and then never
imports ``explain``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import unexplained

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.fit.scaling import Scaling
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import ExplainGrowth
    from pytest_gpumem.measurement import Breakdown, Peak, Site
    from pytest_gpumem.notes import Note
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Recorded, Recording
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.judging import EndedTest, Judging
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.run import Run


class Explainer:
    """Explains nothing; a subclass overrides its methods."""

    enabled = False
    explain: ExplainGrowth = staticmethod(unexplained)
    """returns the causes of a growth"""

    def __init__(self, judging: Judging) -> None:
        """Store ``judging``, which judges tests again with the findings."""
        self._judging = judging

    def records(self, spec: MemorySpec, *, predicted: bool) -> bool:
        """Return whether a test is recorded from the start.

        On the virtual GPU (``predicted``) it is: the ranges of its peaks are computed from the
        recording.
        """
        return predicted

    def explains(self, spec: MemorySpec) -> bool:
        """Return whether a test's peaks are explained regardless of its verdict."""
        return False

    def of_children(self, root: Path) -> str:
        """Return "module:class:folder" of what explains child processes; "" for none."""
        return ""

    def breakdown(self, recorded: Recorded) -> Breakdown | None:
        """Return the breakdown of a run's peak on its first device; None if unknown."""
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
        """Return a test's results with the reasons for its peaks, and the recording used.

        ``recorded`` is the run's finished recording, if any. If it is of a second run,
        ``second_run`` is the note on that run. With ``again`` the test may be run again.
        """
        if second_run is not None:
            results = self._judging.results(test.noted(second_run))
        return results, recorded.recording if recorded else None

    def advice(
        self, item: MarkedItem, needed: Peak | None, error: BaseException, *, batch_norm: bool
    ) -> list[Note]:
        """Return advice on how to make a test that ran out of memory fit.

        ``needed`` is the test's peak without limits, or None; ``batch_norm`` says that its model
        has a module whose statistics depend on the batch.
        """
        return []

    def off_the_line(
        self, item: MarkedItem, run: Run, scaling: Scaling, device: int
    ) -> tuple[Note, ...]:
        """Return notes on why memory does not grow linearly with the batch size."""
        return ()

    def lines(
        self,
        recording: Recording | None,
        device: int,
        choose: Callable[[Sequence[Block]], Mapping[Block, int]],
    ) -> tuple[Site, ...]:
        """Return the source lines of a device's chosen blocks; empty if unknown.

        ``choose`` selects blocks, and the bytes to count for each.
        """
        return ()

    def snapshot(self, recording: Recording) -> Mapping[str, object]:
        """Return a recording's snapshot, as it is written to a file."""
        return recording.snapshot

    def hinted(self, test: EndedTest, results: list[Result], *, uncapped: bool) -> list[Result]:
        """Return a test's results with hints about fragmentation."""
        return results
