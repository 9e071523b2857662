"""Find the blocks by which memory grew from step to step in the allocator's log."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pytest_gpumem.recording.allocator_log import Block


def grown_blocks(blocks: Iterable[Block], ends: Sequence[float], first: int) -> dict[Block, int]:
    """Return the blocks by which memory grew in the last steps, with the bytes each one added.

    ``ends`` are the times at which steps ended; ``first`` is the index of the step just before
    these last steps.

    Blocks that were allocated in the last steps and are still alive may replace older blocks that
    were freed meanwhile, as the last step's batch replaces an earlier one. So each new block, the
    youngest first, is paired with a freed block of the same Python stack and size, else of the same
    stack, else of the same size, and counts only by the bytes that it is larger.

    Of the blocks that are left, one of the last step may be alive only because a variable still
    refers to it, and a further step would free it. If step ``first`` left a block with the same
    stack and size, that older block counts instead.
    """
    start, end = ends[first], ends[-1]
    came: list[Block] = []
    went: list[Block] = []
    likes: list[Block] = []
    for block in blocks:
        if start < block.time <= end < block.end_time:
            came.append(block)
        elif block.start >= 0 and block.time <= start < block.end_time:
            if block.end_time <= end:
                went.append(block)
            elif block.time > ends[first - 1]:
                likes.append(block)
    came.sort(key=lambda block: -block.time)
    grown = {block: block.requested for block in came}
    for kind in (_stack_and_size, _stack, attrgetter("requested")):
        pairs = _pairs(came, went, kind)
        grown |= {block: block.requested - replaced.requested for block, replaced in pairs.items()}
        came = [block for block in came if block not in pairs]
        went = [*{*went} - {*pairs.values()}]
    last = [block for block in came if block.time > ends[-2]]
    for block, like in _pairs(last, likes, _stack_and_size).items():
        grown[like] = grown.pop(block)
    return {block: nbytes for block, nbytes in grown.items() if nbytes > 0}


def _pairs(
    blocks: Iterable[Block], others: Iterable[Block], key: Callable[[Block], object]
) -> dict[Block, Block]:
    waiting: defaultdict[object, list[Block]] = defaultdict(list)
    for block in others:
        waiting[key(block)].append(block)
    return {block: alike.pop() for block in blocks if (alike := waiting[key(block)])}


def _stack(block: Block) -> tuple[tuple[Any, Any], ...]:
    return tuple((frame["filename"], frame["line"]) for frame in block.frames)


def _stack_and_size(block: Block) -> tuple[object, ...]:
    return _stack(block), block.requested
