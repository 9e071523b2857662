"""Assign each block to a category: by its tags, else by when it was allocated and freed.

A tag is a tensor that the recording saw in the block, with the category that the tensor implies.

===============  ==================================================================================
parameters       storage of a module's or an optimizer's parameter
buffers          storage of a module's buffer
gradients        storage of a parameter's ``grad``, and DistributedDataParallel's buckets
optimizer state  storage of a tensor in ``optimizer.state``
batch data       storage given to an outermost module, made outside of modules
activations      made in a module's forward and outliving that call (recomputed ones too); made
                 after the first call of a module, outside of modules, and alive when the backward
                 began
temporaries      made in a module's forward and freed before that returned; made by a backward pass
                 or an optimizer's step, and freed before that ended
workspaces       freed with PyTorch's cuBLAS workspaces
other            all else: it is not guessed
===============  ==================================================================================
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Final, Literal

from pytest_gpumem.recording.allocator_log import AllocatorLog
from pytest_gpumem.recording.recording import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.measurement import Category
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Pass, Recording

    PhaseName = Literal["forward", "backward", "optimizer"]

_OWNED: Final[tuple[Category, ...]] = ("parameters", "buffers", "gradients", "optimizer state")
"""categories of tensors that modules or optimizers own; of several, the first one applies"""
_DDP: Final = "/torch/nn/parallel/distributed.py"
_BUCKET_MAKERS: Final = {"_ddp_init_helper", "_pre_forward"}
"""DistributedDataParallel's functions that call its C++ reducer, which allocates the buckets: in
the constructor, and before its second forward, when the order of gradients is known"""
_INFINITY: Final = float("inf")


class Blocks:
    """One device's history, with the category of each block."""

    def __init__(self, recording: Recording, index: int) -> None:
        self.recording = recording
        self.index = index
        self.calls = Calls(recording.calls())
        self.passes = recording.passes()
        segments = recording.segments(index)
        self._initially_reserved: int = sum(segment["total_size"] for segment in segments)
        self.history = AllocatorLog.of(recording, index)
        plugs = {address for device, address in recording.plugs if device == index}
        self.blocks: list[Block] = [
            block
            for block in self.history.blocks
            if not (
                block.address in plugs
                if block.start < 0
                else any(span.start <= block.time <= span.end for span in recording.own_work)
            )
        ]
        """all blocks but this package's own"""
        self.categories: dict[Block, Category] = {
            block: self._category(block) for block in self.blocks
        }

    # -- categories --

    def _category(self, block: Block) -> Category:
        tagged = {tag.category for tag in block.tags}
        maker = block.frames[0] if block.frames else {"name": "", "filename": ""}
        category: Category = "other"
        if owned := [name for name in _OWNED if name in tagged]:
            category = owned[0]
        elif any(span.start <= block.end_time <= span.end for span in self.recording.cleared):
            category = "workspaces"
        elif maker["name"] in _BUCKET_MAKERS and maker["filename"].endswith(_DDP):
            category = "gradients"
        elif (running := self.made_in(block)) is not None:
            if block.end_time <= running.end:
                category = "temporaries"
            elif isinstance(running, Call):
                category = "activations"
        elif "batch data" in tagged:
            category = "batch data"
        elif self._awaits_backward(block):
            category = "activations"
        return category

    def made_in(self, block: Block) -> Call | Pass | None:
        """Return the innermost module call or pass that allocated a block."""
        if block.start < 0:
            return None
        running = self.pass_at(block.time)
        call = self.calls.innermost(block.time)
        if call is not None and (running is None or call.start > running.start):
            return call
        return running

    def _awaits_backward(self, block: Block) -> bool:
        """Return whether a block was allocated after a forward, and alive when a backward began.

        No other pass may lie between that forward and that backward.
        """
        passes = self.passes
        coming = next((running for running in passes if running.start > block.time), None)
        if coming is None or coming.name != "backward" or block.end_time < coming.start:
            return False
        ends = [running.end for running in passes if running.end <= block.time]
        last = max(ends, default=-_INFINITY)
        return self.calls.any_began(last, block.time)

    def pass_at(self, time: float) -> Pass | None:
        """Return the innermost backward pass or optimizer step running at a time."""
        passes = reversed(self.passes)
        return next((running for running in passes if running.start <= time <= running.end), None)

    def phase_at(self, index: int) -> PhaseName | None:
        """Return the phase in which an event happened; None outside of modules and passes."""
        time = self.history.times[index] if index >= 0 else -_INFINITY
        running = self.pass_at(time)
        if running is not None:
            return running.name
        return "forward" if self.calls.innermost(time) is not None else None

    # -- amounts --

    def deltas(self, counted: set[Block]) -> dict[int, list[tuple[Category, int]]]:
        """Return the bytes that each event adds to each category; -1 has the initial memory."""
        deltas: dict[int, list[tuple[Category, int]]] = {}
        for block in self.blocks:
            if block in counted:
                category = self.categories[block]
                deltas.setdefault(block.start, []).append((category, block.size))
                if block.end is not None:
                    deltas.setdefault(block.end, []).append((category, -block.size))
        return deltas

    def totals(self, deltas: dict[int, list[tuple[Category, int]]], initial: int) -> list[int]:
        """Return the bytes allocated before the first event and after each one."""
        total = initial
        totals = []
        for index in range(-1, len(self.history.times)):
            total += sum(size for _, size in deltas.get(index, ()))
            totals.append(total)
        return totals

    def reserved(self, index: int) -> int:
        """Return the bytes that the allocator had reserved after an event."""
        grown = self.history.reserved[index] if index >= 0 else 0
        return self._initially_reserved + grown


def snapshot_with_categories(recording: Recording) -> dict[str, Any]:
    """Return a recording's snapshot with the category of each block that the run allocated.

    The category is in the event's ``user_metadata``, which https://pytorch.org/memory_viz shows,
    after what the program's own ``_set_memory_metadata`` has written there.
    """
    categories: dict[int, Category] = {}
    for device, events in enumerate(recording.events):
        for block, category in Blocks(recording, device).categories.items():
            if block.start >= 0:
                categories[id(events[block.start])] = category

    def described(event: dict[str, Any]) -> dict[str, Any]:
        category = categories.get(id(event))
        if category is None or event["action"] != "alloc":
            return event
        own = event.get("user_metadata")
        return {**event, "user_metadata": f"{own}; {category}" if own else category}

    snapshot = recording.snapshot
    traces = [[described(event) for event in trace] for trace in snapshot["device_traces"]]
    return {**snapshot, "device_traces": traces}


class Calls:
    """Module calls, searchable by time."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = sorted(calls, key=lambda call: call.start)
        self._starts = [call.start for call in self._calls]
        self._outer: list[int | None] = []
        """the index of the enclosing call, for each call"""
        around: list[int] = []
        for index, call in enumerate(self._calls):
            while around and self._calls[around[-1]].end <= call.start:
                around.pop()
            self._outer.append(around[-1] if around else None)
            around.append(index)

    def innermost(self, time: float) -> Call | None:
        """Return the innermost call running at a time."""
        at: int | None = bisect_right(self._starts, time) - 1
        if at == -1:
            return None
        while at is not None and self._calls[at].end < time:
            at = self._outer[at]
        return None if at is None else self._calls[at]

    def outermost(self) -> list[Call]:
        """Return the calls that no other call encloses, in order."""
        pairs = zip(self._calls, self._outer, strict=True)
        return [call for call, outer in pairs if outer is None]

    def any_began(self, start: float, end: float) -> bool:
        """Return whether a module call began between two times."""
        at = bisect_left(self._starts, start)
        return at < len(self._starts) and self._starts[at] < end
