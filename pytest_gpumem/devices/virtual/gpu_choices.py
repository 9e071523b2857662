"""Collects what a real GPU may do differently from the virtual one, with reasons.

These are workspaces whose sizes no library reports, CUDA events that a GPU may reach later, and
extra blocks that a GPU may allocate, depending on timing. The virtual GPU allocates no extra
blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

from pytest_gpumem.devices.base import Alternative, Alternatives, BlockUse, RangeEnd
from pytest_gpumem.devices.virtual.cudnn_notes import CUDNN_MARGIN, ConvolutionWatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.devices.virtual.library import EstimatedLibrary, NativeLibrary

MAX_POSSIBLE: Final = 100_000
"""maximum number of extra blocks stored per run: if there are more, nothing is replayed"""
BENCHMARKED: Final = "cuDNN's choice in benchmark mode"
STREAMS: Final = (
    "other streams may use tensors longer (record_stream), at most until the program has waited "
    "for these streams"
)
STREAMS_NOTE: Final = (
    "tensors that other streams use (record_stream) were free as soon as they were dropped; a GPU "
    "may keep them until the program has waited for these streams, so peaks may be higher"
)
"""the note on tensors that other streams use, if no range is reported"""


class GpuChoices:
    """Collects the :class:`Alternatives` since a run began."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self.convolutions = ConvolutionWatch(library)
        self._possible: list[Alternative] = []
        """extra blocks that a GPU may allocate"""
        self._too_many = False
        self._reasons: dict[str, None] = {}
        """the unknown choices that the extra blocks depend on, in order"""
        self._questions_before: dict[str, int] = {}

    def begin(self) -> None:
        """Start recording a run."""
        self.convolutions.begin()
        self._possible.clear()
        self._too_many = False
        self._reasons.clear()
        self._questions_before = self._library.guesses()
        self._library.forget_allocator_events()

    def assume_sizes(self, end: RangeEnd) -> None:
        """Assume the usual, the smallest or the largest size of each range from now on.

        A test runs with the usual sizes; benchmarks run a step at both ends of its range.
        """
        import torch

        self._library.take_sizes(get_args(RangeEnd).index(end))
        if torch.cuda.is_initialized():
            # Cached cuFFT plans own their workspaces. (torch.backends.cuda.cufft_plan_cache is not
            # used, because it caches the number of devices at its first use.)
            for index in range(torch.cuda.device_count()):
                torch._cufft_clear_plan_cache(index)

    def add_blocks(
        self,
        reason: str,
        sizes: Iterable[int],
        span: tuple[float, float],
        *,
        kept_with: int = 0,
        counted: bool = True,
    ) -> range:
        """Add extra blocks that a GPU may allocate, on the current device and stream.

        Args:
            reason: the unknown choice that the blocks depend on.
            sizes: bytes of each block; 0: no block.
            span: when the blocks begin and end, in microseconds since 1970.
            kept_with: address of a block: the new blocks live until it is freed, at least until the
                span ends; 0: they live until the span ends.
            counted: whether the blocks count towards a peak (:class:`Alternative`).

        Returns:
            the blocks' indices, for ``keep_until``.
        """
        import torch

        first = len(self._possible)
        new_sizes = [size for size in sizes if size]
        if not new_sizes:
            return range(first, first)
        self._reasons[reason] = None
        if first + len(new_sizes) > MAX_POSSIBLE:
            self._too_many = True
            return range(first, first)
        device = torch.cuda.current_device()
        place = device, torch.cuda.current_stream(device).cuda_stream
        began, ended = span
        use: BlockUse = "kept" if kept_with else "spanning"
        self._possible += [
            Alternative(began, use, kept_with, 0, 0, size, ended, place, reason, counted)
            for size in new_sizes
        ]
        return range(first, len(self._possible))

    def keep_until(self, numbers: range, time: float) -> None:
        """Set the end of added blocks, in microseconds since 1970."""
        for number in numbers:
            self._possible[number] = self._possible[number]._replace(ended=time)

    def alternatives(self) -> Alternatives:
        """See :meth:`pytest_gpumem.devices.base.Device.alternatives`."""
        sizes = self.convolutions.size_counts()
        reasons = [estimate.range for estimate in self._estimates() if estimate.range]
        ranged = self.convolutions.plan_counts().ranged
        early, pinned_early = self._library.early_answers()
        # Limits are checked against sizes that a library or a GPU chooses, not against estimates.
        chosen = ranged + sizes.bounded
        possible = bool(self._reasons)
        judged = bool(sizes.choices or chosen or early or possible) and sizes.larger <= chosen
        if ranged:
            reasons.insert(0, self.convolutions.range_reason())
        if sizes.choices:
            reasons.insert(0, BENCHMARKED)
        if early:
            reasons.append(STREAMS)
        workspaces = None if self._too_many else self._library.workspaces()
        return Alternatives(
            blocks=None if workspaces is None else [*workspaces, *self._possible],
            events=self._library.allocator_events(),
            smaller=bool(sizes.smaller or sizes.choices),
            larger=bool(sizes.larger or early or possible),
            reason="; ".join([*reasons, *self._reasons]),
            judged=judged,
            margin=CUDNN_MARGIN if ranged or sizes.choices else 0,
            pinned_early=pinned_early > 0,
        )

    def notes(self) -> list[str]:
        """Return sentences on convolutions, and on libraries whose sizes are estimated."""
        return [*self.convolutions.notes(), *(estimate.note for estimate in self._estimates())]

    def stream_notes(self) -> list[str]:
        """Return a sentence on tensors that other streams use, if there are any."""
        return [STREAMS_NOTE] if self._library.early_answers()[0] else []

    def _estimates(self) -> list[EstimatedLibrary]:
        """Return the libraries that were queried for sizes which their vendors do not document."""
        questions, old_questions = self._library.guesses(), self._questions_before
        return [
            library
            for library in self._library.estimated
            if questions[library.name] > old_questions.get(library.name, 0)
        ]


# -- cuBLAS's workspace, which PyTorch allocates --


def cublas_workspace(capability: tuple[int, int]) -> int:
    """Return the bytes that PyTorch allocates on a card, without CUBLAS_WORKSPACE_CONFIG.

    PyTorch's getChosenWorkspaceSize (aten/src/ATen/cuda/CublasHandlePool.cpp) chooses 4096 * 8 *
    1024 or 4096 * 1024 * 2 + 16 * 1024 * 8; a B200 got the larger one when this was written.
    """
    return 4096 * 8 * 1024 if capability[0] in {9, 10} else 4096 * 2 * 1024 + 16 * 8 * 1024


def chosen_workspace() -> int:
    """Return the bytes of cuBLAS's workspace on the current device."""
    import torch

    get_size = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    return int(get_size()) if get_size else cublas_workspace(torch.cuda.get_device_capability())
