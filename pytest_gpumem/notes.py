"""Sentences that a reader of a figure should know, each with a kind.

Code depends only on the kind, so that any sentence can be reworded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self


class Severity(IntEnum):
    """How important a note is, the most important first: the order of notes in reports."""

    CAUSE = 0
    """the note says why the test failed"""
    FIGURE = 1
    """a figure may be wrong"""
    UNCHECKED = 2
    """something was not compared, or is not limited"""
    INFORMATION = 3
    HINT = 4
    """a change that would lower the peak, or memory that the next step needs"""


class NoteKind(str, Enum):
    """The subject of a note, and how much it matters; JSON has the names of kinds."""

    severity: Severity

    def __new__(cls, name: str, severity: Severity) -> Self:
        """Create a kind with its severity."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.severity = severity
        return kind

    HOLDER = "holder", Severity.CAUSE
    """the holders of memory that a test left behind"""
    PINNED = "pinned", Severity.CAUSE
    """lines that pinned host memory over its limit"""
    EDITED = "edited", Severity.CAUSE
    """edits since the baseline, one of which may be the cause"""
    BOUND = "bound", Severity.CAUSE
    """the figures are an upper bound: sizes that depend on unknown values are at their maximum"""
    LIMIT = "limit", Severity.CAUSE
    """details of an exceeded limit or an out-of-memory error: another exceeded limit, why less
    memory was available, memory from before a part, or what the allocator does not report"""
    SERVER = "server", Severity.CAUSE
    """by how much an inference server's KV cache is smaller than in the baseline"""

    VALUES = "values", Severity.FIGURE
    """values that the virtual GPU did not compute, although sizes or branches may depend on them"""
    WORKSPACES = "workspaces", Severity.FIGURE
    """a library's workspaces of unknown sizes"""
    RANGE = "range", Severity.FIGURE
    """the range of peaks, or why there is none"""
    STREAMS = "streams", Severity.FIGURE
    """tensors that other streams or collectives use: a GPU may keep them longer"""
    PINNED_COPIES = "pinned copies", Severity.FIGURE
    """pinned memory that a GPU may keep until copies are done, or make resident although it was not
    written"""
    COMPILATION = "compilation", Severity.FIGURE
    """compiled code: a GPU chooses some kernels by timing, so that some figures are less certain"""
    TIMING = "timing", Severity.FIGURE
    """kernels that a GPU times, and matrix products that are padded if this is faster"""
    TIMED_PLANS = "timed plans", Severity.FIGURE
    """cuDNN's benchmark mode, in which the first test on a real GPU needs more than later tests"""
    TORCH = "torch", Severity.FIGURE
    """CUDA functions that this version of torch links and the virtual GPU lacks"""
    FRESH_OPTIMIZER = "fresh optimizer", Severity.FIGURE
    """the step was the first of its optimizer, and the next step takes more memory"""
    GARBAGE = "garbage", Severity.FIGURE
    """memory that reference cycles held"""
    EARLIER_MEMORY = "earlier memory", Severity.FIGURE
    """memory of earlier tests that may change the figures"""
    EARLIER_SEGMENTS = "earlier segments", Severity.FIGURE
    """segments of earlier tests, which may change peak reserved"""
    SLOPE = "slope", Severity.FIGURE
    """peaks that are not on the line fitted over the batch sizes"""

    UNRECORDED = "unrecorded", Severity.UNCHECKED
    """the test gets no baseline"""
    UNREADABLE = "unreadable baseline", Severity.UNCHECKED
    OUTSIDE = "outside", Severity.UNCHECKED
    """memory that PyTorch's allocator does not count"""
    CHILD_PROCESS = "child process", Severity.UNCHECKED
    """memory of processes that the test started"""
    UNGUARDED = "unguarded", Severity.UNCHECKED
    """a peak that is not compared, or that is beyond its tolerance without failing the test"""

    RECORDED = "recorded", Severity.INFORMATION
    """this run writes the baseline"""
    BASELINE = "baseline", Severity.INFORMATION
    """the baseline's file, toolchain or figures"""
    LEFTOVER = "leftover", Severity.INFORMATION
    """memory of earlier tests, which is not counted"""
    RUN = "run", Severity.INFORMATION
    """a second run, or an error that the test caught"""
    DEVICE = "device", Severity.INFORMATION
    """the device: other processes use it, it is the fullest of several, or it was full"""
    RANK = "rank", Severity.INFORMATION
    """which rank of torchrun the result is from"""
    BREAKDOWN = "breakdown", Severity.INFORMATION
    """how a peak's breakdown was made, what it lacks, or that only cached memory grew"""
    OTHER = "other", Severity.INFORMATION
    """a note that a hook adds"""

    NEXT_STEP = "next step", Severity.HINT
    """additional bytes that the next step needs (see FRESH_OPTIMIZER)"""
    STILL_HELD = "still held", Severity.HINT
    """memory that is no longer needed, and its holder"""
    UNUSED_GRAPH = "unused graph", Severity.HINT
    """activations saved for a backward pass that never runs"""
    AUTOCAST = "autocast", Severity.HINT
    FRAGMENTATION = "fragmentation", Severity.HINT
    TRIAL = "trial", Severity.HINT
    """a batch size or a variant that was tried"""

    __str__ = str.__str__  # str() gives the value in every version of Python


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence about a measurement or a verdict."""

    kind: NoteKind
    text: str
    """a sentence, without a full stop"""

    def __str__(self) -> str:
        return self.text

    @property
    def severity(self) -> Severity:
        """The severity of the note's kind."""
        return self.kind.severity


def notes_of(kind: NoteKind, sentences: Iterable[str]) -> tuple[Note, ...]:
    """Make notes of one kind from sentences."""
    return tuple(Note(kind, sentence) for sentence in sentences)


def ranked(notes: Iterable[Note]) -> list[Note]:
    """Sort notes for reports: the most important first."""
    return sorted(notes, key=lambda note: note.severity)


class Noted:
    """A record with notes; gives their texts and kinds as separate lists for JSON."""

    __slots__ = ()
    notes: tuple[Note, ...]

    @property
    def note_texts(self) -> tuple[str, ...]:
        """The notes' sentences, in the order of ``note_kinds``."""
        return tuple(note.text for note in self.notes)

    @property
    def note_kinds(self) -> tuple[NoteKind, ...]:
        """The notes' kinds, in the order of ``note_texts``."""
        return tuple(note.kind for note in self.notes)


class Hinted(Noted):
    """A record with notes and hints."""

    __slots__ = ()
    hints: tuple[Note, ...]

    @property
    def hint_texts(self) -> tuple[str, ...]:
        """The hints' sentences, in the order of ``hint_kinds``."""
        return tuple(hint.text for hint in self.hints)

    @property
    def hint_kinds(self) -> tuple[NoteKind, ...]:
        """The hints' kinds, in the order of ``hint_texts``."""
        return tuple(hint.kind for hint in self.hints)
