"""What each block of memory is: told by what was seen of it, else by when it came and went.

===============  ==================================================================================
parameters       storage of a module's or an optimizer's parameter
buffers          storage of a module's buffer
gradients        storage of a parameter's ``grad``, and DistributedDataParallel's buckets
optimizer state  storage of a tensor in ``optimizer.state``
batch data       storage given to an outermost module, made outside of modules
activations      made in a module's forward and outliving that call (recomputed ones too); made
                 after the first call of a module, outside of modules, and alive when the backward
                 began
temporaries      made in a module's forward and gone when it returned; made by a backward pass or an
                 optimizer's step, and gone when that ended
workspaces       freed with PyTorch's cuBLAS workspaces
other            all else: it is not guessed
===============  ==================================================================================
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final

from pytest_gpumem.attribution.history_replay import Replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.attribution.history_replay import Block, History
    from pytest_gpumem.attribution.recording import Call, Pass, Recording
    from pytest_gpumem.measurement import Category

_SEEN: Final[tuple[Category, ...]] = ("parameters", "buffers", "gradients", "optimizer state")
"""what a tensor's owner tells, the first of them if it has several"""
_DDP: Final = "/torch/nn/parallel/distributed.py"
_MAKE_BUCKETS: Final = {"_ddp_init_helper", "_pre_forward"}
_INFINITY: Final = float("inf")


class Blocks:
    """One device's history, with what each block is."""

    def __init__(self, recording: Recording, index: int) -> None:
        self.recording = recording
        self.calls = Calls(recording.calls)
        plugs = {address for device, address in recording.plugs if device == index}
        segments = [it for it in recording.before if it["device"] == index]
        events = recording.events[index] if index < len(recording.events) else []
        tags = [it for it in recording.tags if it.device == index]
        replay = Replay(segments, recording.settings)
        self.history: History = replay.run(events, tags)
        self.blocks: list[Block] = []
        """without those that only filled rooms"""
        for block in self.history.blocks:
            ours = (
                block.address in plugs
                if block.start < 0
                else any(span.start <= block.time <= span.end for span in recording.ours)
            )
            if not ours:
                self.blocks.append(block)
        self.categories: dict[Block, Category] = {it: self._category(it) for it in self.blocks}

    # -- what a block is --

    def _category(self, block: Block) -> Category:
        seen = {tag.category for tag in block.tags}
        for category in _SEEN:
            if category in seen:
                return category
        if any(span.start <= block.end_time <= span.end for span in self.recording.cleared):
            return "workspaces"
        if _is_bucket(block):
            return "gradients"
        made = None if block.start < 0 else self._made(block)
        if made is not None:
            return made
        if "batch data" in seen:
            return "batch data"
        return "activations" if self._awaits_backward(block) else "other"

    def _made(self, block: Block) -> Category | None:
        """Return what was made in a module's forward or in a pass; None if it was in neither."""
        running = self.pass_at(block.time)
        call = self.calls.innermost(block.time)
        if call is not None and (running is None or call.start > running.start):
            return "activations" if block.end_time > call.end else "temporaries"
        if running is not None:
            return "temporaries" if block.end_time <= running.end else "other"
        return None

    def _awaits_backward(self, block: Block) -> bool:
        """Return whether it was made between a module's forward and the backward, for that."""
        passes = self.recording.passes
        coming = next((it for it in passes if it.start > block.time), None)
        if coming is None or coming.name != "backward" or block.end_time < coming.start:
            return False
        last = max((it.end for it in passes if it.end <= block.time), default=-_INFINITY)
        return self.calls.any_began(last, block.time)

    def pass_at(self, time: float) -> Pass | None:
        """Return the backward pass or the optimizer's step that was under way."""
        passes = self.recording.passes
        return next((it for it in reversed(passes) if it.start <= time <= it.end), None)

    # -- amounts --

    def deltas(self, counted: set[Block]) -> dict[int, list[tuple[Category, int]]]:
        """Return what each event adds to each category; index -1 is what was there before."""
        found: dict[int, list[tuple[Category, int]]] = {}
        for block in self.blocks:
            if block in counted:
                category = self.categories[block]
                found.setdefault(block.start, []).append((category, block.size))
                if block.end is not None:
                    found.setdefault(block.end, []).append((category, -block.size))
        return found


def _is_bucket(block: Block) -> bool:
    """Return whether DistributedDataParallel made it to reduce gradients in.

    It does so as it is made, and before its second forward, by calls of its C++ reducer from these.
    """
    if not block.frames:
        return False
    made_by = block.frames[0]
    return made_by["name"] in _MAKE_BUCKETS and made_by["filename"].endswith(_DDP)


class Calls:
    """The calls of modules, by time."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = sorted(calls, key=lambda it: it.start)
        self._starts = [it.start for it in self._calls]
        self._outer: list[int | None] = []
        """of each call, the index of the one around it"""
        around: list[int] = []
        for index, call in enumerate(self._calls):
            while around and self._calls[around[-1]].end <= call.start:
                around.pop()
            self._outer.append(around[-1] if around else None)
            around.append(index)

    def innermost(self, time: float) -> Call | None:
        """Return the innermost call that was under way."""
        at: int | None = bisect_right(self._starts, time) - 1
        if at == -1:
            return None
        while at is not None and self._calls[at].end < time:
            at = self._outer[at]
        return None if at is None else self._calls[at]

    def outermost(self) -> list[Call]:
        """Return those that were in no other, in their order."""
        pairs = zip(self._calls, self._outer, strict=True)
        return [call for call, outer in pairs if outer is None]

    def any_began(self, start: float, end: float) -> bool:
        """Return whether a module was called between two times."""
        at = bisect_left(self._starts, start)
        return at < len(self._starts) and self._starts[at] < end
