"""Keepers of the blocks of a peak that is too high, found in the one run after a failure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import site_rows
from pytest_gpumem.judge.verdict import Kind, beyond_tolerance
from pytest_gpumem.measurement import ExtraBlocks
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.testrun.rerun import ran_again

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.explain.explanations import Explanations
    from pytest_gpumem.explain.keepers import KeeperSearch
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Breakdown, LineKey
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner

ALIKE: Final = 3
"""tests in turn with one first cause and the same keepers: after these the next ones with that
cause, which are told as one, are not run once more"""
NO_MOMENT: Final = (
    "no keeper is named, because no module's call, backward pass or optimizer's step begins or "
    "ends while the blocks are there"
)


class KeeperFinder:
    """Finds keepers for the tests of one process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._names: dict[object, list[frozenset[str]]] = {}
        """the names of the keepers of each test that was searched, by its first cause"""

    def search(
        self, results: Sequence[Result], explanations: Explanations
    ) -> tuple[str, int, KeeperSearch, list[frozenset[str]]] | None:
        """Return the search for the keepers of a peak that is too high; None without one.

        Of a peak that grew the blocks count that the baseline had not, of one over a limit those of
        the largest source lines. After out of memory the peak is of the run that failed.

        Returns:
            the part, the index of its device, the search, and the names that earlier searches with
            this first cause had.
        """
        for result in sorted(results, key=lambda result: bool(result.part)):
            scenes = explanations.scenes.get(result.part, ())
            verdict, baselines = result.verdict, result.breakdowns_before
            if not verdict.failed or not verdict.kind.too_much or verdict.beside:
                continue
            grown = verdict.kind is Kind.REGRESSED
            far = beyond_tolerance(verdict.comparisons)
            device = far[0].device if grown else result.device_over_limit
            if device is None or len(scenes) <= device:
                continue
            scene = scenes[device]
            if grown:
                if not verdict.causes or len(baselines) <= device or far[0].peak == "reserved":
                    continue
                site = verdict.causes[0].site
                extra = extra_blocks(scene.breakdown, baselines[device])
            else:
                sites = [line.site for line in result.held_lines]
                site = next(iter(sites), None)
                extra = {}
                for held in sites:
                    line = held.path, held.function, held.code
                    blocks, nbytes, _ = extra.get(line, (0, 0, 0))
                    extra[line] = ExtraBlocks(blocks + held.blocks, nbytes + held.nbytes)
            key = site and (verdict.kind, site.path, site.function, site.code, site.category)
            names = self._names.setdefault(key, [])
            alike = names[-ALIKE:]
            if len(alike) == ALIKE and len(set(alike)) == 1:
                return None
            from pytest_gpumem.explain.keepers import KeeperSearch

            search = KeeperSearch(scene, extra, self._runner.root)
            return (result.part, device, search, names) if search.has_candidates else None
        return None

    def with_keepers(
        self, item: MarkedItem, results: Sequence[Result], explanations: Explanations
    ) -> Explanations:
        """Run a failed test once more, to find the keepers of its blocks; return these, too."""
        planned = self.search(results, explanations)
        if planned is None:
            return explanations
        part, device, search, names = planned
        attributions = list(explanations.attributions[part])
        told = attributions[device]
        if search.has_moments:
            with self._runner.again(item, record=True, at_moment=search.at_moment) as attempt:
                keepers = search.keepers() if attempt.passed else ()
            names.append(frozenset(keeper.name for keeper in keepers))
            second_run = ran_again("what keeps its blocks") if attempt.ran else None
            attributions[device] = replace(told, keepers=keepers)
        else:
            second_run = None
            note = Note(NoteKind.BREAKDOWN, NO_MOMENT)
            attributions[device] = replace(told, notes=(*told.notes, note))
        return replace(
            explanations,
            attributions={**explanations.attributions, part: tuple(attributions)},
            second_run=second_run,
        )


def extra_blocks(current: Breakdown, baseline: Breakdown) -> dict[LineKey, ExtraBlocks]:
    """Return the blocks that each source line has more than in the baseline, where that is known.

    Blocks count whatever their category is, as that depends on the moment.
    """
    number: Counter[LineKey] = Counter()
    nbytes: Counter[LineKey] = Counter()
    for row in site_rows(current, baseline):
        if row.site is not None and row.baseline_blocks is not None:
            key = row.site.path, row.site.function, row.site.code
            number[key] += row.blocks - row.baseline_blocks
            nbytes[key] += row.difference or 0
    # The baseline tells its unused bytes of all lines together: any of them may be a line's.
    unused = baseline.unsplit or 0
    return {
        key: ExtraBlocks(blocks, nbytes[key], unused)
        for key, blocks in number.items()
        if blocks > 0
    }
