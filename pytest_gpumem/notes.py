"""Sentences that a reader of a figure should know, each with its kind: code reads the kind alone.

Any sentence can be worded anew, and nothing but its own words changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self


class Severity(IntEnum):
    """How much a note matters, the most first: the order in which reports show notes."""

    CAUSE = 0
    """the note says why the test failed"""
    FIGURE = 1
    """a figure may be wrong"""
    UNHELD = 2
    """something was not compared, or counts in no limit"""
    INFORMATION = 3
    HINT = 4
    """a change that would lower the peak, or a need of the next step"""


class NoteKind(str, Enum):
    """The subject of a note, and how much it matters; JSON has the names of kinds."""

    severity: Severity

    def __new__(cls, name: str, severity: Severity) -> Self:
        """Make a kind."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.severity = severity
        return kind

    HOLDER = "holder", Severity.CAUSE
    """the holders of memory that a test left behind"""
    PINNED = "pinned", Severity.CAUSE
    """which lines pinned host memory that is too much"""
    EDITED = "edited", Severity.CAUSE
    """the edits since the baseline, of which one may be the cause"""
    BOUND = "bound", Severity.CAUSE
    """the figures are a bound: sizes that depend on unknown values are the largest possible"""
    LIMIT = "limit", Severity.CAUSE
    """another limit that was exceeded, the reason why less than a limit was left, or the memory
    from before a part"""

    VALUES = "values", Severity.FIGURE
    """values that the virtual GPU did not compute, and that sizes or branches may depend on"""
    WORKSPACES = "workspaces", Severity.FIGURE
    """a library's workspaces of unknown sizes"""
    STREAMS = "streams", Severity.FIGURE
    """tensors that other streams or collectives use: a GPU may keep them longer"""
    PINNED_COPIES = "pinned copies", Severity.FIGURE
    """pinned memory that a GPU may keep until its copy is done"""
    COMPILATION = "compilation", Severity.FIGURE
    """compiled code: a GPU chooses some kernels by time, and some figures are less certain"""
    TIMING = "timing", Severity.FIGURE
    """kernels that a GPU times, and matrix products that it pads if this is faster"""
    TIMED_PLANS = "timed plans", Severity.FIGURE
    """cuDNN's benchmark mode, in which the first test of a real GPU takes more than later ones"""
    TORCH = "torch", Severity.FIGURE
    """this version of torch was not compared"""
    FRESH_OPTIMIZER = "fresh optimizer", Severity.FIGURE
    """the step was the first of its optimizer, and the next step takes more memory"""
    GARBAGE = "garbage", Severity.FIGURE
    """memory that reference cycles held"""
    EARLIER_MEMORY = "earlier memory", Severity.FIGURE
    """memory of earlier tests that may change the figures"""
    EARLIER_SEGMENTS = "earlier segments", Severity.FIGURE
    """segments of earlier tests, beside which peak reserved may be another one"""
    SLOPE = "slope", Severity.FIGURE
    """figures that are not on the line through batch sizes"""

    UNRECORDED = "unrecorded", Severity.UNHELD
    """the test gets no baseline"""
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
    """where the baseline is, and its versions of torch, CUDA and cuDNN"""
    LEFTOVER = "leftover", Severity.INFORMATION
    """memory of earlier tests, which is not counted"""
    RUN = "run", Severity.INFORMATION
    """a second run, or an error that the test caught"""
    DEVICE = "device", Severity.INFORMATION
    """the device: other processes use it, which of several is the fullest, or it was full"""
    RANK = "rank", Severity.INFORMATION
    """which rank of torchrun the result is from"""
    BREAKDOWN = "breakdown", Severity.INFORMATION
    """how the breakdown of a peak was made"""
    OTHER = "other", Severity.INFORMATION
    """a note that a hook adds"""

    NEXT_STEP = "next step", Severity.HINT
    """how many bytes more the next step takes (see FRESH_OPTIMIZER)"""
    STILL_HELD = "still held", Severity.HINT
    """memory that is no longer needed, and its holder"""
    UNUSED_GRAPH = "unused graph", Severity.HINT
    """activations that are kept for a backward pass, and none comes"""
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
    """Return notes in the order in which reports show them: the most important first."""
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
