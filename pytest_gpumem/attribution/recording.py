"""What a recording of one run consists of; times are microseconds since 1970."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from pytest_gpumem.measurement import Category
    from pytest_gpumem.source_lines import Line

MOST_EVENTS: Final = 1_000_000
"""allocations and frees that are kept; of more the first are lost, and the recording is no good"""


class Tag(NamedTuple):
    """What a block was seen to be."""

    time: float
    """microseconds since 1970, as all times here"""
    device: int
    address: int
    category: Category
    name: str
    """the tensor's, by its path from the outermost module: "GPT2.h.0.mlp.weight"; "" unknown"""


@dataclass
class Call:
    """A call of a module."""

    path: str
    start: float
    end: float = float("inf")
    grad: bool = True
    """whether autograd recorded it"""


@dataclass
class Pass:
    """A backward pass or a step of an optimizer."""

    name: str
    """"backward" or "optimizer" """
    start: float
    line: Line | None = None
    """the user's line that called it"""
    end: float = float("inf")
    owner: int = 0
    """of an optimizer's step: which one took it"""
    fresh: str = ""
    """of an optimizer's step: its class, if it had no state before"""


class Span(NamedTuple):
    """From when to when."""

    start: float
    end: float


@dataclass
class Recording:
    """All that was recorded."""

    before: list[dict[str, Any]] = field(default_factory=list)
    """the segments and their blocks when it began, as ``_snapshot`` has them"""
    events: list[list[dict[str, Any]]] = field(default_factory=list)
    """the history of each device, as ``_snapshot`` has it"""
    settings: dict[str, Any] = field(default_factory=dict)
    """the allocator's"""
    tags: list[Tag] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    ours: list[Span] = field(default_factory=list)
    """when what was allocated was nobody's but ours"""
    cleared: list[Span] = field(default_factory=list)
    """when the cuBLAS workspaces were freed"""
    plugs: list[tuple[int, int]] = field(default_factory=list)
    """device and address of blocks that were ours when it began"""
    overflowed: bool = False
    autocast: bool = False
    """whether a module was called under CUDA's autocast"""
    batch_norm: bool = False
    """whether a module that trains on statistics of its batch was called"""
    dtypes: set[str] = field(default_factory=set)
    """those of the parameters on CUDA devices: "float32" """
    capability: tuple[int, int] = (0, 0)
    """the first device's"""
    snapshot: dict[str, Any] = field(default_factory=dict)
    """what ``torch.cuda.memory._snapshot`` gave at the end"""


def now() -> float:
    """Return the time: microseconds since 1970."""
    return time.time_ns() / 1000


def beginning() -> float:
    """Return the time of something that begins: whole microseconds, as the history has them.

    What it allocates or frees at once has no earlier time by that.
    """
    return time.time_ns() // 1000
