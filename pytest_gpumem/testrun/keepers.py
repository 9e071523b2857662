"""Keepers of the blocks of a grown peak, found by running the test once more."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from pytest_gpumem.attribution.keepers import KeeperSearch
from pytest_gpumem.judge.breakdown_diff import extra_blocks
from pytest_gpumem.judge.verdict import Kind, beyond_tolerance
from pytest_gpumem.measurement import LineKey
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

_SEARCHED: Final = {Kind.REGRESSED, Kind.OVER_BUDGET, Kind.OUT_OF_MEMORY}


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
        """Run a test once more where its peak is too high; return whether keepers were found.

        Of a peak that grew the blocks count that the baseline had not, of one over a limit those of
        the largest source lines.

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
            verdict, baselines = result.verdict, result.breakdowns_before
            if not verdict.failed or verdict.kind not in _SEARCHED or verdict.beside:
                continue
            grown = verdict.kind is Kind.REGRESSED
            far = beyond_tolerance(verdict.comparisons)
            device = far[0].device if grown else result.device_over_limit
            if device is None or len(scenes) <= device:
                continue
            scene = scenes[device]
            if grown:
                if not verdict.causes or len(baselines) <= device:
                    continue
                site = verdict.causes[0].site
                extra = extra_blocks(scene.breakdown, baselines[device])
            else:
                sites = [line.site for line in result.held_lines]
                site = next(iter(sites), None)
                extra = Counter[LineKey]()
                for held in sites:
                    extra[held.path, held.function, held.code] += held.blocks
            key = site and (verdict.kind, site.path, site.function, site.code, site.category)
            alike = self._names.setdefault(key, [])[-ALIKE:]
            if len(alike) == ALIKE and len(set(alike)) == 1:
                return False
            search = KeeperSearch(scene, extra, self._runner.root)
            if not search.has_candidates:
                return False
            uncapped = verdict.kind is Kind.OUT_OF_MEMORY
            with self._runner.again(
                item, record=True, uncapped=uncapped, at_moment=search.at_moment
            ) as attempt:
                keepers = search.keepers() if attempt.passed else ()
            self._names[key].append(frozenset(keeper.name for keeper in keepers))
            explanations.add_keepers(result.part, device, keepers)
            return bool(keepers)
        return False
