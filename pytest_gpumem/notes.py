"""Sentences that a reader of a figure should know, each with its kind: code reads the kind alone.

Any sentence can be worded anew, and nothing but its own words changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self


class Severity(IntEnum):
    """How much a note matters, the most first: the order in which reports show notes."""

    CAUSE = 0
    """it says why the test failed"""
    FIGURE = 1
    """a figure may be wrong"""
    UNHELD = 2
    """something was not compared, or counts for no limit"""
    INFORMATION = 3
    HINT = 4
    """a change that would lower the peak, or that tells the next one"""


class NoteKind(str, Enum):
    """What a note is about, and how much it matters; JSON has the names of kinds."""

    severity: Severity

    def __new__(cls, name: str, severity: Severity) -> Self:
        """Make a kind."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.severity = severity
        return kind

    HOLDER = "holder", Severity.CAUSE
    """what holds memory that a test left behind"""
    PINNED = "pinned", Severity.CAUSE
    """which lines pinned host memory that is too much"""
    LIMIT = "limit", Severity.CAUSE
    """another limit that was exceeded, or the reason why less than a limit was left"""

    VALUES = "values", Severity.FIGURE
    """values that the virtual GPU did not compute, and that sizes or branches may depend on"""
    WORKSPACES = "workspaces", Severity.FIGURE
    """workspaces of a library, of sizes that are not known"""
    STREAMS = "streams", Severity.FIGURE
    """tensors that other streams use, which a GPU may keep for longer"""
    PINNED_COPIES = "pinned copies", Severity.FIGURE
    """pinned memory that a GPU may keep for longer, until it is copied"""
    COMPILATION = "compilation", Severity.FIGURE
    """code of ``torch.compile``: what is picked by time on a GPU, and figures that are less sure"""
    TIMING = "timing", Severity.FIGURE
    """kernels that a GPU times, and products that it pads where that was faster"""
    TORCH = "torch", Severity.FIGURE
    """a torch that this version was not compared with"""
    FRESH_OPTIMIZER = "fresh optimizer", Severity.FIGURE
    """the step was the first of its optimizer: the next one takes more"""
    GARBAGE = "garbage", Severity.FIGURE
    """memory that reference cycles held"""
    EARLIER_MEMORY = "earlier memory", Severity.FIGURE
    """memory of earlier tests that could not be kept in place"""
    SLOPE = "slope", Severity.FIGURE
    """figures that are not on the line through batch sizes"""

    UNRECORDED = "unrecorded", Severity.UNHELD
    """no baseline is made of the test"""
    UNREADABLE = "unreadable baseline", Severity.UNHELD
    OUTSIDE = "outside", Severity.UNHELD
    """memory that PyTorch's allocator does not count"""
    CHILD_PROCESS = "child process", Severity.UNHELD
    """memory of processes that the test started"""
    UNGUARDED = "unguarded", Severity.UNHELD
    """a peak beyond its tolerance that fails no test"""

    RECORDED = "recorded", Severity.INFORMATION
    """this run writes the baseline"""
    BASELINE = "baseline", Severity.INFORMATION
    """where the baseline is, and what it was made with"""
    LEFTOVER = "leftover", Severity.INFORMATION
    """memory of earlier tests, which is not counted"""
    RUN = "run", Severity.INFORMATION
    """a second run, or an error that the test caught"""
    DEVICE = "device", Severity.INFORMATION
    """the device: others that use it, the fullest of several, an allocator that is full"""
    RANK = "rank", Severity.INFORMATION
    """the rank of torchrun's that a result is of"""
    BREAKDOWN = "breakdown", Severity.INFORMATION
    """how the bytes of a peak were told apart"""
    OTHER = "other", Severity.INFORMATION
    """a note of a report that an older version wrote"""

    NEXT_STEP = "next step", Severity.HINT
    """what the next step takes more: a FRESH_OPTIMIZER with its bytes"""
    STILL_HELD = "still held", Severity.HINT
    """memory that is of no more use, and what holds it"""
    AUTOCAST = "autocast", Severity.HINT
    FRAGMENTATION = "fragmentation", Severity.HINT
    TRIAL = "trial", Severity.HINT
    """a batch size or a variant that was tried"""

    __str__ = str.__str__  # the value, in every Python


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence about a measurement or a verdict."""

    kind: NoteKind
    text: str
    """a sentence, without a full stop"""

    def __str__(self) -> str:
        """Return the sentence."""
        return self.text

    @property
    def severity(self) -> Severity:
        """How much it matters."""
        return self.kind.severity


def notes_of(kind: NoteKind, sentences: Iterable[str]) -> tuple[Note, ...]:
    """Return sentences as notes of one kind."""
    return tuple(Note(kind, sentence) for sentence in sentences)


def ranked(notes: Iterable[Note]) -> list[Note]:
    """Return notes in the order in which reports show them: what matters most first."""
    return sorted(notes, key=lambda note: note.severity)


class Noted:
    """A record with notes: their texts and kinds one by one, as JSON has them."""

    __slots__ = ()
    notes: tuple[Note, ...]

    @property
    def note_texts(self) -> tuple[str, ...]:
        """The sentences."""
        return tuple(note.text for note in self.notes)

    @property
    def note_kinds(self) -> tuple[NoteKind, ...]:
        """The kinds, one a sentence."""
        return tuple(note.kind for note in self.notes)


class Hinted(Noted):
    """A record with notes and hints."""

    __slots__ = ()
    hints: tuple[Note, ...]

    @property
    def hint_texts(self) -> tuple[str, ...]:
        """The sentences of hints."""
        return tuple(hint.text for hint in self.hints)

    @property
    def hint_kinds(self) -> tuple[NoteKind, ...]:
        """The kinds of hints, one a sentence."""
        return tuple(hint.kind for hint in self.hints)


def paired(texts: Sequence[str], kinds: Sequence[NoteKind]) -> tuple[Note, ...]:
    """Return notes of their texts and kinds; a text without a kind is of an older report."""
    missing = [NoteKind.OTHER] * (len(texts) - len(kinds))
    return tuple(map(Note, [*kinds, *missing], texts))
