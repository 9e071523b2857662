"""What the controller of a session has been told so far; light, until there is a result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.nodeids import split_nodeid
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpumem.baselines.store import NewBaseline
    from pytest_gpumem.judge.result import Result


class Gathering:
    """The results of tests, as their reports bring them."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[object, bool]] = {}
        """those not read yet: that is done in the end, as they are thousands of objects each"""
        self._known: dict[str, list[Result]] = {}
        self._failed: set[str] = set()
        self._complete: set[str] = set()
        self.skipped: list[str] = []
        """the reason of each marked test that was skipped for want of a device"""
        self._broken: list[str] = []
        self.elsewhere: list[list[Result]] = []
        """results that fail the session, of tests that passed in this process"""
        self._ranks = 0
        """how many ranks of torchrun's they are of; 0: of no such run"""

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._texts or self._known or self.skipped or self._broken)

    @property
    def broken(self) -> list[str]:
        """What is wrong: results that could not be read, ranks that gave none."""
        self._read_texts()
        return self._broken

    @property
    def _results(self) -> dict[str, list[Result]]:
        self._read_texts()
        return self._known

    def _read_texts(self) -> None:
        """Read the results that were told since."""
        if not self._texts:
            return
        from pytest_gpumem.report.serialize import from_text

        with without_collections():
            self._read_all(from_text)

    def _read_all(self, from_text: Callable[[object], list[Result]]) -> None:
        while self._texts:
            nodeid = next(iter(self._texts))
            text, expected = self._texts.pop(nodeid)
            try:
                results = from_text(text)
            except GpuMemError as error:
                self._broken.append(str(error))
                continue
            self._known[nodeid] = [
                replace(it, expected=True) if expected and it.verdict.failed else it
                for it in results
            ]

    def add(
        self, nodeid: str, when: str, *, passed: bool, data: object, expected: bool = False
    ) -> None:
        """Take one report: a test's set-up, call or tear-down; a rerun begins with a set-up.

        Args:
            nodeid: the test.
            when: "setup", "call" or "teardown".
            passed: whether this phase did.
            data: the test's results as text, where the report has them.
            expected: it failed as its ``xfail`` says.
        """
        if when == "setup":
            self._texts.pop(nodeid, None)
            self._known.pop(nodeid, None)
            self._failed.discard(nodeid)
            self._complete.discard(nodeid)
        if not passed:
            self._failed.add(nodeid)
        if when == "teardown":
            self._complete.add(nodeid)
        if data is not None:
            self._texts[nodeid] = data, expected

    # -- ranks --

    def plain(self) -> dict[str, Any]:
        """Return all as plain data, for the rank that makes the report."""
        from pytest_gpumem.report.serialize import to_text

        return {
            "results": {nodeid: to_text(results) for nodeid, results in self._results.items()},
            "failed": sorted(self._failed),
            "complete": sorted(self._complete),
        }

    def join(self, ranks: Mapping[int, dict[str, Any] | None], *, shrinkage_fails: bool) -> None:
        """Take what other ranks have: a test's result is the worst rank's from then on.

        A test that failed in any rank, or that a rank did not bring to its end, gets no baseline.
        """
        from pytest_gpumem.plugin.merging import merged

        found: dict[str, list[list[Result]]] = {
            nodeid: [results] for nodeid, results in self._results.items()
        }
        self._ranks = 1 + len(ranks)
        for rank, data in ranks.items():
            if data is None:
                self.broken.append(f"rank {rank} gave no results: no baselines are written")
                continue
            other = Gathering()
            other.read(data)
            self._broken += other.broken
            self._failed |= other._failed
            self._complete &= other._complete
            for nodeid, results in other._results.items():
                found.setdefault(nodeid, []).append(results)
        for nodeid, of_ranks in found.items():
            own = {it.part for it in self._results.get(nodeid, ()) if it.verdict.failed}
            results = self._results[nodeid] = merged(of_ranks, shrinkage_fails=shrinkage_fails)
            worse = [it for it in results if it.verdict.failed and not it.expected]
            if any(it.part not in own for it in worse):
                self.elsewhere.append(worse)

    def read(self, data: dict[str, Any]) -> None:
        """Take what a rank gave."""
        from pytest_gpumem.report.serialize import from_text

        try:
            self._failed = set(map(str, data["failed"]))
            self._complete = set(map(str, data["complete"]))
            for nodeid, text in data["results"].items():
                self._known[nodeid] = from_text(text)
        except (GpuMemError, KeyError, TypeError, AttributeError) as error:
            self._broken.append(str(error))

    # -- all of them --

    def results(self) -> list[Result]:
        """Return all results, in the order in which their tests ended."""
        return [result for results in self._results.values() for result in results]

    def changes(self) -> list[NewBaseline]:
        """Return what the tests that ran and passed are to have as baselines."""
        from pytest_gpumem.baselines.store import NewBaseline
        from pytest_gpumem.judge.result import entry_of

        found = []
        for nodeid, results in self._results.items():
            if nodeid in self._failed or nodeid not in self._complete:
                continue
            parts = {
                it.part: entry_of(it, ranks=self._ranks)
                for it in results
                if it.baseline and it.measurement
            }
            device = next((it.measurement.device for it in results if it.measurement), None)
            if parts and device is not None:
                found.append(NewBaseline(device, *split_nodeid(nodeid), parts))
        return found
