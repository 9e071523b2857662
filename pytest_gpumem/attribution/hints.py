"""Hints: what a recording shows that raises a peak, or will raise the next step's, in bytes.

Each is a sentence with a number that was measured, or "about" where it is an estimate. Where the
recording does not show it, nothing is said.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.attribution.optimizer_watch import FRESH
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.attribution.categories import Blocks
    from pytest_gpumem.attribution.history_replay import Block
    from pytest_gpumem.attribution.recording import Call, Pass
    from pytest_gpumem.measurement import Breakdown, Peak

LEAST_PERCENT: Final = 1
"""of the peak: what is less is no hint"""
LEAST_FORWARDS: Final = 2
"""earlier forward passes of which something is held: of one, a variable holds it until it is set"""
WASTED_PERCENT: Final = 20
"""of peak reserved above peak allocated, and ..."""
WASTED_BYTES: Final = 512 * MIB
"""... bytes of it, that are worth a run with expandable segments"""
_INFINITY: Final = float("inf")
BFLOAT16_SINCE: Final = 8, 0
"""the compute capability whose tensor cores know bfloat16"""


class Scene(NamedTuple):
    """A peak, and all that is known of how it came about."""

    device: Blocks
    blocks: set[Block]
    """those that count for it"""
    totals: Sequence[int]
    """bytes allocated before the first event and after each"""
    indices: Sequence[int]
    """the events among which it is the peak"""
    top: int
    """the event that it came with; -1: it was there before"""
    breakdown: Breakdown

    @property
    def time(self) -> float:
        """When it came, in microseconds since 1970."""
        return self.device.history.times[self.top]

    @property
    def alive(self) -> Iterator[Block]:
        """The blocks that were allocated then."""
        return (it for it in self.blocks if it.alive(self.top))

    @property
    def peak(self) -> int:
        """Bytes allocated then."""
        return self.totals[self.top + 1]

    @property
    def forwards(self) -> list[Call]:
        """The calls of outermost modules; what a backward recomputes is none."""
        device = self.device
        return [it for it in device.calls.outermost() if device.pass_at(it.start) is None]

    def passes(self, name: str) -> list[Pass]:
        """Return the backward passes, or the optimizers' steps."""
        return [it for it in self.device.recording.passes if it.name == name]

    def matters(self, nbytes: int) -> bool:
        """Whether so many bytes are worth a word."""
        return nbytes > 0 and nbytes * 100 >= self.peak * LEAST_PERCENT


def of_peak(scene: Scene) -> tuple[str, ...]:
    """Return the hints that one peak of a recording gives."""
    if scene.top < 0:
        return ()
    found = (fresh_optimizer, kept_gradients, kept_graphs, float32_activations)
    return tuple(text for hint in found if (text := hint(scene)))


# -- the next step --


def fresh_optimizer(scene: Scene) -> str:
    """Say what the next step needs more, where optimizers took their first step and no other."""
    steps = scene.passes("optimizer")
    number = Counter(it.owner for it in steps)
    lone = [it for it in steps if it.fresh and number[it.owner] == 1]
    late = [
        it
        for it in scene.blocks
        if scene.device.categories[it] == "optimizer state"
        and any(step.start <= it.time <= step.end for step in lone)
    ]
    more = _peak_with(scene, late) - scene.peak
    if not scene.matters(more):
        return ""
    names = " and ".join(dict.fromkeys(it.fresh for it in lone))
    state = format_size(sum(it.size for it in late))
    return (
        f"only {FRESH}{names}, whose state of {state} came last: the next step "
        f"needs {format_size(more)} more (run two steps, or give warmup=1)"
    )


def _peak_with(scene: Scene, late: Iterable[Block]) -> int:
    """Return what the peak of the same step is where these blocks are there from its beginning."""
    recording, times = scene.device.recording, scene.device.history.times
    starts_of_all = [it.start for it in recording.calls] + [it.start for it in recording.passes]
    began = min(starts_of_all, default=_INFINITY)
    blocks = sorted(late, key=lambda it: it.start)
    starts = [it.start for it in blocks]
    missing = [0]
    for block in reversed(blocks):
        missing.append(missing[-1] + block.size)
    heights = (
        scene.totals[index + 1] + missing[len(starts) - bisect_right(starts, index)]
        for index in scene.indices
        if index >= 0 and times[index] >= began
    )
    return max(heights, default=0)


# -- what is held for nothing --


def kept_gradients(scene: Scene) -> str:
    """Say how much of a peak in a forward or backward is gradients that were used before."""
    last = next((it for it in reversed(scene.forwards) if it.start <= scene.time), None)
    if last is None:
        return ""
    backwards = scene.passes("backward")
    before = next((it for it in reversed(backwards) if it.end <= last.start), None)
    current = next((it for it in backwards if it.start >= last.start), None)
    if before is None or (current is not None and scene.time > current.end):
        return ""
    optimizers = scene.passes("optimizer")
    steps = [it for it in optimizers if before.end <= it.start and it.end <= last.start]
    if not steps:
        return ""
    kept = [
        it
        for it in scene.alive
        if scene.device.categories[it] == "gradients" and it.time < steps[0].start
    ]
    nbytes = sum(_not_again(scene, kept, current.start if current else _INFINITY))
    if not scene.matters(nbytes):
        return ""
    return (
        f"gradients of {format_size(nbytes)} that the optimizer had used already were still held "
        "at the peak: zero_grad() before the forward frees them (set_to_none=False keeps them)"
    )


def _not_again(scene: Scene, kept: Iterable[Block], began: float) -> Iterator[int]:
    """Yield the sizes of kept gradients that the backward had not added to when the peak came.

    What it adds is a block of the gradient's size, gone when it is added: whatever was of that size
    is taken for that.
    """
    made = Counter(
        it.size for it in scene.blocks if began <= it.time <= scene.time and not it.alive(scene.top)
    )
    for block in kept:
        if made[block.size]:
            made[block.size] -= 1
        else:
            yield block.size


def kept_graphs(scene: Scene) -> str:
    """Say how much of a peak is activations of earlier forwards that no backward was to free."""
    begun = [it for it in scene.forwards if it.start <= scene.time]
    if not begun:
        return ""
    held = _held_for_nothing(scene, begun)
    number = Counter(call.path for call, blocks in held if any(map(_is_inner, blocks)))
    forwards = max(number.values(), default=0)
    nbytes = sum(it.size for _, blocks in held for it in blocks)
    if forwards < LEAST_FORWARDS or not scene.matters(nbytes):
        return ""
    return (
        f"activations of {format_size(nbytes)} from {forwards} earlier forward passes were still "
        "held at the peak: a tensor keeps their graph; loss.item() or loss.detach() does not, and "
        "torch.no_grad() makes none"
    )


def _held_for_nothing(scene: Scene, begun: Sequence[Call]) -> list[tuple[Call, list[Block]]]:
    """Return earlier forwards with the activations of theirs that outlived the last one as well.

    A backward that frees them later has use for them.
    """
    newest = {it.path: it.start for it in begun}
    starts = [it.start for it in begun]
    backwards = scene.passes("backward")
    found: dict[int, list[Block]] = {}
    for block in scene.alive:
        at = bisect_right(starts, block.time) - 1
        if at < 0 or scene.device.categories[block] != "activations":
            continue
        call = begun[at]
        if not call.grad or call.start == newest[call.path] or block.end_time <= begun[-1].end:
            continue
        if not any(it.start <= block.end_time <= it.end for it in backwards):
            found.setdefault(at, []).append(block)
    return [(begun[at], blocks) for at, blocks in found.items()]


def _is_inner(block: Block) -> bool:
    """Whether it is no output, which can be kept without its graph."""
    return all(tag.category != "activations" for tag in block.tags)


# -- what could be smaller --


def float32_activations(scene: Scene) -> str:
    """Say what autocast would save, where activations are the most of a peak."""
    recording, categories = scene.device.recording, scene.breakdown.categories
    nbytes = categories.get("activations", 0)
    if recording.autocast or recording.dtypes != {"float32"}:
        return ""
    if not nbytes or nbytes < max(categories.values()):
        return ""
    name = "bfloat16" if recording.capability >= BFLOAT16_SINCE else "float16"
    return (
        f"activations take {format_size(nbytes)} of the peak, without autocast: "
        f"torch.autocast('cuda', torch.{name}) would about halve them, to "
        f"{format_size(nbytes // 2)}"
    )


# -- fragmentation --


def is_fragmented(peak: Peak) -> bool:
    """Whether so much more was reserved than allocated that it is worth another run."""
    wasted = peak.reserved - peak.allocated
    return wasted > max(WASTED_BYTES, peak.reserved * WASTED_PERCENT // 100)


def fragmentation(peak: Peak, expandable: Peak | None) -> str:
    """Return what expandable segments would give; "" where they give nothing.

    Args:
        peak: as measured.
        expandable: the same step's with expandable segments; None: that was not measured.
    """
    wasted = format_size(peak.reserved - peak.allocated)
    sentence = f"peak reserved is {wasted} above peak allocated"
    remedy = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if expandable is None:
        return f"{sentence}: the allocator's memory is fragmented, or cached; try {remedy}"
    saved = peak.reserved - expandable.reserved
    if saved * 100 < peak.reserved * LEAST_PERCENT:
        return ""
    return (
        f"{sentence}: with {remedy} this step reserves {format_size(expandable.reserved)}, "
        f"{format_size(saved)} less"
    )
