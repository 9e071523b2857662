"""The data that one run records; times are microseconds since 1970.

What hooks record at each call, pass and step is appended to a few flat lists: Python's collector
would count a list, tuple or instance for each record, and thereby free the reference cycles of
the user's code earlier than without a recording.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.measurement import Category, Peak
    from pytest_gpumem.source_lines import Line


_INFINITY: Final = float("inf")
MOMENT: Final = 5
"""number of list elements per moment: the start or the end of a module call, pass or step"""


class Tag(NamedTuple):
    """A tensor that was seen in a block, and its category."""

    time: float
    """microseconds since 1970, as all times here"""
    address: int
    """unique across all devices and the host, by CUDA's unified virtual addressing"""
    category: Category
    name: str
    """the tensor's path from the outermost module, as "GPT2.h.0.mlp.weight"; "" if unknown"""


Known: TypeAlias = "Mapping[tuple[int, int], tuple[Tag, ...]]"
"""live blocks, by device and address, with the tensors that were seen in each"""


@dataclass(slots=True)
class Call:
    """A call of a module."""

    path: str
    start: float
    grad: bool = True
    """whether autograd records the call, and the call's output has a graph"""
    end: float = _INFINITY


@dataclass
class Pass:
    """A backward pass or a step of an optimizer."""

    name: Literal["backward", "optimizer"]
    start: float
    line: Line | None = None
    """the user's line that started it"""
    end: float = _INFINITY
    fresh: dict[int, str] = field(default_factory=dict)
    """for an optimizer step, the class of each optimizer that stepped, by its id; "" for an
    optimizer that already had state"""


class Span(NamedTuple):
    """A time span, in microseconds since 1970."""

    start: float
    end: float


@dataclass
class Recording:
    """Everything that one run records."""

    began: float = 0
    initial_segments: list[dict[str, Any]] = field(default_factory=list)
    """segments with their blocks at the start, in the format of ``_snapshot``"""
    events: list[list[dict[str, Any]]] = field(default_factory=list)
    """each device's history, in the format of ``_snapshot``"""
    settings: dict[str, Any] = field(default_factory=dict)
    """the allocator's settings"""
    seen: list[Any] = field(default_factory=list)
    """flat: tensors that were seen in blocks, in groups of one category and time. A group is
    nanoseconds, category, number of tensors, then all their names, then all their addresses"""
    reused: list[tuple[float, Known]] = field(default_factory=list)
    """blocks that an earlier run allocated, with the time from which this run uses them"""
    moments: list[Any] = field(default_factory=list)
    """``MOMENT`` elements per hook call: (1) nanoseconds; (2) what begins ("call" of a module,
    "backward", "optimizer") or "end"; (3) the number of what begins or ends; (4) the module's path
    or the user's line; (5) whether autograd records the call or, at the end of an outermost call,
    whether its output has a graph"""
    stepped: list[Any] = field(default_factory=list)
    """three elements per optimizer in a step: the step's number, the optimizer's id, and its class
    ("" if it had state already)"""
    lines: dict[Line, Line] = field(default_factory=dict)
    """the user's lines that started passes, interned: one object per line"""
    own_work: list[Span] = field(default_factory=list)
    """times in which this package itself allocated"""
    emptied: set[Span] = field(default_factory=set)
    """spans of ``own_work`` in which this package emptied the cache for the step's code"""
    cleared: list[Span] = field(default_factory=list)
    """times in which the cuBLAS workspaces were freed"""
    retained_graphs: dict[int, Line] = field(default_factory=dict)
    """lines whose backward pass retained its graph, by sequence number of the graph's last node"""
    zeroed_gradients: list[Line] = field(default_factory=list)
    """user lines that called ``zero_grad(set_to_none=False)``"""
    plugs: list[tuple[int, int]] = field(default_factory=list)
    """device and address of the blocks that this package held at the start"""
    overflowed: bool = False
    """whether a device's history was full, so that its oldest events may be missing"""
    autocast: bool = False
    """whether the devices' autocast was entered, or active when an outermost module was called"""
    batch_norm: bool = False
    """whether a module that trains on batch statistics was called"""
    dtypes: set[str] = field(default_factory=set)
    """dtypes of the parameters on the measured devices, as "float32" """
    device_type: str = "cuda"
    """the type of the measured devices"""
    capability: tuple[int, int] = (0, 0)
    """the first device's compute capability; (0, 0) for an accelerator other than CUDA"""
    snapshot: dict[str, Any] = field(default_factory=dict)
    """the backend's snapshot at the end"""

    def segments(self, device: int) -> list[dict[str, Any]]:
        """Return a device's segments at the start."""
        return [segment for segment in self.initial_segments if segment["device"] == device]

    def tags(self) -> Iterator[Tag]:
        """Yield the tensors that were seen, in order."""
        at = 0
        while at < len(self.seen):
            time_ns, category, number = self.seen[at : at + 3]
            at += 3
            for name, address in zip(
                self.seen[at : at + number], self.seen[at + number : at + 2 * number], strict=True
            ):
                if address:
                    yield Tag(time_ns / 1000, address, category, name)
            at += 2 * number

    @property
    def moment(self) -> int:
        """The number of moments so far."""
        return len(self.moments) // MOMENT

    def time_of(self, moment: int) -> float:
        """Return the time of a moment, counted from 1."""
        return int(self.moments[(moment - 1) * MOMENT]) / 1000

    def moments_until(self, time: float) -> int:
        """Count the moments up to a time."""
        return bisect_right(range(1, self.moment + 1), time, key=self.time_of)

    def _spans(self, *kinds: str) -> Iterator[tuple[int, Any, float, Any, bool, float]]:
        """Yield each call or pass of these kinds, in order.

        The values are its number, kind, start (whole microseconds), subject, grad and end.
        """
        rows = list(zip(*[iter(self.moments)] * MOMENT, strict=True))
        ends = {
            number: (time_ns / 1000, has_graph)
            for time_ns, kind, number, _, has_graph in rows
            if kind == "end"
        }
        for time_ns, kind, number, subject, grad in rows:
            if kind in kinds:
                end, has_graph = ends.get(number, (_INFINITY, True))
                yield number, kind, time_ns // 1000, subject, grad and has_graph, end

    def calls(self) -> list[Call]:
        """Return the module calls, sorted by start."""
        rows = self._spans("call")
        return [Call(path, start, grad, end) for _, _, start, path, grad, end in rows]

    def passes(self) -> list[Pass]:
        """Return the backward passes and optimizer steps, sorted by start."""
        passes = {
            number: Pass(name, start, line, end)
            for number, name, start, line, _, end in self._spans("backward", "optimizer")
        }
        for number, optimizer, name in zip(*[iter(self.stepped)] * 3, strict=True):
            passes[number].fresh.setdefault(optimizer, name)
        return list(passes.values())


def now() -> float:
    """Return the current time in microseconds since 1970."""
    return time.time_ns() / 1000


def beginning() -> float:
    """Return the current time, rounded down to whole microseconds.

    The times in the allocator's history are rounded in the same way: no later event has an earlier
    time.
    """
    return time.time_ns() // 1000


class Recorded(NamedTuple):
    """A finished run, with everything needed to explain its peaks, now or later."""

    recording: Recording | None
    devices: Sequence[int]
    foreign: Sequence[Peak]
    """memory that is not the step's, such as that of earlier tests, one Peak per device"""
    windows: Mapping[str, Sequence[Span]]
    """when each part was measured; "" is the whole test"""
    peaks: Mapping[str, Sequence[Peak]]
