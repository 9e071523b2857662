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

# Imported at run time, because msgspec reads the annotations.
from pytest_gpumem.measurement import Keeper, Signed, Site  # noqa: TC001
from pytest_gpumem.notes import Note, Noted, NoteKind
from pytest_gpumem.sizes import MIB, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

    from pytest_gpumem.measurement import Attribution, BaselineEntry, Breakdown

PeakName = Literal["allocated", "reserved", "pinned"]
PEAKS: tuple[PeakName, ...] = ("allocated", "reserved")
"""peaks of device memory"""
EVERY_PEAK: tuple[PeakName, ...] = (*PEAKS, "pinned")
"""peaks of device memory, and of the process's pinned host memory"""

FigureName = Literal["allocated", "reserved", "per sample", "fixed", "pinned", "host"]
FIGURES: dict[FigureName, str] = {
    "allocated": "peak allocated",
    "reserved": "peak reserved",
    "per sample": "memory per sample",
    "fixed": "fixed memory",
    "pinned": "peak pinned",
    "host": "peak host memory",
}
"""titles of all compared figures; a cause comes before its effect"""
HOST_FIGURES: frozenset[FigureName] = frozenset({"pinned", "host"})
"""figures of the process's host memory"""

DEFAULT_TOLERANCES: dict[PeakName, Tolerance] = {
    # Peak allocated repeats to the byte; less than 1 MiB is not worth a failed test.
    "allocated": Tolerance(relative=Fraction(1, 1000), absolute=1 * MIB),
    # PyTorch's caching allocator reserves a segment of 20 MiB (large_segment_size in
    # c10/core/AllocatorConfig.h, once kLargeBuffer) for a request between 1 and 10 MiB: one byte
    # more in a tensor can move peak reserved by a whole segment.
    "reserved": Tolerance(relative=Fraction(1, 1000), absolute=20 * MIB),
    "pinned": Tolerance(relative=Fraction(1, 1000), absolute=1 * MIB),
}
"""Tolerances if neither marker nor ini sets one; the larger of relative and absolute applies."""

AGAINST_TOLERANCES: dict[PeakName, Tolerance] = {
    # The virtual GPU's maximum error; convolution nets may need more with torch 2.7 and older,
    # whose cuDNN does not report its workspace sizes (README.md).
    peak: Tolerance(relative=Fraction(3, 100), absolute=usual.absolute)
    for peak, usual in DEFAULT_TOLERANCES.items()
}
"""Tolerances for comparisons with another device's baseline (``--gpumem-against``)."""

BASE_COMMIT = "GPUMEM_BASE_COMMIT"
"""environment variable in which ``gpumem compare --git`` passes the baselines' commit"""
UPDATE_OPTION = "--gpumem-update-baselines"

MISSING = "missing"
DECLINED = "switched off (baseline=False)"
NEED_UNKNOWN = "out of memory (the memory that they need is unknown)"
UNCOMPARED_IN_TABLE = frozenset({"", MISSING, DECLINED, NEED_UNKNOWN})
"""reasons for no comparison that the test's row in the table already shows"""

USE_LESS = (
    "a smaller micro-batch with gradient accumulation, torch.autocast, "
    "activation checkpointing (torch.utils.checkpoint), or the model spread over several devices"
)

KEEP_LESS = (
    "to delete the references to the memory of the largest lines once it is used, and to break "
    "reference cycles: most of the peak is neither the model's nor its last pass's"
)
"""remedy for a peak that smaller batches and autocast do not lower"""

LESS_OF: dict[FigureName, str] = {
    "pinned": "smaller buffers that are used again, or memory that is not pinned "
    "(pin_memory=False)",
    "host": "to load or keep less at a time (a part of a checkpoint, or mmap=True)",
}
"""remedies for host memory"""


Tone = Literal["good", "bad", "open"]
"""the colour of a verdict: green, red, or yellow"""


class Kind(str, Enum):
    """The kinds of verdicts, in the order in which reports list their counts."""

    severity: int
    """sort order of reports, and of failed ranks when one result represents all; 0 is the worst"""
    tone: Tone
    mark: str
    """character in a passed test's row, for readers without colours"""
    too_much: bool
    """whether a failure of this kind means that the peak is too high: then its lines, hints and
    keepers are searched for, by a second run if needed, and a snapshot is written"""
    by_baseline: bool
    """whether recording a new baseline resolves such a verdict"""
    refusal: str
    """why the test's figures cannot become a baseline; "" if they can"""

    # value, severity, tone, mark, too_much, by_baseline, refusal. The page of verdicts
    # contains the docstrings: when a verdict is given, and whether the test passes.
    WITHIN = ("within", 9, "good", "✓", False, False, "")
    """no limit is exceeded, and both peaks are within tolerance of the baseline: passes"""
    OVER_BUDGET = ("over budget", 2, "bad", "○", True, False, "it is over its budget")
    """a figure is above a declared limit, such as ``max_allocated_gib``: fails"""
    OUT_OF_MEMORY = ("out of memory", 0, "bad", "○", True, False, "it ran out of memory")
    """a request was refused, by the limit or by the device itself: fails"""
    NO_START = ("no start", 1, "bad", "○", False, False, "its server does not start")
    """an inference server refused to start for lack of memory, or is too close to a limit to
    predict: fails"""
    UNDER_LIMIT = ("under limit", 3, "bad", "○", False, False, "it is under a limit")
    """a part's figure is below ``at_least`` or ``more_than``, or parts are not in the declared
    order: fails"""
    REGRESSED = ("regressed", 5, "bad", "○", True, True, "")
    """a peak, or its growth with the batch size, is above the baseline by more than the tolerance:
    fails"""
    IMPROVED = ("improved", 8, "good", "↓", False, True, "")
    """a peak is below the baseline by more than the tolerance: passes with a note, or fails with
    ``--gpumem-shrinkage=fail``"""
    LEAKED = ("leaked", 4, "bad", "○", False, False, "it leaked")
    """more memory than ``max_leak_mib`` is still allocated after the test, or the memory of a
    ``steady`` test still grows at its end: fails"""
    NO_BASELINE = ("no baseline", 7, "open", "○", False, True, "")
    """there is no baseline of this test: passes with a note; fails in CI, or with
    ``--gpumem-missing-baseline=fail``"""
    INCOMPARABLE = ("incomparable", 6, "open", "○", False, True, "")
    """the baseline is of another device, batch size, rank or number of devices: passes or fails as
    without a baseline. Or its file cannot be read: fails. Or ``--gpumem-provenance`` refuses its
    versions: passes with a note or fails, as that option says"""

    def __new__(cls, value: str, *columns: Any) -> Self:  # noqa: ANN401, D102 - a row of the table
        member = str.__new__(cls, value)
        member._value_ = value
        member.severity, member.tone, member.mark, *further = columns
        member.too_much, member.by_baseline, member.refusal = further
        return member

    @property
    def word(self) -> str:
        """The kind's name in reports."""
        return "ok" if self is Kind.WITHIN else self.value

    __str__ = str.__str__  # the value, in every Python


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of looking up a test's baseline."""

    entry: BaselineEntry | None = None
    """the baseline of this test on this device"""
    other_devices: tuple[str, ...] = ()
    """keys of other devices that have a baseline for this test"""
    error: str | None = None
    """why the baseline file cannot be read: the verdict is then incomparable, and fails"""


@dataclass(frozen=True, slots=True)
class Policy:
    """The session's options for judging."""

    missing_baseline: Literal["note", "fail"] = "note"
    """whether a test without a baseline to compare with passes with a note, or fails"""
    shrinkage: Literal["note", "fail"] = "note"
    """whether a peak below its baseline passes with a note, or fails"""
    tolerance: Tolerance | None = None
    """the tolerance of tests whose marker sets none; None for the default"""
    guard: Literal["both", "allocated"] = "both"
    """which peaks decide the verdict: with "allocated", peak reserved is only shown"""
    updating: bool = False
    """whether this run rewrites baselines: then a difference from one is no failure"""
    against: str = ""
    """key of another device whose baselines to compare with; "" for the measurement's device"""
    provenance: Literal["compare", "note", "fail"] = "compare"
    """what to do if the baseline was made with another toolchain: compare anyway; pass with a note
    if the measurement is beyond tolerance; or fail as incomparable"""

    launcher: tuple[str, ...] = ("pytest",)
    """the first words of a remedy's command: those that start pytest, or the whole command of
    ``gpumem run``; empty if no single command runs the test again"""
    repeated: tuple[str, ...] = ()
    """this session's command-line options that change figures: a remedy's command must repeat them,
    or it would record another device's baselines"""
    base_commit: str = ""
    """the commit to compare with, whose figures are in no file; "" without one"""
    accept: str = ""
    """the command that accepts figures of this session on another machine; "" without one"""

    def tolerance_of(self, peak: PeakName, declared: Tolerance | None) -> Tolerance:
        """Return how far a peak may be from its baseline.

        The marker's tolerance (``declared``) applies only to comparisons on the same device.
        """
        if self.against:
            return self.tolerance or AGAINST_TOLERANCES[peak]
        return declared or self.tolerance or DEFAULT_TOLERANCES[peak]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one device, with its baseline and its budget, in bytes."""

    # Not to be confused with BreakdownRow (a line of a breakdown and of the baseline's),
    # EntryChange (a test in two sets of figures), ToolchainChange (a figure under two toolchains)
    # and CommonChange (several ToolchainChanges).

    device: int
    """index among the test's devices"""
    peak: FigureName
    measured: Signed
    """the figure; after out of memory, the peak of a second run without the limit"""
    baseline: Signed | None = None
    """None if there is no baseline to compare"""
    allowance: int | None = None
    """the tolerance in bytes"""
    budget: int | None = None
    """the tightest declared limit on this figure"""

    @property
    def title(self) -> str:
        """The figure's name in reports."""
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
    """None if the line is unknown"""
    baseline_blocks: int | None = None
    """number of its blocks at the baseline's peak; None if unknown"""
    keepers: tuple[Keeper, ...] = ()
    """keepers of blocks that the baseline did not have, the largest first"""
    reasons: tuple[str, ...] = ()
    """clauses on why it grew: "kept by local variable best (train.py:11), step 1" """
    old_code: str = ""
    """the line's code in the baseline if it was edited; else "" """


LeadKind = Literal["edit", "toolchain", "line", "category", "segment"]


@dataclass(frozen=True, slots=True)
class Lead:
    """The first thing that a report says about a growth: the same in every format."""

    kind: LeadKind
    sentence: str
    """"test_step.py:7 changed: 4096 -> 16384", "torch 2.14.0 -> 2.15.0", "activations +250.00 MiB
    at model.py:29 (Tiny.forward)" """
    path: str = ""
    """file of the source line that it names; "" if it names none"""
    line: int = 0
    place: str = ""
    """its subject alone, which several tests may share: "model.py:29 (Tiny.forward)" """


class Growth(NamedTuple):
    """A figure that grew beyond tolerance, with the records needed to explain it."""

    row: Comparison
    old: Sequence[Breakdown]
    """the baseline's breakdowns, one per device; empty if it has none"""
    new: Sequence[Attribution]
    """the measurement's attributions, one per device; empty if its peaks are not explained"""
    toolchain: Lead | None = None
    """the versions that differ from the baseline's; None if they are equal"""
    of_one_program: bool = True
    """whether ``old`` and ``new`` are of the same code, possibly edited; if not, of two parts of a
    test"""


ExplainGrowth = Callable[[Growth], tuple[tuple[Cause, ...], Lead | None]]
"""returns the causes of a growth, the most important first, and the report's lead"""


def unexplained(growth: Growth) -> tuple[tuple[Cause, ...], Lead | None]:
    """Return no causes; the lead is a changed toolchain, if there is one."""
    return (), growth.toolchain


@dataclass(frozen=True, slots=True)
class UpdateCommand:
    """A command that writes baselines; as text it is quoted for a shell."""

    launcher: tuple[str, ...] = ("pytest",)
    """see :attr:`Policy.launcher`"""
    targets: tuple[str, ...] = ()
    """node IDs, files and folders; empty for all tests"""
    options: tuple[str, ...] = ()
    """see :attr:`Policy.repeated`"""

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
    """one sentence that begins with the cause and its number"""
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[Note, ...] = ()
    """sentences that a reader of the headline should also know"""
    advice: str = ""
    """what to do next, as a clause; ``command`` follows it"""
    command: UpdateCommand | None = None
    """the command to run; None without one"""
    uncompared: str = ""
    """why no baseline was compared: "recorded on virtual-T4 only"; "" if one was"""
    beside: str = ""
    """the other part on which the exceeded limit depends; "" for any other verdict"""
    not_of_peak: bool = False
    """whether the figure beyond its limit is no peak of memory, such as the memory at a part's end:
    reports then show no lines and hints of the peak, which do not explain it, and the test does not
    run again for them"""
    held_to: str = ""
    """key of another device whose baseline was compared; "" for the measurement's device"""
    causes: tuple[Cause, ...] = ()
    """a regression's growth by source lines, the most important first"""
    lead: Lead | None = None
    """the beginning of a regression's headline; None if its cause is unknown"""
    blame: str = ""
    """command that finds out which of several edits is the cause; "" for one edit, or none"""
    accept: str = ""
    """command that accepts this session's figures on another machine, from its report; "" if a new
    baseline is not the remedy, or the report stays on this machine"""

    @property
    def does_not_fit(self) -> bool:
        """Whether the step needs more memory than it may have, or its server did not start."""
        kinds = {Kind.OUT_OF_MEMORY, Kind.OVER_BUDGET, Kind.NO_START}
        return self.kind in kinds and not self.not_of_peak

    @property
    def recorded(self) -> bool:
        """Whether the test had no baseline, and this run writes one."""
        return self.kind is Kind.NO_BASELINE and self.is_written

    @property
    def is_written(self) -> bool:
        """Whether this run writes the baseline, so that a difference from it is no failure."""
        return any(note.kind is NoteKind.RECORDED for note in self.notes)

    @property
    def command_text(self) -> str:
        """The command, quoted for a shell; "" without one."""
        return str(self.command) if self.command else ""

    @property
    def remedy(self) -> str:
        """What to do next, with its command quoted for a shell; "" if nothing."""
        return f"{self.advice} {self.command}" if self.command else self.advice


def beyond_tolerance(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Return the rows beyond tolerance: growth first, and allocated (the cause) before reserved."""
    rows = [row for row in comparisons if row.excess]
    return sorted(
        rows, key=lambda row: (row.excess < 0, list(FIGURES).index(row.peak), -abs(row.excess))
    )
