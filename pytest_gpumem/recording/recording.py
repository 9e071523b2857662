"""The parts of a recording of one run; times are microseconds since 1970.

The notes of a run at each call, pass and step are laid flat, as strings and numbers in one list. Of
lists, tuples and instances that are made and kept, Python's collector would count each one, and
free the reference cycles of the user's code earlier than without a recording.
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
"""elements of a moment in a recording"""


class Tag(NamedTuple):
    """A tensor that was seen in a block, and its category."""

    time: float
    """microseconds since 1970, as all times here"""
    address: int
    """one of any device, or of the host: no two of these have the same addresses (CUDA's unified
    virtual addressing)"""
    category: Category
    name: str
    """the tensor's path from the outermost module: "GPT2.h.0.mlp.weight"; "" unknown"""


Known: TypeAlias = "Mapping[tuple[int, int], tuple[Tag, ...]]"
"""live blocks, by device and address, each with the tensors that were seen in it"""


@dataclass(slots=True)
class Call:
    """A call of a module."""

    path: str
    start: float
    grad: bool = True
    """whether autograd recorded it, and its output has a graph"""
    end: float = _INFINITY


@dataclass
class Pass:
    """A backward pass or a step of an optimizer."""

    name: Literal["backward", "optimizer"]
    start: float
    line: Line | None = None
    """the user's line that called it"""
    end: float = _INFINITY
    fresh: dict[int, str] = field(default_factory=dict)
    """of an optimizer's step: the class of each optimizer that stepped, by its id; "" where it had
    state before"""


class Span(NamedTuple):
    """A stretch of time."""

    start: float
    end: float


@dataclass
class Recording:
    """A whole recording."""

    began: float = 0
    initial_segments: list[dict[str, Any]] = field(default_factory=list)
    """the segments and their blocks when it began, as ``_snapshot`` has them"""
    events: list[list[dict[str, Any]]] = field(default_factory=list)
    """the history of each device, as ``_snapshot`` has it"""
    settings: dict[str, Any] = field(default_factory=dict)
    """the allocator's"""
    seen: list[Any] = field(default_factory=list)
    """tensors, many of one category at one time: nanoseconds, the category, the number of tensors,
    and then the names and the addresses of all"""
    taken: list[tuple[float, Known]] = field(default_factory=list)
    """blocks that an earlier run made and this one uses, and from when on"""
    moments: list[Any] = field(default_factory=list)
    """of each time that a hook ran ``MOMENT`` elements: nanoseconds, what begins (a call of a
    module, "backward", "optimizer") or "end", its number, the path of the module or the user's
    line, and whether autograd records the call; at the end of an outermost call, whether its output
    has a graph"""
    stepped: list[Any] = field(default_factory=list)
    """of each optimizer in a step three elements: the step's number, its id, its class"""
    lines: dict[Line, Line] = field(default_factory=dict)
    """each line once, however many passes it calls"""
    ours: list[Span] = field(default_factory=list)
    """times in which this package itself allocated"""
    emptied: set[Span] = field(default_factory=set)
    """those in which it emptied the cache, as the step's code asked"""
    cleared: list[Span] = field(default_factory=list)
    """times in which the cuBLAS workspaces were freed"""
    retained_graphs: dict[int, Line] = field(default_factory=dict)
    """the user's lines of backward passes that were to retain their graphs, by the number of the
    graph's last node"""
    zeroed_gradients: list[Line] = field(default_factory=list)
    """the user's lines that called ``zero_grad(set_to_none=False)``"""
    plugs: list[tuple[int, int]] = field(default_factory=list)
    """device and address of the blocks that this package held when it began"""
    overflowed: bool = False
    autocast: bool = False
    """whether CUDA's autocast was entered, or on as an outermost module was called"""
    batch_norm: bool = False
    """whether a module that trains on statistics of its batch was called"""
    dtypes: set[str] = field(default_factory=set)
    """data types of the parameters on CUDA devices: "float32" """
    capability: tuple[int, int] = (0, 0)
    """the first device's"""
    snapshot: dict[str, Any] = field(default_factory=dict)
    """the result of ``torch.cuda.memory._snapshot`` at the end"""

    def segments(self, device: int) -> list[dict[str, Any]]:
        """Return a device's segments when it began."""
        return [segment for segment in self.initial_segments if segment["device"] == device]

    def tags(self) -> Iterator[Tag]:
        """Yield the tensors that were seen, in the order in which they were."""
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
        """Return how many moments there were."""
        return len(self.moments) // MOMENT

    def time_of(self, moment: int) -> float:
        """Return the time of a moment, the first of which is 1."""
        return int(self.moments[(moment - 1) * MOMENT]) / 1000

    def moments_until(self, time: float) -> int:
        """Return how many of the moments were not later than a time."""
        return bisect_right(range(1, self.moment + 1), time, key=self.time_of)

    def _spans(self, *kinds: str) -> Iterator[tuple[int, Any, float, Any, bool, float]]:
        """Yield number, kind, start (as of beginning()), subject, grad and end, as they began."""
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
        """Return the calls of modules, in the order in which they began."""
        rows = self._spans("call")
        return [Call(path, start, grad, end) for _, _, start, path, grad, end in rows]

    def passes(self) -> list[Pass]:
        """Return the backward passes and the steps of optimizers, in the order of their starts."""
        passes = {
            number: Pass(name, start, line, end)
            for number, name, start, line, _, end in self._spans("backward", "optimizer")
        }
        for number, optimizer, name in zip(*[iter(self.stepped)] * 3, strict=True):
            passes[number].fresh.setdefault(optimizer, name)
        return list(passes.values())


def now() -> float:
    """Return the time: microseconds since 1970."""
    return time.time_ns() / 1000


def beginning() -> float:
    """Return the time of a beginning: whole microseconds, as the allocator's history has them.

    So an event right after it has no earlier time.
    """
    return time.time_ns() // 1000


class Recorded(NamedTuple):
    """A run that has ended, with all by which its peaks are explained, at once or later."""

    recording: Recording | None
    devices: Sequence[int]
    foreign: Sequence[Peak]
    """memory of other holders, one Peak a device"""
    windows: Mapping[str, Sequence[Span]]
    """when each part was measured; the part "" is the whole test"""
    peaks: Mapping[str, Sequence[Peak]]
