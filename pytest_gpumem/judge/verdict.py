"""The records of a verdict and of its input; :mod:`pytest_gpumem.judge.judge` decides.

Everything here is pure. Sizes are bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

# At run time: msgspec reads the annotations.
from pytest_gpumem.measurement import Keeper, Signed, Site  # noqa: TC001
from pytest_gpumem.notes import Note, Noted, NoteKind
from pytest_gpumem.sizes import MIB, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

    from pytest_gpumem.measurement import Attribution, BaselineEntry, Breakdown

PeakName = Literal["allocated", "reserved", "pinned"]
PEAKS: tuple[PeakName, ...] = ("allocated", "reserved")
"""those of a device's memory"""
EVERY_PEAK: tuple[PeakName, ...] = (*PEAKS, "pinned")
"""those of a device's memory, and the peak of the process's pinned host memory"""

FigureName = Literal["allocated", "reserved", "per sample", "fixed", "pinned", "host"]
FIGURES: dict[FigureName, str] = {
    "allocated": "peak allocated",
    "reserved": "peak reserved",
    "per sample": "memory per sample",
    "fixed": "fixed memory",
    "pinned": "peak pinned",
    "host": "peak host memory",
}
"""all figures that are compared, by the titles of reports; a cause stands before its effect"""
HOST_FIGURES: frozenset[FigureName] = frozenset({"pinned", "host"})
"""those of the process's host memory, which no device has"""

DEFAULT_TOLERANCES: dict[PeakName, Tolerance] = {
    # Peak allocated repeats to the byte; less than 1 MiB is not worth a failed test.
    "allocated": Tolerance(relative=Fraction(1, 1000), absolute=1 * MIB),
    # PyTorch's caching allocator takes a segment of 20 MiB (large_segment_size in
    # c10/core/AllocatorConfig.h, once kLargeBuffer) for a request between 1 and 10 MiB: one byte
    # more in a tensor can move peak reserved by a whole segment.
    "reserved": Tolerance(relative=Fraction(1, 1000), absolute=20 * MIB),
    "pinned": Tolerance(relative=Fraction(1, 1000), absolute=1 * MIB),
}
"""How far a peak may be from its baseline where neither marker nor ini says: the larger one."""

AGAINST_TOLERANCES: dict[PeakName, Tolerance] = {
    # The worst that the virtual GPU is to be off; convolution nets may need more with torch 2.7
    # and older, whose cuDNN cannot be asked for its workspaces (README.md).
    peak: Tolerance(relative=Fraction(3, 100), absolute=usual.absolute)
    for peak, usual in DEFAULT_TOLERANCES.items()
}
"""How far a peak may be from another device's baseline (``--gpumem-against``)."""

BASE_COMMIT = "GPUMEM_BASE_COMMIT"
"""the environment variable by which ``gpumem compare --git`` names the commit of the baselines"""
UPDATE_OPTION = "--gpumem-update-baselines"

MISSING = "missing"
DECLINED = "switched off (baseline=False)"
NEED_UNKNOWN = "out of memory (the memory that they need is unknown)"
UNCOMPARED_IN_TABLE = frozenset({"", MISSING, DECLINED, NEED_UNKNOWN})
"""reasons not to be compared with a baseline that a test's row in the table shows as well"""

USE_LESS = (
    "a smaller micro-batch with gradient accumulation, torch.autocast, "
    "activation checkpointing (torch.utils.checkpoint), or the model spread over several devices"
)

KEEP_LESS = (
    "to delete the references to the memory of the largest lines once it is used, and to break "
    "reference cycles: most of the peak is neither the model's nor its last pass's"
)
"""the remedy for a peak that smaller batches and autocast do not lower"""

LESS_OF: dict[FigureName, str] = {
    "pinned": "smaller buffers that are used again, or memory that is not pinned "
    "(pin_memory=False)",
    "host": "to load or keep less at a time (a part of a checkpoint, or mmap=True)",
}
"""remedies for figures of the host"""


Tone = Literal["good", "bad", "open"]
"""the colour of a verdict: green, red, or yellow"""


class Kind(str, Enum):
    """The kinds of verdicts, in the order of counts; JSON has their values, reports their words."""

    word: str
    """the word of reports"""
    severity: int
    """the order of reports, and by which one rank's result stands for all; 0 is the worst"""
    tone: Tone
    mark: str
    """the character of a passed test's row, for readers without colours"""
    too_much: bool
    """whether such a test, where it failed, takes too much memory at its peak"""
    refusal: str
    """why the test's figures make no baseline; "" of others"""

    # value, word, severity, tone, mark, too_much, refusal. The page of verdicts is made of the
    # texts: when a verdict is given, and what the test does then.
    WITHIN = ("within", "ok", 8, "good", "✓", False, "")
    """no limit is exceeded, and both peaks are within tolerance of the baseline: passes"""
    OVER_BUDGET = ("over budget", "over budget", 1, "bad", "○", True, "it is over its budget")
    """a peak or a growth is above a declared limit, such as ``max_allocated_gib``: fails"""
    OUT_OF_MEMORY = ("out of memory", "out of memory", 0, "bad", "○", True, "it ran out of memory")
    """a request was refused, by the limit or by the device itself: fails"""
    UNDER_LIMIT = ("under limit", "under limit", 2, "bad", "○", False, "it is under a limit")
    """a part's figure is below ``at_least`` or ``more_than``, or parts are not in their order:
    fails"""
    REGRESSED = ("regressed", "regressed", 4, "bad", "○", True, "")
    """a peak, or its growth with the batch size, is above the baseline by more than the tolerance:
    fails"""
    IMPROVED = ("improved", "improved", 7, "good", "↓", False, "")
    """a peak is below the baseline by more than the tolerance: passes with a note, or fails with
    ``--gpumem-shrinkage=fail``"""
    LEAKED = ("leaked", "leaked", 3, "bad", "○", False, "it leaked")
    """more memory than ``max_leak_mib`` is still allocated after the test, or the memory of a
    ``steady`` test still grows at its end: fails"""
    NO_BASELINE = ("no baseline", "no baseline", 6, "open", "○", False, "")
    """there is no baseline of this test: passes with a note; fails in CI, or with
    ``--gpumem-missing-baseline=fail``"""
    INCOMPARABLE = ("incomparable", "incomparable", 5, "open", "○", False, "")
    """the baseline is of another device, batch size, rank or number of devices, or its file cannot
    be read, or ``--gpumem-provenance`` refuses its versions: as without a baseline; fails if the
    file cannot be read; passes with a note or fails, as that option says"""

    def __new__(cls, value: str, *columns: Any) -> Self:  # noqa: ANN401, D102 - a row of the table
        member = str.__new__(cls, value)
        member._value_ = value
        member.word, member.severity, member.tone, member.mark, *further = columns
        member.too_much, member.refusal = further
        return member

    @property
    def by_baseline(self) -> bool:
        """Whether a new baseline settles it."""
        return self is not Kind.WITHIN and not self.refusal

    __str__ = str.__str__  # the value, in every Python


@dataclass(frozen=True, slots=True)
class Lookup:
    """The outcome of looking for a test's baseline."""

    entry: BaselineEntry | None = None
    """the baseline of this test on this device"""
    other_devices: tuple[str, ...] = ()
    """the keys of other devices with a baseline of this test"""
    error: str | None = None
    """why the baseline file cannot be read: the verdict is then incomparable, and fails"""


@dataclass(frozen=True, slots=True)
class Policy:
    """The session's options about judging."""

    missing_baseline: Literal["note", "fail"] = "note"
    """whether a test without a baseline to compare with passes with a note, or fails"""
    shrinkage: Literal["note", "fail"] = "note"
    """whether a peak below its baseline passes with a note, or fails"""
    tolerance: Tolerance | None = None
    """for tests without one in the marker"""
    guard: Literal["both", "allocated"] = "both"
    """which peaks a verdict follows: with "allocated", peak reserved is shown and no more"""
    updating: bool = False
    """baselines are about to be rewritten, so that being far from one is no failure"""
    against: str = ""
    """another device's key: measurements are compared with its baselines; "" for their own"""
    provenance: Literal["compare", "note", "fail"] = "compare"
    """for a baseline of another toolchain: compare as with any; or pass with a note where the
    measurement is beyond tolerance; or fail as incomparable"""

    launcher: tuple[str, ...] = ("pytest",)
    """the words by which a command in a remedy starts pytest; empty: no one command does; or all
    words of ``gpumem run``"""
    repeated: tuple[str, ...] = ()
    """options of this session's command line that change figures: a command in a remedy repeats
    them, or it would record another device's baselines"""
    base_commit: str = ""
    """the commit to compare with; its figures are in no file"""
    accept: str = ""
    """the command that accepts figures of this session on another machine; "" without one"""

    def tolerance_of(self, peak: PeakName, declared: Tolerance | None) -> Tolerance:
        """Return how far a peak may be from its baseline.

        The marker's (``declared``) holds for runs on one and the same device only.
        """
        if self.against:
            return self.tolerance or AGAINST_TOLERANCES[peak]
        return declared or self.tolerance or DEFAULT_TOLERANCES[peak]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one device, with its baseline and its budget, in bytes."""

    # Of the words for comparing, this is the one of a test's verdict. A BreakdownRow is a line of a
    # breakdown beside the baseline's; an EntryChange is one test in two sets of baselines; a
    # ToolchainChange is a figure under two toolchains, and several of these are a CommonChange.

    device: int
    """index among the test's devices"""
    peak: FigureName
    measured: Signed
    """the figure; after out of memory, the peak of a second run without the limit"""
    baseline: Signed | None = None
    """None where no baseline can be compared"""
    allowance: int | None = None
    """the tolerance in bytes"""
    budget: int | None = None
    """the tightest declared limit on this peak"""

    @property
    def title(self) -> str:
        """The name in reports."""
        return FIGURES[self.peak]

    @property
    def difference(self) -> int | None:
        """Bytes above the baseline; negative below it."""
        return None if self.baseline is None else self.measured - self.baseline

    @property
    def is_over_budget(self) -> bool:
        """Whether the figure is over its limit."""
        return self.budget is not None and self.measured > self.budget

    @property
    def excess(self) -> int:
        """Bytes beyond tolerance: positive for growth, negative for shrinkage, 0 within."""
        difference = self.difference or 0
        beyond = max(0, abs(difference) - (self.allowance or 0))
        return beyond if difference > 0 else -beyond


@dataclass(frozen=True, slots=True)
class Cause:
    """A part of a peak's growth: the source line that allocates it, and its keepers."""

    nbytes: int
    """bytes above the baseline's"""
    category: str
    site: Site | None = None
    """None where no line is known"""
    baseline_blocks: int | None = None
    """the number of its blocks at the baseline's peak; None where that is not known"""
    keepers: tuple[Keeper, ...] = ()
    """the keepers of blocks that the baseline had not, the largest first"""
    reasons: tuple[str, ...] = ()
    """clauses on why it grew: "kept by local variable best (train.py:11), step 1" """
    old_code: str = ""
    """the line's code in the baseline, where the line was edited"""


LeadKind = Literal["edit", "toolchain", "line", "category", "segment"]


@dataclass(frozen=True, slots=True)
class Lead:
    """The first thing that a report says of a growth: the same in every format."""

    kind: LeadKind
    sentence: str
    """"test_step.py:7 changed: 4096 -> 16384", "torch 2.14.0 -> 2.15.0", "activations +250.00 MiB
    at model.py:29 (Tiny.forward)" """
    path: str = ""
    """of the source line that it names; "" of none"""
    line: int = 0
    place: str = ""
    """its subject alone, which several tests may share: "model.py:29 (Tiny.forward)" """


class Growth(NamedTuple):
    """A figure that grew beyond tolerance, with all records that bear on the reason."""

    row: Comparison
    old: Sequence[Breakdown]
    """of the baseline, one a device; none where it has none"""
    new: Sequence[Attribution]
    """of the measurement, one a device; none where its peaks are not explained"""
    toolchain: Lead | None = None
    """the versions that differ from the baseline's; None where these are the same"""
    of_one_program: bool = True
    """whether both are of the same code, edited perhaps, and not of two parts"""


Why = Callable[[Growth], tuple[tuple[Cause, ...], Lead | None]]
"""tells the causes of a growth, the first cause first, and the lead of a report on the growth"""


def unexplained(growth: Growth) -> tuple[tuple[Cause, ...], Lead | None]:
    """Return that another toolchain measured the baseline, and no cause."""
    return (), growth.toolchain


@dataclass(frozen=True, slots=True)
class UpdateCommand:
    """A command that writes baselines; as text it is quoted for a shell."""

    launcher: tuple[str, ...] = ("pytest",)
    """the words of :attr:`Policy.launcher`"""
    targets: tuple[str, ...] = ()
    """nodeids, files and folders; none: all tests"""
    options: tuple[str, ...] = ()
    """those of :attr:`Policy.repeated`"""

    def __str__(self) -> str:
        words = [*self.launcher, *self.targets, *self.options]
        return shlex.join(words if self.launcher[:1] == ("gpumem",) else [*words, UPDATE_OPTION])

    def of(self, targets: Iterable[str]) -> UpdateCommand:
        """Return this command for other targets."""
        return replace(self, targets=tuple(targets))


@dataclass(frozen=True, slots=True)
class Verdict(Noted):
    """The judgement of one measurement."""

    kind: Kind
    failed: bool
    headline: str
    """one sentence that leads with the cause and its number"""
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[Note, ...] = ()
    """sentences that a reader of the headline should know as well"""
    advice: str = ""
    """the next thing to do, a clause; a command stands behind it"""
    command: UpdateCommand | None = None
    """the command to type"""
    uncompared: str = ""
    """why no baseline was compared: "recorded on virtual-T4 only"; "" where one was"""
    beside: str = ""
    """the other part that tells the limit which was exceeded; "" of any other verdict"""
    of_held: bool = False
    """whether memory at a part's end failed: the lines of the part's peak are no cause of that"""
    held_to: str = ""
    """the key of another device, if that one's baseline was compared"""
    causes: tuple[Cause, ...] = ()
    """of a regression: the growth by source lines, the first cause first"""
    lead: Lead | None = None
    """of a regression: the headline's beginning; None if nothing is known of its cause"""
    blame: str = ""
    """the command that tells which of several edits was the cause; "" of one edit, or none"""
    accept: str = ""
    """the command that accepts this session's figures on another machine, from its report; "" where
    no new baseline is the remedy, or the report stays on this machine"""

    @property
    def recorded(self) -> bool:
        """Whether the test had no baseline, and this run writes it."""
        return self.kind is Kind.NO_BASELINE and self.is_written

    @property
    def is_written(self) -> bool:
        """Whether this run writes the baseline, so that being far from it is no failure."""
        return any(note.kind is NoteKind.RECORDED for note in self.notes)

    @property
    def command_text(self) -> str:
        """The command, quoted for a shell; "" without one."""
        return str(self.command) if self.command else ""

    @property
    def remedy(self) -> str:
        """The next thing to do, with its command, quoted for a shell; "" where nothing is."""
        return f"{self.advice} {self.command}" if self.command else self.advice


def beyond_tolerance(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Return the rows beyond tolerance: growth first; then allocated, which is the cause."""
    rows = [row for row in comparisons if row.excess]
    return sorted(
        rows, key=lambda row: (row.excess < 0, list(FIGURES).index(row.peak), -abs(row.excess))
    )
