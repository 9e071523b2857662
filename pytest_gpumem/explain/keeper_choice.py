"""Choose the keepers that caused a line's growth.

A baseline has the number and the bytes of a line's blocks, but not their keepers. So a keeper is
certain only if the growth cannot be made up of other keepers' blocks. To find that out, sums of the
blocks' sizes are tried. They are needed for a line that allocates for several keepers, as a helper
function does: of blocks of 5, 4 and 5 MiB, only the second makes a growth of one block of 4 MiB.
Without sums, a report could often only say that one of the line's keepers made the growth. Sizes
are bytes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.measurement import ExtraBlocks

MAX_STATES: Final = 20_000
"""number of (number of blocks, bytes) states after which a search gives up"""
MAX_UNSPLIT: Final = MIB
"""bytes by which blocks of equal requests may differ: the allocator splits off no smaller
remainder"""
MAX_OTHERS: Final = 0.75
"""where sizes do not decide, a keeper is certain if the blocks of all others make up at most this
share of the growth"""
MAX_ALIKE: Final = 3
"""maximum number of keepers that are named together if any of them may have made the growth"""


class KeptBlock(NamedTuple):
    """A block that a source line allocated and that was alive at the peak."""

    keeper: str
    """the keeper's name; "" if nothing with a name keeps the block"""
    nbytes: int
    unsplit: int
    """bytes beyond the request"""
    earlier: bool
    """whether a step before that of the peak allocated it"""


class NamedKeeper(NamedTuple):
    """A keeper with its blocks; "x or y" if only one of several keepers made the growth."""

    name: str
    blocks: tuple[int, ...]
    """indices into the line's blocks"""


def choices(blocks: Sequence[KeptBlock], extra: ExtraBlocks) -> list[NamedKeeper]:
    """Return the keepers that caused the growth of one line.

    If sizes do not decide, prefer blocks that earlier steps allocated: blocks of the set-up and of
    the peak's own step are alive at the peak even if nothing grew. If that does not decide either,
    up to three names are joined: "x or y".
    """
    every = range(len(blocks))
    earlier = [at for at in every if blocks[at].earlier]
    certain = _certain(blocks, every, extra)
    if not certain and _made(blocks, earlier, extra) is not None:
        certain = _certain(blocks, earlier, extra)
    if certain:
        return [choice for choice in certain if choice.name]
    # Blocks of earlier steps alone may be too few or too small to make up the growth.
    is_short = len(earlier) < extra.blocks or _bytes(blocks, earlier) + MAX_UNSPLIT < extra.nbytes
    among = every if is_short else earlier
    names = dict.fromkeys(blocks[at].keeper for at in (*earlier, *reversed(among)))
    if "" in names or len(names) > MAX_ALIKE:
        return []
    return [NamedKeeper(" or ".join(names), _until(blocks, among, extra.nbytes))]


def _certain(
    blocks: Sequence[KeptBlock], among: Collection[int], extra: ExtraBlocks
) -> list[NamedKeeper]:
    """Return the keepers whose blocks are needed to make up the growth."""
    made = _made(blocks, among, extra)
    certain = []
    for name in dict.fromkeys(blocks[at].keeper for at in among):
        own = [at for at in among if blocks[at].keeper == name]
        others = [at for at in among if blocks[at].keeper != name]
        if made is not None and _made(blocks, others, extra) is None:
            left = Counter({size: made[name, size] for _, size in made})
            chosen = []
            for at in own:
                if left[_requested(blocks[at])]:
                    left[_requested(blocks[at])] -= 1
                    chosen.append(at)
            certain.append(NamedKeeper(name, tuple(chosen)))
        # No blocks add up to the growth: blocks of the baseline are gone, or have other sizes. This
        # keeper is certain nevertheless if the blocks of all others are too few or too small.
        elif made is None and (
            len(others) <= extra.blocks * MAX_OTHERS
            or _bytes(blocks, others) <= extra.nbytes * MAX_OTHERS
        ):
            certain.append(NamedKeeper(name, _until(blocks, own, extra.nbytes)))
    return certain


def _made(
    blocks: Sequence[KeptBlock], among: Collection[int], extra: ExtraBlocks
) -> Counter[tuple[str, int]] | None:
    """Return how many blocks of each keeper and size make up the growth.

    None if no blocks do, or if there are too many possibilities.
    """
    total = sum(map(_requested, blocks))
    held_before = sum(block.nbytes for block in blocks) - extra.nbytes
    most = total - held_before + extra.unused
    least = total - held_before
    kinds = Counter((blocks[at].keeper, _requested(blocks[at])) for at in among)
    ways: dict[tuple[int, int], Counter[tuple[str, int]]] = {(0, 0): Counter()}
    for (name, size), available in kinds.items():
        longer = dict(ways)
        for (number, nbytes), way in ways.items():
            for more in range(1, min(available, extra.blocks - number) + 1):
                state = number + more, nbytes + more * size
                if state[1] > most:
                    break
                other = way + Counter({(name, size): more})
                if state not in longer or _keepers(other) < _keepers(longer[state]):
                    longer[state] = other
        ways = longer
        if len(ways) > MAX_STATES:
            return None
    fitting = [
        way for (number, nbytes), way in ways.items() if number == extra.blocks and nbytes >= least
    ]
    return min(fitting, key=_keepers, default=None)


def _keepers(way: Counter[tuple[str, int]]) -> int:
    """Count the keepers in a choice: the choice with the fewest is the likeliest."""
    return len({name for name, _ in way})


def _requested(block: KeptBlock) -> int:
    return block.nbytes - block.unsplit


def _until(blocks: Sequence[KeptBlock], among: Collection[int], nbytes: int) -> tuple[int, ...]:
    chosen: list[int] = []
    for at in among:
        if _bytes(blocks, chosen) >= nbytes:
            break
        chosen.append(at)
    return tuple(chosen)


def _bytes(blocks: Sequence[KeptBlock], among: Collection[int]) -> int:
    return sum(blocks[at].nbytes for at in among)
