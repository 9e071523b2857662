"""Collect the results of a session's tests from their reports.

Modules that only a result needs are imported once there is one. Under torchrun the ranks' results
are merged: a test's result is the worst rank's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.nodeids import split_nodeid
from pytest_gpumem.session.settings import in_ci
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.baselines.store import NewBaseline
    from pytest_gpumem.judge.result import Outcome, Result
    from pytest_gpumem.report.model import OwnOutcome
    from pytest_gpumem.session.hidden_skip import HiddenSkip


class SessionResults:
    """The results of tests, collected report by report."""

    def __init__(self) -> None:
        self._unread: dict[str, tuple[object, bool]] = {}
        """results as text, and whether they were expected to fail; parsed at the session's end, as
        each becomes thousands of objects"""
        self._read: dict[str, list[Result]] = {}
        self._failed: set[str] = set()
        self._complete: set[str] = set()
        """tests that were torn down"""
        self._outcomes: dict[str, Outcome] = {}
        """outcome by nodeid: "failed" after an error other than a verdict, "xfail" with that
        marker"""
        self.skipped: list[str] = []
        """the reason of each marked test that was skipped because there is no device"""
        self.too_large: list[str] = []
        """the device's memory, as text; one per test that was skipped because it needs more"""
        self.unmeasured: list[str] = []
        """the reason why an unmarked test that an option selected was not measured, one per test:
        there was no device, and the test ran as without the plugin"""
        self.hidden_skips: dict[str, HiddenSkip] = {}
        """tests, and whole files, that were skipped because no GPU was visible, by nodeid"""
        self._own_outcomes: dict[str, dict[str, OwnOutcome]] = {}
        """phases of tests that the tests' own code failed or skipped, by nodeid and phase"""
        self.lost: list[str] = []
        """nodeids of tests whose pytest-xdist worker crashed"""
        self._problems: list[str] = []
        self.failed_elsewhere: list[list[Result]] = []
        """failed results of tests that passed in this process: they fail the session"""
        self.rank_count = 0
        """number of torchrun's ranks that the results come from; 0 without torchrun"""

    def __bool__(self) -> bool:
        skipped = self.skipped, self.too_large, self.unmeasured, self.hidden_skips
        return any((self._unread, self._read, *skipped, self._problems))

    @property
    def all_too_large(self) -> bool:
        """Whether no test was measured, and at least one was too large for the device."""
        return bool(self.too_large) and not (self._unread or self._read)

    @property
    def skip_sentences(self) -> list[str]:
        """A sentence per reason for which marked tests were skipped."""
        sentences = [f"{n} skipped: {reason}" for reason, n in Counter(self.skipped).items()]
        sentences += [
            f"{n} skipped by --gpumem-skip-too-large: {room} (pytest -rs shows each need)"
            for room, n in Counter(self.too_large).items()
        ]
        if self.all_too_large and in_ci():
            sentences.append(
                "no test was measured, and CI is set, so the session fails: run it on a larger "
                "GPU, or select tests that fit this one"
            )
        return sentences

    def add(  # noqa: PLR0913 - what a report says
        self,
        nodeid: str,
        when: str,
        *,
        passed: bool,
        data: object,
        expected: bool = False,
        outcome: Outcome = "",
    ) -> None:
        """Add one report: a test's setup, call or teardown; a rerun starts with a setup.

        ``data`` has the results as text, if the report has any. ``expected`` is whether the test
        failed as its ``xfail`` marker says. ``outcome`` is "xfail" for a test with that marker,
        "failed" for an error besides its verdict.
        """
        if when == "setup":
            self._unread.pop(nodeid, None)
            self._read.pop(nodeid, None)
            self._failed.discard(nodeid)
            self._complete.discard(nodeid)
            self._outcomes.pop(nodeid, None)
            self._own_outcomes.pop(nodeid, None)
        if not passed:
            self._failed.add(nodeid)
        if outcome or not (passed or data):
            self._outcomes[nodeid] = outcome or "failed"
        if when == "teardown":
            self._complete.add(nodeid)
        if data is not None:
            self._unread[nodeid] = data, expected

    def add_own(self, when: str, outcome: OwnOutcome) -> None:
        """Add a phase of a marked test that the test's own code failed or skipped."""
        self._own_outcomes.setdefault(outcome.nodeid, {})[when] = outcome

    @property
    def own_outcomes(self) -> list[OwnOutcome]:
        """The phases of tests that the tests' own code failed or skipped, in order."""
        return [outcome for phases in self._own_outcomes.values() for outcome in phases.values()]

    @property
    def problems(self) -> list[str]:
        """Sentences on results that could not be read, and on ranks that sent none."""
        self._read_pending()
        return self._problems

    @property
    def _by_test(self) -> dict[str, list[Result]]:
        self._read_pending()
        return self._read

    def _read_pending(self) -> None:
        if not self._unread:
            return
        from pytest_gpumem.report.serialize import from_text

        with without_collections():
            while self._unread:
                nodeid = next(iter(self._unread))
                serialized, expected = self._unread.pop(nodeid)
                try:
                    results = from_text(serialized)
                except GpuMemError as error:
                    self._problems.append(str(error))
                    continue
                self._read[nodeid] = [
                    replace(result, expected=True) if expected and result.verdict.failed else result
                    for result in results
                ]

    def results(self) -> list[Result]:
        """Return all results, in the order in which their tests ended."""
        return [result for results in self._by_test.values() for result in results]

    def results_with_outcomes(self) -> list[Result]:
        """Return all results, with their tests' outcomes."""
        ends: dict[str, Outcome] = dict.fromkeys(self._complete, "passed")
        ends |= self._outcomes
        return [
            replace(result, outcome=ends.get(nodeid, "unfinished"))
            for nodeid, results in self._by_test.items()
            for result in results
        ]

    def changes(self) -> list[NewBaseline]:
        """Return the new baselines of the tests that ran and passed."""
        from pytest_gpumem.baselines.store import NewBaseline
        from pytest_gpumem.judge.result import entry_of

        changes = []
        for nodeid, results in self._by_test.items():
            if nodeid in self._failed or nodeid not in self._complete:
                continue
            measured = [result for result in results if result.measurement is not None]
            parts = {
                result.part: entry_of(result, ranks=self.rank_count)
                for result in measured
                if result.baseline
            }
            devices = [result.measurement.device for result in measured if result.measurement]
            if parts:
                changes.append(NewBaseline(devices[0], *split_nodeid(nodeid), parts))
        return changes

    # -- ranks --

    def to_plain(self) -> dict[str, Any]:
        """Return the results and how their tests ended, as plain data for the rank that reports."""
        from pytest_gpumem.report.serialize import to_text

        return {
            "results": {nodeid: to_text(results) for nodeid, results in self._by_test.items()},
            "failed": sorted(self._failed),
            "complete": sorted(self._complete),
            "outcomes": self._outcomes,
        }

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> SessionResults:
        """Rebuild the results that a rank sent as plain data."""
        from pytest_gpumem.report.serialize import from_text

        session_results = cls()
        try:
            session_results._failed = set(map(str, data["failed"]))
            session_results._complete = set(map(str, data["complete"]))
            session_results._outcomes = dict(data["outcomes"])
            for nodeid, serialized in data["results"].items():
                session_results._read[nodeid] = from_text(serialized)
        except (GpuMemError, KeyError, TypeError, AttributeError) as error:
            session_results._problems.append(str(error))
        return session_results

    def join(
        self, data_by_rank: Mapping[int, dict[str, Any] | None], *, shrinkage_fails: bool
    ) -> None:
        """Merge other ranks' results: a test's result is then the worst rank's.

        A test that failed on any rank, or that a rank did not finish, gets no baseline.

        With ``shrinkage_fails``, a test fails if its fullest rank's peak is below the baseline.
        """
        by_test = {nodeid: [results] for nodeid, results in self._by_test.items()}
        self.rank_count = 1 + len(data_by_rank)
        for rank, data in data_by_rank.items():
            if data is None:
                self._problems.append(f"rank {rank} sent no results: no baselines are written")
                continue
            rank_results = self.from_plain(data)
            self._problems += rank_results.problems
            self._failed |= rank_results._failed
            self._complete &= rank_results._complete
            self._outcomes |= rank_results._outcomes
            for nodeid, results in rank_results._by_test.items():
                by_test.setdefault(nodeid, []).append(results)
        for nodeid, results_of_ranks in by_test.items():
            own = self._by_test.get(nodeid, ())
            failed_here = {result.part for result in own if result.verdict.failed}
            results = worst_of_ranks(results_of_ranks, shrinkage_fails=shrinkage_fails)
            self._read[nodeid] = results
            failed = [result for result in results if result.verdict.failed and not result.expected]
            if any(result.part not in failed_here for result in failed):
                self.failed_elsewhere.append(failed)


def worst_of_ranks(
    results_of_ranks: Sequence[Sequence[Result]], *, shrinkage_fails: bool
) -> list[Result]:
    """Return one result for the whole test and for each part: the worst rank's.

    With ``shrinkage_fails``, a test fails if its fullest rank's peak is below the baseline.
    """
    from pytest_gpumem.judge.verdict import Kind
    from pytest_gpumem.notes import Note, NoteKind

    def badness(result: Result) -> tuple[bool, int, int, int]:
        failed = result.verdict.failed
        severity = -result.verdict.kind.severity if failed else 0
        peak = result.measurement.peak_allocated if result.measurement else 0
        return failed, severity, peak, -(result.rank or 0)

    by_part: dict[str, list[Result]] = {}
    for results in results_of_ranks:
        for result in results:
            by_part.setdefault(result.part, []).append(result)
    merged = []
    for results in by_part.values():
        worst = max(results, key=badness)
        verdict = worst.verdict
        if verdict.kind is Kind.IMPROVED and shrinkage_fails:
            verdict = replace(verdict, failed=True)
        if len(results) > 1 and worst.rank is not None:
            why = "failed" if verdict.failed else "used most memory"
            note = Note(NoteKind.RANK, f"these figures are from rank {worst.rank}, which {why}")
            verdict = replace(verdict, notes=(*verdict.notes, note))
        merged.append(replace(worst, verdict=verdict))
    return merged
