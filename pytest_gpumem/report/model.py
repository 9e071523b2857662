"""Define the record of a session that every renderer starts from, before wording and layout."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Final

# Imported at run time, because msgspec reads the annotations.
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
"""maximum number of sessions that a suite may be split into"""


@dataclass(frozen=True)
class Shard:
    """One of the sessions among which a suite was split."""

    index: int
    """from 1"""
    count: int


@dataclass(frozen=True)
class Origin:
    """Where and how a session ran: other machines identify the source of its figures by this."""

    commit: str = ""
    """the commit that was checked out; "" outside a git repository"""
    head: str = ""
    """if CI tested a merge of a pull request: the newest commit of the request itself"""
    modified: bool = False
    """whether tracked files, other than baselines, differed from the commit"""
    root: str = ""
    """pytest's root folder, relative to the repository's top: "packages/core"; "" is the top"""
    folder: str = "baselines"
    """the baselines' folder, also relative to the top; "" if it lies outside"""
    unfinished: str = ""
    """why the session did not finish; "" if it did"""
    follow_provenance: bool = False
    """whether a changed toolchain alone also writes a baseline"""
    ranks: int = 0
    """the number of torchrun's ranks; 0 without torchrun"""
    shard: Shard | None = None
    """None if the suite is not known to be split"""
    artifact: str = ""
    """name of the CI artifact that contains the report; "" if unknown"""
    collected: tuple[str, ...] = ()
    """test files with baselines that were collected without an error"""
    unseen: tuple[Key, ...] = ()
    """baselines of tests that these files did not contain, or whose files do not exist"""
    partial: str = ""
    """why stale baselines are unknown; "" if ``unseen`` has them"""


@dataclass(frozen=True)
class OwnOutcome:
    """A phase of a marked test that the test's own code failed or skipped: it has no verdict."""

    nodeid: str
    word: str
    """pytest's word for the outcome: "failed", "error" (in a fixture), "skipped" or "xfailed" """
    message: str
    """the error in one line, or the reason of the skip"""
    text: str = ""
    """the traceback as pytest shows it"""
    part: ClassVar[str] = ""
    """always the whole test; renderers also read the part of a result"""

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
    """A session's results and circumstances."""

    results: tuple[Result, ...] = ()
    updates: UpdateSummary | None = None
    """what happened to the baselines, in a run that updates them"""
    device: str = ""
    """describes the session's device"""
    options: Mapping[str, str] = field(default_factory=dict)
    """the options that affect verdicts, by flag"""
    remarks: tuple[str, ...] = ()
    """sentences about the session, such as on skipped tests or unreadable files"""
    arguments: tuple[str, ...] = ()
    """files and folders on the command line, and options that left tests out; not in JSON"""

    origins: tuple[Origin, ...] = ()
    """the sessions with these results: :attr:`Result.origin` is an index into it"""

    own_outcomes: tuple[OwnOutcome, ...] = ()
    """marked tests that their own code failed or skipped"""

    @property
    def counts(self) -> dict[Kind, int]:
        """The number of results of each kind, in the order of :class:`Kind`, without zeros."""
        return count_kinds(self.results)


def count_kinds(results: Iterable[Result]) -> dict[Kind, int]:
    """Count the results of each kind, in the order of :class:`Kind`, without zeros."""
    counter = Counter(result.verdict.kind for result in results)
    return {kind: counter[kind] for kind in Kind if counter[kind]}


def urgency(result: Result) -> int:
    """Return the sort key of reports: failed results first, then those that failed as expected."""
    failed = result.verdict.failed + (result.verdict.failed and not result.expected)
    return len(Kind) * (2 - failed) + result.verdict.kind.severity


def with_alike_ranks(results: Iterable[Result]) -> list[Result]:
    """Merge the rows of consecutive ranks of a test that have equal results."""
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
    """Return a test's hints, without duplicates.

    Autocast would lower any peak, so its hint is given only where memory is over its limit.
    """
    measurement, verdict = result.measurement, result.verdict
    if measurement is None or verdict.not_of_peak:
        return []
    hints = [hint for attribution in measurement.attributions for hint in attribution.hints]
    if verdict.kind is not Kind.UNDER_LIMIT:
        hints += measurement.hints  # ways to lower the peak
    over = result.device_over_limit is not None
    return [hint for hint in dict.fromkeys(hints) if over or hint.kind is not NoteKind.AUTOCAST]
