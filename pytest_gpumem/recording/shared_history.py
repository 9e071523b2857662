"""Share PyTorch's history of allocations, of which a process has one, with the test's own code.

A measurement records with settings that serve the test's code too. The test's code sees the events
that its own history would have, and loses none when the measurement begins or ends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager, ExitStack

    Event = dict[str, Any]
    """one entry of ``device_traces`` in ``torch.cuda.memory._snapshot()``"""

CONTEXTS: Final = (None, "state", "alloc", "all")
"""values of the history's ``context``: each records frames for more events than the one before"""
CLEARS, SKIPPED, RECORDS_CUDA = 4, 7, 9
"""indices of other arguments of PyTorch's binding ``_cuda_record_memory_history``"""
MAX_EVENTS: Final = 1_000_000
"""maximum number of events that a history keeps; beyond it the oldest are dropped"""


class HistorySettings(NamedTuple):
    """The settings with which the test's own code switched its history on."""

    context: str | None
    """which events get frames: None, "state", "alloc" or "all" """
    stacks: str
    """which frames these events get: "python", or "all" for those of C++ too"""
    number: int
    """maximum number of events to keep"""
    skipped: tuple[str, ...]
    """actions of the events that the history leaves out"""
    arguments: tuple[Any, ...]

    @classmethod
    def read(cls, arguments: tuple[Any, ...]) -> HistorySettings:
        """Parse the arguments of PyTorch's binding; before torch 2.9 it has only the first four."""
        kind, context, stacks, number, *_ = arguments
        if len(arguments) > RECORDS_CUDA and not arguments[RECORDS_CUDA]:
            number = 0
        elif kind != "all":  # "state": PyTorch keeps one event
            number = 1
        skipped = tuple(arguments[SKIPPED]) if len(arguments) > SKIPPED else ()
        return cls(context, stacks, number, skipped, arguments)

    def filter(self, events: list[Event]) -> list[Event]:
        """Filter the events of a more detailed history down to what this one records."""
        shown = [event for event in events if event["action"] not in self.skipped]
        if CONTEXTS.index(self.context) >= CONTEXTS.index("alloc"):
            return shown
        return [{**event, "frames": []} if "frames" in event else event for event in shown]

    def last(self, events: list[Event]) -> list[Event]:
        """Return the last events, as many as this history keeps."""
        return events[max(0, len(events) - self.number) :]


class SharedHistory:
    """The measurement's running histories, and the one that the test's code switched on."""

    def __init__(
        self,
        notify: Callable[[], object],
        unchanged: Callable[[], AbstractContextManager[None]],
        traces: Callable[[], list[list[Event]]],
        switch: Callable[..., object],
        record: Callable[..., None],
    ) -> None:
        """Store the functions that this object calls.

        Args:
            notify: announces that the history, which is global, is about to be reset.
            unchanged: opens a block in which PyTorch's bindings act as if they were not wrapped.
            traces: returns the real history's events by device.
            switch: PyTorch's real binding, ``_cuda_record_memory_history``.
            record: the backend's Python function that calls the binding, such as
                ``torch.cuda.memory._record_memory_history``. Only CUDA's binding is wrapped: on
                other accelerators the test and the measurement share one history.
        """
        self._notify = notify
        self._unchanged = unchanged
        self._traces = traces
        self._switch = switch
        self._record_history = record
        self._running = 0
        """number of running histories of the measurement"""
        self._of_test: HistorySettings | None = None
        self._test_start = 0
        """when the test's code switched its history on, in microseconds since 1970"""
        self._lost: list[list[Event]] = []
        """by device: the test's events that restarts have dropped from the real history"""
        self._hidden_times: list[tuple[int, int]] = []
        """microseconds since 1970: start and end of each stretch of work for the measurement"""

    @property
    def is_used_by_test(self) -> bool:
        """Whether the test's code has switched its history on."""
        return self._of_test is not None

    @property
    def has_frames_of_cpp(self) -> bool:
        """Whether the test's code requested C++ frames, so that the real history has them."""
        return self._of_test is not None and self._of_test.stacks == "all"

    @property
    def hides_frames_of_blocks(self) -> bool:
        """Whether blocks have frames only because a measurement records them."""
        return bool(self._running) and (self._of_test is None or self._of_test.context is None)

    def hide_since(self, start: int) -> None:
        """Hide from the test's code what happened since ``start``, microseconds since 1970."""
        self._hidden_times.append((start, time.time_ns() // 1000 + 1))

    def begin(self, stack: ExitStack) -> None:
        """Switch the history on until the stack closes, without showing its events to the test."""

        def end() -> None:
            self._notify()
            self._running -= 1
            self._restart()

        self._notify()
        self._running += 1
        self._restart()
        stack.callback(end)

    def _restart(self) -> None:
        """Restart the real history with settings that include every running history's."""
        if self._of_test is not None:
            self._lost = self.shown(self._traces())
        with self._unchanged():
            self._record_history(None)  # drops older events
            self._record()

    def _record(self) -> None:
        """Make PyTorch record for all running histories, without dropping events."""
        of_test = self._of_test
        if not self._running:
            if of_test is not None:
                self._switch(*of_test.arguments)
            return
        if of_test is None:
            self._record_history("all", context="alloc", stacks="python", max_entries=MAX_EVENTS)
            return
        context = max("alloc", of_test.context, key=CONTEXTS.index)
        arguments = list(of_test.arguments[CLEARS:])
        for index, value in {0: False, SKIPPED - CLEARS: [], RECORDS_CUDA - CLEARS: True}.items():
            arguments[index : index + 1] = [value] * (index < len(arguments))
        self._switch("all", context, of_test.stacks, MAX_EVENTS, *arguments)

    def set_by_test(self, *arguments: Any) -> object:  # noqa: ANN401 - the binding's
        """Switch the test's own history on or off; ``arguments`` are the binding's."""
        previous = self._of_test
        self._of_test = HistorySettings.read(arguments) if arguments and arguments[0] else None
        clears = len(arguments) > CLEARS and arguments[CLEARS]
        if previous is None or self._of_test is None or clears:
            self._test_start = time.time_ns() // 1000
            self._lost = []
        if not self._running:
            return self._switch(*arguments)
        self._notify()
        with self._unchanged():
            self._record()
        return None

    def shown(self, traces: list[list[Event]]) -> list[list[Event]]:
        """Return the events of the real history that the test's own history would have."""
        if self._running and self._of_test is None:
            return [[] for _ in traces]
        start = self._test_start if self._running else 0
        shown = []
        for device, events in enumerate(traces):
            earlier = self._lost[device] if device < len(self._lost) else []
            own = [
                event
                for event in events
                if event["time_us"] >= start
                and not any(hidden <= event["time_us"] < end for hidden, end in self._hidden_times)
            ]
            if self._of_test is not None and self._running:
                own = self._of_test.filter(own)
            every = [*earlier, *own]
            shown.append(every if self._of_test is None else self._of_test.last(every))
        return shown


def from_legacy(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Translate arguments of the binding in older versions of torch to those of the current one."""
    enabled, of_state, number, of_events, with_cpp, *more = arguments
    context = "alloc" if of_events else "state" if of_state else None
    return "all" if enabled else None, context, "all" if with_cpp else "python", number, *more
