"""The parts of a recording of one run; times are microseconds since 1970.

The notes of a run at each call, pass and step are laid flat, as strings and numbers in one list. Of
lists, tuples and instances that are made and kept, Python's collector would count each one, and
free the reference cycles of the user's code earlier than without a recording.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.measurement import Category, Peak
    from pytest_gpumem.source_lines import Line


_INFINITY: Final = float("inf")


class Tag(NamedTuple):
    """A tensor that was seen in a block, and its category."""

    time: float
    """microseconds since 1970, as all times here"""
    device: int
    address: int
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
    """whether autograd recorded it"""
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


class SpanLog:
    """The calls of modules, or the passes, as a run notes them: with times in nanoseconds."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._begun: list[Any] = []
        """of each four elements: its number and what is noted at its beginning"""
        self._ends: dict[int, int] = {}
        """by its number"""

    def begin(self, name: str, start_ns: int, detail: object) -> int:
        """Note a beginning, and return its number."""
        number = next(self._numbers)
        # In one go: modules may run in several threads, whose rows are not to be mixed.
        self._begun += (number, name, start_ns, detail)
        return number

    def end(self, number: int, end_ns: int) -> None:
        """Note an end."""
        self._ends[number] = end_ns

    def rows(self) -> Iterator[tuple[int, Any, float, Any, float]]:
        """Yield number, name, start (as of beginning()), detail and end of each, as they began."""
        for number, name, start_ns, detail in zip(*[iter(self._begun)] * 4, strict=True):
            end = self._ends.get(number, _INFINITY) / 1000
            yield number, name, start_ns // 1000, detail, end


class TagLog:
    """The tensors that were seen, as a run notes them: many of one category at one time."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        """of each sweep the time in nanoseconds, the category, the number of tensors, and then the
        names, the devices and the addresses of all"""

    def add(
        self,
        time_ns: int,
        category: Category,
        names: Sequence[str],
        devices: Sequence[int],
        addresses: Sequence[int],
    ) -> None:
        """Note tensors that were seen."""
        self._seen += [time_ns, category, len(names), *names, *devices, *addresses]

    def tags(self, device: int) -> Iterator[Tag]:
        """Yield the tensors that were seen on a device, in the order in which they were."""
        at = 0
        while at < len(self._seen):
            time_ns, category, number = self._seen[at : at + 3]
            names = at + 3
            devices = names + number
            addresses = devices + number
            for offset in range(number):
                address = self._seen[addresses + offset]
                if self._seen[devices + offset] == device and address:
                    name = self._seen[names + offset]
                    yield Tag(time_ns / 1000, device, address, category, name)
            at = addresses + number


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
    tag_log: TagLog = field(default_factory=TagLog)
    taken: list[tuple[float, Known]] = field(default_factory=list)
    """blocks that an earlier run made and this one uses, and from when on"""
    call_log: SpanLog = field(default_factory=SpanLog)
    """the path of each module, and whether autograd recorded the call"""
    pass_log: SpanLog = field(default_factory=SpanLog)
    """ "backward" or "optimizer", and the user's line that called it"""
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
    moments: list[int] = field(default_factory=list)
    """each time that a hook ran: a module's call, a pass or a step began or ended; nanoseconds"""
    retained_graphs: dict[int, Line] = field(default_factory=dict)
    """the user's lines of backward passes that were to retain their graphs, by the number of the
    graph's last node"""
    zeroed_gradients: list[Line] = field(default_factory=list)
    """the user's lines that called ``zero_grad(set_to_none=False)``"""
    plugs: list[tuple[int, int]] = field(default_factory=list)
    """device and address of the blocks that this package held when it began"""
    overflowed: bool = False
    autocast: bool = False
    """whether a module was called under CUDA's autocast"""
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

    def moments_until(self, time: float) -> int:
        """Return how many of the moments were not later than a time."""
        return bisect_right(self.moments, time, key=lambda moment: moment / 1000)

    def calls(self) -> list[Call]:
        """Return the calls of modules, in the order in which they began."""
        rows = self.call_log.rows()
        return [Call(path, start, grad, end) for _, path, start, grad, end in rows]

    def passes(self) -> list[Pass]:
        """Return the backward passes and the steps of optimizers, in the order of their starts."""
        passes = {row[0]: Pass(*row[1:]) for row in self.pass_log.rows()}
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
