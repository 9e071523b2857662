"""Keepers of the blocks of a grown peak, found by running the test once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.attribution.keepers import KeeperSearch
from pytest_gpumem.judge.breakdown_diff import extra_blocks
from pytest_gpumem.judge.verdict import Kind, beyond_tolerance
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.explain import Explanations
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner

ALIKE: Final = 3
"""tests in turn with one first cause and the same keepers: after these the next ones with that
cause, which are told as one, are not run once more"""


class KeeperFinder:
    """Finds keepers for the tests of one process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._names: dict[object, list[frozenset[str]]] = {}
        """the names of the keepers of each test that was searched, by its first cause"""

    def add_keepers(
        self,
        item: MarkedItem,
        spec: MemorySpec,
        results: Sequence[Result],
        explanations: Explanations,
    ) -> bool:
        """Run a test once more where its peak grew; return whether keepers were found.

        Args:
            item: the test.
            spec: its declaration.
            results: of the test and its parts.
            explanations: of their peaks; keepers are added to them.
        """
        # These are not run again: a second run would leave more, or other ranks would be missing.
        if current_rank() is not None or spec.steady or spec.max_leak_mib is not None:
            return False
        for result in sorted(results, key=lambda result: bool(result.part)):
            scenes = explanations.scenes.get(result.part, ())
            verdict = result.verdict
            if verdict.kind is not Kind.REGRESSED or not verdict.failed or not verdict.causes:
                continue
            device = beyond_tolerance(verdict.comparisons)[0].device
            baselines = result.breakdowns_before
            if min(len(scenes), len(baselines)) <= device:
                continue
            site = verdict.causes[0].site
            key = site and (site.path, site.function, site.code, site.category)
            alike = self._names.setdefault(key, [])[-ALIKE:]
            if len(alike) == ALIKE and len(set(alike)) == 1:
                return False
            scene = scenes[device]
            extra = extra_blocks(scene.breakdown, baselines[device])
            search = KeeperSearch(scene, extra, self._runner.root)
            if not search.has_candidates:
                return False
            with self._runner.again(item, record=True, at_moment=search.at_moment) as attempt:
                keepers = search.keepers() if attempt.passed else ()
            self._names[key].append(frozenset(keeper.name for keeper in keepers))
            explanations.add_keepers(result.part, device, keepers)
            return bool(keepers)
        return False
