"""The recorder of a step, if the step is recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from pytest_gpumem.devices.cuda_graphs import GRAPHS
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from pytest_gpumem.meter.peaks import Tally
    from pytest_gpumem.meter.plugs import Plugs
    from pytest_gpumem.recording.recording import Known, Recording


class StepRecording:
    """The recorder of a step; if none is running, only ``start`` and ``of_block`` do anything."""

    def __init__(self, plugs: Plugs) -> None:
        self._plugs = plugs
        self._recorder: Recorder | None = None

    def start(self, at_moment: Callable[[Recording], None] | None = None) -> None:
        """Start a new recording in place of the old one, if the allocator records its history.

        ``at_moment`` is called with the recording so far at the start and the end of each module
        call, backward pass and optimizer step.
        """
        self.abandon()  # an error may have left the old one running
        if VIEW.backend.records:
            self._recorder = Recorder(at_moment)
            self._recorder.start(self._plugs.blocks)

    def abandon(self) -> None:
        """End the recording without a result."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abandon()

    @property
    def is_running(self) -> bool:
        """Whether a recording is running."""
        return self._recorder is not None

    def own_work(self, *, settles: bool = True) -> AbstractContextManager[object]:
        """Record what happens inside the block as this package's own work, not the step's."""
        return self._recorder.own_work(settles=settles) if self._recorder else nullcontext()

    def known(self, blocks: Collection[tuple[int, int]]) -> Known:
        """Return the tensors that the recording has seen in live blocks, by (device, address)."""
        return self._recorder.known(blocks) if self._recorder else dict.fromkeys(blocks, ())

    def reuse(self, known: Known) -> None:
        """Record that the step uses, from now on, blocks that an earlier run allocated."""
        if self._recorder is not None:
            self._recorder.reuse(known)

    def so_far(self) -> Recording | None:
        """Return the recording so far, without ending it; None if none is running."""
        return self._recorder.so_far() if self._recorder else None

    def stop(self) -> Recording | None:
        """End the recording and return it; None if none is running."""
        recorder, self._recorder = self._recorder, None
        return recorder.stop(keep_workspaces=bool(GRAPHS.blocks)) if recorder else None

    @contextmanager
    def of_block(self, tally: Tally) -> Iterator[None]:
        """Store a recording in the block's tally: the running one so far, else a new one."""
        if self.is_running:
            yield
            tally.recording = self.so_far()
            return
        self.start()
        try:
            yield
        finally:
            tally.recording = self.stop()
