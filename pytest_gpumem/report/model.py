"""The record of a session that every renderer starts from, before any wording or layout."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Final

# At run time: msgspec reads the annotations.
from pytest_gpumem.baselines.paths import Key  # noqa: TC001
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.nodeids import module_of
from pytest_gpumem.notes import NoteKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.baselines.store import UpdateSummary
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.notes import Note


_RANK: Final = re.compile(r"rank \d{1,7}")
MAX_SHARDS: Final = 100_000
"""sessions among which a suite may be split"""


@dataclass(frozen=True)
class Shard:
    """One of the sessions among which a suite was split."""

    index: int
    """from 1"""
    count: int


@dataclass(frozen=True)
class Origin:
    """Where and how a session ran: by it another machine knows the source of these figures."""

    commit: str = ""
    """that was checked out; "" outside of a git repository"""
    head: str = ""
    """of a merge that CI made of a pull request: the newest commit of the request itself"""
    modified: bool = False
    """whether files that git knows, baselines aside, differed from the commit"""
    root: str = ""
    """pytest's root folder, from the top of the repository: "packages/core"; "" is the top"""
    folder: str = "baselines"
    """the folder of the baselines, from the same; "" of one that lies elsewhere"""
    unfinished: str = ""
    """why the session did not come to its own end; "" where it did"""
    follow_provenance: bool = False
    """whether a baseline is also written for a changed toolchain alone"""
    ranks: int = 0
    """the number of torchrun's ranks; 0 of a plain session"""
    shard: Shard | None = None
    """None where nothing says that the suite was split"""
    artifact: str = ""
    """the name under which CI keeps the report, as far as it is known"""
    collected: tuple[str, ...] = ()
    """test files with baselines that were collected without an error"""
    unseen: tuple[Key, ...] = ()
    """baselines of tests that were not collected in these files, or of files that are gone"""
    partial: str = ""
    """why nothing is known of stale baselines; "" where ``unseen`` tells"""


@dataclass(frozen=True)
class OwnOutcome:
    """A phase of a marked test that ended without a verdict: by an error of the test's own."""

    nodeid: str
    word: str
    """"failed", "error" (of a fixture), "skipped" or "xfailed", as pytest counts the test"""
    message: str
    """the error in one line, or the reason of a skip"""
    text: str = ""
    """the traceback, as pytest shows it"""
    part: ClassVar[str] = ""
    """as of a result: the outcome is the whole test's"""

    @property
    def module(self) -> str:
        """The test's file, as pytest names it."""
        return module_of(self.nodeid)

    @property
    def failed(self) -> bool:
        """Whether pytest counts it as a failure or an error."""
        return self.word in {"failed", "error"}


@dataclass(frozen=True)
class Report:
    """The results of a session, and its circumstances."""

    results: tuple[Result, ...] = ()
    updates: UpdateSummary | None = None
    """the fate of the baselines, in a run that updates them"""
    device: str = ""
    """the session's device, in words"""
    options: Mapping[str, str] = field(default_factory=dict)
    """the options that bear on the verdicts, by name"""
    remarks: tuple[str, ...] = ()
    """sentences about the session: skipped tests, files that cannot be read"""
    arguments: tuple[str, ...] = ()
    """files and folders of its command line, and options that left tests out; not in JSON"""

    origins: tuple[Origin, ...] = ()
    """of the sessions with these results: :attr:`Result.origin` is an index of it"""

    own_outcomes: tuple[OwnOutcome, ...] = ()
    """marked tests that failed, or were skipped, by their own code"""

    @property
    def counts(self) -> dict[Kind, int]:
        """How many results are of each kind, in the order of :class:`Kind`, without zeros."""
        return count_kinds(self.results)


def count_kinds(results: Iterable[Result]) -> dict[Kind, int]:
    """Return how many results are of each kind, in the order of :class:`Kind`, without zeros."""
    counter = Counter(result.verdict.kind for result in results)
    return {kind: counter[kind] for kind in Kind if counter[kind]}


def urgency(result: Result) -> int:
    """Return the sort key of reports: failed results first, then those that failed as expected."""
    failed = result.verdict.failed + (result.verdict.failed and not result.expected)
    return len(Kind) * (2 - failed) + result.verdict.kind.severity


def with_alike_ranks(results: Iterable[Result]) -> list[Result]:
    """Return the results, with one for ranks of a test that follow one another and are alike."""
    shown: list[Result] = []
    first = last = -2
    known = None
    for result in results:
        rank = int(result.part[5:]) if _RANK.fullmatch(result.part) else -2
        facts = result.nodeid, result.verdict, result.measurement and result.measurement.peaks
        if rank == last + 1 and facts == known:
            shown[-1] = replace(shown[-1], part=f"ranks {first}-{rank}")
        else:
            shown.append(result)
            first = rank
        last, known = rank, facts
    return shown


def hints_of(result: Result) -> list[Note]:
    """Return the hints of a test, each once.

    Another data type lowers any peak: that is said where memory is over its limit.
    """
    measurement = result.measurement
    if measurement is None:
        return []
    hints = [hint for attribution in measurement.attributions for hint in attribution.hints]
    verdict = result.verdict
    if not verdict.of_held and verdict.kind is not Kind.UNDER_LIMIT:
        hints += measurement.hints  # on what was reserved before a part, which is too much
    over = result.device_over_limit is not None
    return [hint for hint in dict.fromkeys(hints) if over or hint.kind is not NoteKind.AUTOCAST]
