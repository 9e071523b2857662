"""Recording one run: the allocator's own history, and the tensors that hooks saw meanwhile.

The history (``torch.cuda.memory._record_memory_history``) has the time and the Python frames of
each allocation; the use of a block is seen by an :class:`Observer`. Both clocks are the same
(microseconds since 1970). Nothing changes the memory that is allocated.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from time import time_ns
from typing import TYPE_CHECKING, Any

from pytest_gpumem.allocator_view import MAX_EVENTS, VIEW
from pytest_gpumem.attribution.observer import Observer
from pytest_gpumem.attribution.recording import Known, Recording, Span, Sweep, Taken, beginning, now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class Recorder:
    """Records from ``start`` to ``stop``."""

    def __init__(self, at_moment: Callable[[Recording], None] | None = None) -> None:
        """Record; ``at_moment`` is called at each of the recording's moments."""
        self._at_moment = at_moment
        self._recording = Recording()
        self._stack = ExitStack()

    def start(self, plugs: Iterable[tuple[int, int]] = ()) -> None:
        """Begin to record.

        Args:
            plugs: device and address of the blocks that only fill rooms.
        """
        import torch

        self._recording = Recording(beginning(), plugs=list(plugs))
        VIEW.begin_history(frames=True)
        self._stack.callback(partial(VIEW.end_history, frames=True))
        self._recording.initial_segments = VIEW.snapshot()["segments"]
        self._recording.capability = torch.cuda.get_device_capability(0)
        Observer(self._recording, self._at_moment).install(self._stack)

    def known(self, blocks: Mapping[tuple[int, int], int]) -> Known:
        """Return what is known until now of blocks; of each its device, address and bytes."""
        lies_in = lying_in(blocks)
        sweeps = (seen_where(lies_in, sweep) for sweep in self._recording.sweeps)
        return Known(frozenset(blocks), tuple(sweep for sweep in sweeps if sweep.addresses))

    def take(self, known: Known) -> None:
        """Note that the run uses blocks from now on that an earlier one made."""
        time = time_ns()
        self._recording.taken.append(Taken(time / 1000, known.blocks))
        self._recording.sweeps += [sweep._replace(time_ns=time) for sweep in known.sweeps]

    def so_far(self) -> Recording:
        """Return the recording until now; it goes on."""
        snapshot = VIEW.snapshot()
        return replace(self._recording, **_history(snapshot))

    def stop(self) -> Recording:
        """End and return the recording; the cuBLAS workspaces are freed by this."""
        import torch

        recording = self._recording
        # Only by being freed with the workspaces is a block known for one.
        start = beginning()
        torch._C._cuda_clearCublasWorkspaces()
        recording.cleared.append(Span(start, now()))
        snapshot = VIEW.snapshot()
        self.abandon()
        return replace(recording, snapshot=snapshot, **_history(snapshot))

    def abandon(self) -> None:
        """End the recording, and drop it."""
        self._stack.close()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Note that this package allocates inside, and not the step."""
        start = beginning()
        try:
            yield
        finally:
            self._recording.ours.append(Span(start, now()))


def lying_in(blocks: Mapping[tuple[int, int], int]) -> Callable[[tuple[int, int]], bool]:
    """Return whether a device and an address lie in blocks: of each device, address and bytes."""
    starts = sorted(blocks)

    def lies_in(place: tuple[int, int]) -> bool:
        at = bisect_right(starts, place) - 1
        if at < 0:
            return False
        device, start = starts[at]
        return device == place[0] and place[1] < start + blocks[starts[at]]

    return lies_in


def seen_where(lies_in: Callable[[tuple[int, int]], bool], sweep: Sweep) -> Sweep:
    """Return the part of a sweep that saw tensors in some places."""
    rows = zip(sweep.names, sweep.devices, sweep.addresses, strict=True)
    seen = [row for row in rows if lies_in(row[1:])]
    names, devices, addresses = zip(*seen, strict=True) if seen else ((), (), ())
    return Sweep(sweep.time_ns, sweep.category, names, devices, addresses)


@contextmanager
def history() -> Iterator[list[list[dict[str, Any]]]]:
    """Give a list that has, at the end, the allocator's events of each device, without frames."""
    events: list[list[dict[str, Any]]] = []
    VIEW.begin_history(frames=False)
    try:
        yield events
        events.extend(VIEW.snapshot()["device_traces"])
    finally:
        VIEW.end_history(frames=False)


def _history(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a recording's fields of a snapshot."""
    events = snapshot["device_traces"]
    return {
        "events": events,
        "settings": snapshot.get("allocator_settings", {}),
        "overflowed": any(len(device_events) >= MAX_EVENTS for device_events in events),
    }
