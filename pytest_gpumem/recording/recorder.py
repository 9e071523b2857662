"""Record one run: the allocator's own history, and the tensors that hooks saw meanwhile.

The history (of CUDA: ``torch.cuda.memory._record_memory_history``) has the time and the Python
frames of each allocation; an :class:`Observer` sees what a block is used for. Both use the same
clock (microseconds since 1970). Recording does not change what is allocated.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.recording.allocator_log import AllocatorLog
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.observer import Observer
from pytest_gpumem.recording.recording import Recording, Span, beginning, now
from pytest_gpumem.recording.shared_history import MAX_EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from pytest_gpumem.recording.recording import Known, Tag


class Recorder:
    """Records from ``start`` to ``stop``."""

    def __init__(self, at_moment: Callable[[Recording], None] | None = None) -> None:
        """Store ``at_moment``, which is called when a module call, pass or step begins or ends."""
        self._at_moment = at_moment
        self._recording = Recording()
        self._stack = ExitStack()

    def start(self, plugs: Iterable[tuple[int, int]] = ()) -> None:
        """Start recording; ``plugs`` (device and address) are this package's own blocks."""
        self._recording = Recording(beginning(), plugs=list(plugs))
        VIEW.history.begin(self._stack)
        self._recording.initial_segments = VIEW.snapshot()["segments"]
        self._recording.capability = VIEW.backend.capability()
        self._recording.device_type = VIEW.backend.device_type
        Observer(self._recording, self._at_moment).install(self._stack)

    def known(self, places: Collection[tuple[int, int]]) -> Known:
        """Return the tensors seen so far in each of these live blocks."""
        known: dict[tuple[int, int], tuple[Tag, ...]] = dict.fromkeys(places, ())
        recording = self.so_far() if places else self._recording
        for device in {device for device, _ in places}:
            for block in AllocatorLog.of(recording, device).blocks:
                if block.end is None and (device, block.address) in known:
                    known[device, block.address] = block.tags
        return known

    def reuse(self, known: Known) -> None:
        """Record that this run uses, from now on, blocks that an earlier run allocated."""
        self._recording.reused.append((now(), known))

    def so_far(self) -> Recording:
        """Return the recording so far without stopping it."""
        snapshot = VIEW.snapshot()
        return replace(self._recording, **_history(snapshot))

    def stop(self, *, keep_workspaces: bool = False) -> Recording:
        """Free the cuBLAS workspaces, stop, and return the recording.

        With ``keep_workspaces`` they stay, as a CUDA graph may write to them, and count as "other".
        """
        recording = self._recording
        if not keep_workspaces:
            # A block is known to be a workspace only because it is freed in this span.
            start = beginning()
            VIEW.backend.clear_workspaces()
            recording.cleared.append(Span(start, now()))
        snapshot = VIEW.snapshot()
        self.abandon()
        return replace(recording, snapshot=snapshot, **_history(snapshot))

    def abandon(self) -> None:
        """Stop recording, and drop the history."""
        self._stack.close()

    @contextmanager
    def own_work(self, *, settles: bool = True) -> Iterator[None]:
        """Record the time of the block as this package's own work.

        ``settles`` is False if the block empties the cache for the step's code.
        """
        start = beginning()
        try:
            yield
        finally:
            span = Span(start, now())
            self._recording.own_work.append(span)
            if not settles:
                self._recording.emptied.add(span)


def _history(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Read a recording's fields from a snapshot.

    Taking a snapshot adds an event, and more snapshots are taken in a new process or with a fixture
    of wider scope. All these events but one at the very beginning are dropped, so that readers
    count the same events in any order of tests.
    """
    traces = snapshot["device_traces"]
    return {
        "events": [
            [event for at, event in enumerate(trace) if at == 0 or event["action"] != "snapshot"]
            for trace in traces
        ],
        "settings": snapshot.get("allocator_settings", {}),
        "overflowed": any(len(trace) >= MAX_EVENTS for trace in traces),
    }
