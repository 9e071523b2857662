"""The parts of a recording of one run; times are microseconds since 1970."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.measurement import Category
    from pytest_gpumem.source_lines import Line


class Tag(NamedTuple):
    """A tensor that was seen in a block, and its category."""

    time: float
    """microseconds since 1970, as all times here"""
    device: int
    address: int
    category: Category
    name: str
    """the tensor's path from the outermost module: "GPT2.h.0.mlp.weight"; "" unknown"""


class Sweep(NamedTuple):
    """Tensors of one category that were seen at one time, not yet as tags: these take longer."""

    time_ns: int
    category: Category
    names: Sequence[str]
    """of each tensor, as :class:`Tag` has them"""
    devices: Sequence[int]
    addresses: Sequence[int]


Known: TypeAlias = "Mapping[tuple[int, int], tuple[Tag, ...]]"
"""live blocks, by device and address, each with the tensors that were seen in it"""


@dataclass(slots=True)
class Call:
    """A call of a module."""

    path: str
    start: float
    grad: bool = True
    """whether autograd recorded it"""
    end: float = float("inf")


@dataclass
class Pass:
    """A backward pass or a step of an optimizer."""

    name: Literal["backward", "optimizer"]
    start: float
    line: Line | None = None
    """the user's line that called it"""
    end: float = float("inf")
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
    sweeps: list[Sweep] = field(default_factory=list)
    taken: list[tuple[float, Known]] = field(default_factory=list)
    """blocks that an earlier run made and this one uses, and from when on"""
    calls: list[Call] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    ours: list[Span] = field(default_factory=list)
    """times in which this package itself allocated"""
    emptied: set[Span] = field(default_factory=set)
    """those in which it emptied the cache, as the step's code asked"""
    cleared: list[Span] = field(default_factory=list)
    """times in which the cuBLAS workspaces were freed"""
    moments: list[float] = field(default_factory=list)
    """each time that a hook ran: a module's call, a pass or a step began or ended"""
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

    def tags(self, device: int) -> Iterator[Tag]:
        """Yield the tensors that were seen on a device, in the order in which they were."""
        for sweep in self.sweeps:
            seen = zip(sweep.names, sweep.devices, sweep.addresses, strict=True)
            for name, index, address in seen:
                if index == device and address:
                    yield Tag(sweep.time_ns / 1000, device, address, sweep.category, name)


def now() -> float:
    """Return the time: microseconds since 1970."""
    return time.time_ns() / 1000


def beginning() -> float:
    """Return the time of a beginning: whole microseconds, as the allocator's history has them.

    So an event right after it has no earlier time.
    """
    return time.time_ns() // 1000
