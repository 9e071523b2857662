"""The workspaces of a virtual GPU whose sizes no library tells: estimates, each with its range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

from pytest_gpumem.devices.base import (
    AllocatorEvent,
    ExtraRequests,
    RangeEnd,
    UncertainSizes,
    Workspace,
)
from pytest_gpumem.devices.virtual.cudnn_notes import MARGIN, ConvolutionWatch
from pytest_gpumem.devices.virtual.extra_requests import ExtraLog
from pytest_gpumem.notes import Note, NoteKind, notes_of

if TYPE_CHECKING:
    from pytest_gpumem.devices.virtual.library import EstimatedLibrary, NativeLibrary


STREAMS: Final = (
    "other streams may use tensors longer (record_stream), at most until the program has waited "
    "for these streams"
)
STREAMS_NOTE: Final = (
    "tensors that other streams use (record_stream) were free as soon as they were dropped; a GPU "
    "may keep them until the program has waited for these streams, so peaks may be higher"
)
"""where no range is told"""


class VirtualWorkspaces:
    """The workspaces since a run began (:class:`WorkspaceSizes`)."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self.convolutions = ConvolutionWatch(library)
        self.extras = ExtraLog()
        self._questions_before: dict[str, int] = {}

    def begin(self) -> None:
        """Begin to watch a run."""
        self.convolutions.begin()
        self.extras.begin()
        self._questions_before = self._library.guesses()
        self._library.forget_allocator_events()

    def take(self, end: RangeEnd) -> None:
        """Take this end of the range of each workspace of unknown size, from now on.

        A test takes the usual sizes; benchmarks run a step at the ends of its range.
        """
        import torch

        self._library.take_sizes(get_args(RangeEnd).index(end))
        if torch.cuda.is_initialized():
            # Plans keep their workspaces. (torch.backends.cuda.cufft_plan_cache keeps the number of
            # devices of its first use.)
            for index in range(torch.cuda.device_count()):
                torch._cufft_clear_plan_cache(index)

    def used(self) -> list[Workspace] | None:
        """See :meth:`pytest_gpumem.devices.base.WorkspaceSizes.used`."""
        return self._library.workspaces()

    def allocator_events(self) -> list[AllocatorEvent] | None:
        """See :meth:`pytest_gpumem.devices.base.WorkspaceSizes.allocator_events`."""
        return self._library.allocator_events()

    def extra_requests(self) -> list[ExtraRequests] | None:
        """See :meth:`pytest_gpumem.devices.base.WorkspaceSizes.extra_requests`."""
        return self.extras.used()

    def pinned_early(self) -> bool:
        """See :meth:`pytest_gpumem.devices.base.WorkspaceSizes.pinned_early`."""
        return self._library.early_answers()[1] > 0

    def uncertain(self) -> UncertainSizes:
        """See :meth:`pytest_gpumem.devices.base.WorkspaceSizes.uncertain`."""
        counts = self.convolutions.size_counts()
        reasons = [estimate.range for estimate in self._estimates() if estimate.range]
        convolutions = self.convolutions.counts()
        ranged = convolutions.ranged
        early, _ = self._library.early_answers()
        # Limits are held to what a library or a GPU chooses, not to an estimate.
        chosen = ranged + counts.bounded
        extra = self.extras.count()
        judged = bool(counts.choices or chosen or early or extra) and counts.larger <= chosen
        if ranged:
            reasons.insert(0, self.convolutions.range_reason())
        if counts.choices:
            reasons.insert(0, "cuDNN's choice in benchmark mode")
        if early:
            reasons.append(STREAMS)
        reasons += self.extras.reasons()
        smaller = counts.smaller + counts.choices
        margin = MARGIN if ranged or counts.choices else 0
        reason = "; ".join(reasons)
        larger = counts.larger + early + extra
        return UncertainSizes(smaller, larger, reason, judged, margin, convolutions.unfit)

    def notes(self) -> list[Note]:
        """Return notes on convolutions, on estimates, and on tensors that other streams use."""
        estimates = (estimate.note for estimate in self._estimates())
        notes = [*notes_of(NoteKind.WORKSPACES, [*self.convolutions.notes(), *estimates])]
        if self._library.early_answers()[0]:
            notes.append(Note(NoteKind.STREAMS, STREAMS_NOTE))
        return notes

    def _estimates(self) -> list[EstimatedLibrary]:
        """Return the libraries that were asked for sizes which their makers do not document."""
        questions, old_questions = self._library.guesses(), self._questions_before
        return [
            library
            for library in self._library.estimated
            if questions[library.name] > old_questions.get(library.name, 0)
        ]
