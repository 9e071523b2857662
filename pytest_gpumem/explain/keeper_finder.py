"""Run a failed test once more: find keepers of a peak's blocks, or lines that pin host memory."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.breakdowns import site_rows
from pytest_gpumem.judge.verdict import Kind, beyond_tolerance
from pytest_gpumem.measurement import ExtraBlocks, LinePeak
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.source_lines import Line, qualified, shown_path, source_code, users_line
from pytest_gpumem.testrun.second_runs import KEEPERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from pytest_gpumem.breakdowns import SiteKey
    from pytest_gpumem.explain.explanations import Explanations
    from pytest_gpumem.explain.keeper_search import KeeperSearch
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Breakdown, LineKey
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner

ALIKE: Final = 3
"""after this many tests in a row with the same first cause and the same keepers, further tests with
that cause are not run again: the report groups them anyway"""
NO_MOMENT: Final = (
    "no keeper is named, because no module's call, backward pass or optimizer's step begins or "
    "ends while the blocks are there"
)
MAX_LINES: Final = 3
RETURNS: Final = frozenset({"c_return", "c_exception"})
"""profiler events at the end of a C function, such as PyTorch's"""


class KeeperFinder:
    """Finds keepers for the tests of one process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._names: dict[object, list[frozenset[str]]] = {}
        """for each first cause: the keepers' names found in each test"""

    def search(
        self, results: Sequence[Result], explanations: Explanations
    ) -> tuple[str, int, KeeperSearch, list[frozenset[str]]] | None:
        """Prepare the search for the keepers of a peak that is too high; None if no run is needed.

        For a peak that grew, the search looks for the blocks that the baseline did not have; for a
        peak over a limit, for the blocks of its largest source lines. After an out-of-memory error
        the peak is that of the failed run.

        Returns:
            the part's name, the device's index, the search, and the names that earlier searches
            with this first cause found.
        """
        for result in sorted(results, key=lambda result: bool(result.part)):
            analyzed_peaks = explanations.analyzed_peaks.get(result.part, ())
            verdict, baselines = result.verdict, result.breakdowns_before
            if not verdict.failed or not verdict.kind.too_much or verdict.beside:
                continue
            grown = verdict.kind is Kind.REGRESSED
            far = beyond_tolerance(verdict.comparisons)
            device = far[0].device if grown else result.device_over_limit
            if device is None or len(analyzed_peaks) <= device:
                continue
            analyzed = analyzed_peaks[device]
            if grown:
                if not verdict.causes or len(baselines) <= device or far[0].peak == "reserved":
                    continue
                site = verdict.causes[0].site
                extra = extra_blocks(analyzed.breakdown, baselines[device])
            else:
                sites = [line.site for line in result.held_lines]
                site = next(iter(sites), None)
                extra = {}
                for held in sites:
                    line = held.path, held.function, held.code, ""
                    blocks, nbytes, _ = extra.get(line, (0, 0, 0))
                    extra[line] = ExtraBlocks(blocks + held.blocks, nbytes + held.nbytes)
            key = site and (verdict.kind, site.path, site.function, site.code, site.category)
            names = self._names.setdefault(key, [])
            alike = names[-ALIKE:]
            if len(alike) == ALIKE and len(set(alike)) == 1:
                return None
            from pytest_gpumem.explain.keeper_search import KeeperSearch

            search = KeeperSearch(analyzed, extra, self._runner.root)
            return (result.part, device, search, names) if search.has_candidates else None
        return None

    def with_keepers(
        self, item: MarkedItem, results: Sequence[Result], explanations: Explanations
    ) -> Explanations:
        """Return a failed test's explanations with its blocks' keepers, found in another run."""
        planned = self.search(results, explanations)
        if planned is None:
            return explanations
        part, device, search, names = planned
        attributions = list(explanations.attributions[part])
        attribution = attributions[device]
        if search.has_moments:
            with self._runner.again(
                item, KEEPERS, record=True, at_moment=search.at_moment
            ) as attempt:
                keepers = search.keepers() if attempt.passed else ()
            names.append(frozenset(keeper.name for keeper in keepers))
            second_run = attempt.note
            attributions[device] = replace(attribution, keepers=keepers)
        else:
            second_run = None
            note = Note(NoteKind.BREAKDOWN, NO_MOMENT)
            attributions[device] = replace(attribution, notes=(*attribution.notes, note))
        return replace(
            explanations,
            attributions={**explanations.attributions, part: tuple(attributions)},
            second_run=second_run,
        )


def extra_blocks(current: Breakdown, baseline: Breakdown) -> dict[SiteKey, ExtraBlocks]:
    """Return how many more blocks each source line has than in the baseline, where that is known.

    Blocks are counted by category, as a line that loads a checkpoint allocates for the model and
    for the optimizer. But a block's category depends on the moment of the peak: if a line has fewer
    blocks or bytes of a category than in the baseline, its blocks may have changed category, so all
    of them are counted together, as category "".
    """
    # The baseline has its unused bytes only in total: all may belong to one line.
    unused = baseline.unsplit or 0
    lines: dict[LineKey, dict[str, ExtraBlocks]] = {}
    for row in site_rows(current, baseline):
        if row.site is not None and row.baseline_blocks is not None:
            key = row.site.path, row.site.function, row.site.code
            more = ExtraBlocks(row.blocks - row.baseline_blocks, row.difference or 0, unused)
            lines.setdefault(key, {})[row.site.category] = more
    extra: dict[SiteKey, ExtraBlocks] = {}
    for key, rows in lines.items():
        if any(more.blocks < 0 or more.nbytes < 0 for more in rows.values()):
            number = sum(more.blocks for more in rows.values())
            rows = {"": ExtraBlocks(number, sum(more.nbytes for more in rows.values()), unused)}  # noqa: PLW2901 - the line's
        extra.update({(*key, name): more for name, more in rows.items() if more.blocks > 0})
    return extra


class PinWatch:
    """Reads PyTorch's statistics after each C function, to find the lines that pin memory."""

    def __init__(self) -> None:
        self._bytes: Counter[Line | None] = Counter()
        self._total = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and threads that start in the block, for lines that pin memory."""
        self._total = self._pinned()
        outer, of_new_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(outer)
            threading.setprofile(of_new_threads)

    @staticmethod
    def _pinned() -> int:
        return VIEW.pinned_stats().owned.get("allocated", 0)

    def _see(self, frame: FrameType, event: str, _argument: Any) -> None:  # noqa: ANN401 - unused
        if event in RETURNS and (total := self._pinned()) != self._total:
            self._bytes[users_line(frame)] += total - self._total
            self._total = total

    def lines(self, root: Path) -> tuple[LinePeak, ...]:
        """Return the lines that pinned most, with their bytes, the largest first."""
        return tuple(
            LinePeak(
                shown_path(line.filename, root),
                line.line,
                qualified(line.filename, line.line) or line.function,
                source_code(line.filename, line.line),
                nbytes,
            )
            for line, nbytes in self._bytes.most_common(MAX_LINES)
            if line is not None
        )
