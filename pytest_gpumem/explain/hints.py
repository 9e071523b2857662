"""Give hints on what raises a peak, or will raise the peak of the next step.

Each hint is a sentence with measured numbers; an estimate says "roughly". The hint on fragmentation
is based on peaks, every other hint on evidence in the recording.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.explain.categories import Blocks
    from pytest_gpumem.measurement import Breakdown, Peak
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Call, Pass

MIN_PERCENT: Final = 1
"""percent of the peak below which no hint is given"""
MIN_FORWARDS: Final = 2
"""a hint needs at least so many earlier forward passes whose memory is still held: a variable in a
loop holds the memory of one forward pass until its next assignment"""
WASTED_PERCENT: Final = 20
"""A run with expandable segments is worth it if peak reserved exceeds peak allocated by more than
this percentage of peak reserved ..."""
WASTED_BYTES: Final = 512 * MIB
"""... and by more than these bytes."""
_INFINITY: Final = float("inf")
BFLOAT16_SINCE: Final = 8, 0
"""the first compute capability with bfloat16 tensor cores"""


class AnalyzedPeak(NamedTuple):
    """A peak with its recording, blocks and breakdown."""

    device: Blocks
    blocks: set[Block]
    """the blocks that count towards the peak"""
    totals: Sequence[int]
    """bytes allocated before the first event and after each one"""
    indices: Sequence[int]
    """indices of the events in the measured spans; the peak is at one of them"""
    top: int
    """index of the event that made the peak; -1: the memory was at its peak before all events"""
    breakdown: Breakdown

    @property
    def time(self) -> float:
        """The time of the peak, in microseconds since 1970."""
        return self.device.history.times[self.top] if self.top >= 0 else self.device.recording.began

    @property
    def alive(self) -> Iterator[Block]:
        """The blocks allocated at the peak."""
        return (block for block in self.blocks if block.alive(self.top))

    @property
    def peak(self) -> int:
        """Bytes allocated at the peak."""
        return self.totals[self.top + 1]

    @property
    def forwards(self) -> list[Call]:
        """The calls of outermost modules, except those that a backward recomputes."""
        device = self.device
        return [call for call in device.calls.outermost() if device.pass_at(call.start) is None]

    def passes(self, name: str) -> list[Pass]:
        """Return the backward passes or the optimizer steps, as ``name`` says."""
        return [running for running in self.device.passes if running.name == name]

    def matters(self, nbytes: int) -> bool:
        """Return whether so many bytes are worth a hint."""
        return nbytes > 0 and nbytes * 100 >= self.peak * MIN_PERCENT


def of_peak(analyzed: AnalyzedPeak) -> tuple[Note, ...]:
    """Return the hints on one peak of a recording."""
    if analyzed.top < 0:
        return ()
    finders = (
        (NoteKind.NEXT_STEP, fresh_optimizer),
        (NoteKind.STILL_HELD, kept_gradients),
        (NoteKind.STILL_HELD, kept_graphs),
        (NoteKind.UNUSED_GRAPH, unused_graphs),
        (NoteKind.AUTOCAST, float32_activations),
    )
    return tuple(Note(kind, hint) for kind, finder in finders if (hint := finder(analyzed)))


# -- the next step --


def fresh_optimizer(analyzed: AnalyzedPeak) -> str:
    """Return a hint that the next step needs more, if optimizers took only one step; else ""."""
    steps = analyzed.passes("optimizer")
    number = Counter(optimizer for step in steps for optimizer in step.fresh)
    lone = [
        (step, name)
        for step in steps
        for optimizer, name in step.fresh.items()
        if name and number[optimizer] == 1
    ]
    late = [
        block
        for block in analyzed.blocks
        if analyzed.device.categories[block] == "optimizer state"
        and any(step.start <= block.time <= step.end for step, _ in lone)
    ]
    increase = peak_with(analyzed, late) - analyzed.peak
    if not analyzed.matters(increase):
        return ""
    names = " and ".join(dict.fromkeys(name for _, name in lone))
    state = format_size(sum(block.size for block in late))
    return (
        f"only one step ran with a new {names}, and its state of {state} was allocated "
        f"last: the next step needs {format_size(increase)} more (run two steps, or, if a "
        "fixture makes the optimizer, write warmup=1)"
    )


def peak_with(analyzed: AnalyzedPeak, late: Iterable[Block]) -> int:
    """Return what the peak would be with these blocks allocated from the first call or pass on."""
    times = analyzed.device.history.times
    first_call = min((call.start for call in analyzed.device.calls.outermost()), default=_INFINITY)
    first_pass = min((running.start for running in analyzed.device.passes), default=_INFINITY)
    began = min(first_call, first_pass)
    blocks = sorted(late, key=lambda block: block.start)
    starts = [block.start for block in blocks]
    missing = [0]
    for block in reversed(blocks):
        missing.append(missing[-1] + block.size)
    heights = (
        analyzed.totals[index + 1] + missing[len(starts) - bisect_right(starts, index)]
        for index in analyzed.indices
        if index >= 0 and times[index] >= began
    )
    return max(heights, default=0)


# -- memory that is kept for nothing --


def kept_gradients(analyzed: AnalyzedPeak) -> str:
    """Return a hint on gradients that an optimizer had used before the peak's forward; else "".

    The peak must not be later than the backward of that forward.
    """
    last = next((call for call in reversed(analyzed.forwards) if call.start <= analyzed.time), None)
    if last is None:
        return ""
    backwards = analyzed.passes("backward")
    ended = [running for running in backwards if running.end <= last.start]
    previous = ended[-1] if ended else None
    current = next((running for running in backwards if running.start >= last.start), None)
    if previous is None or (current is not None and analyzed.time > current.end):
        return ""
    steps = [
        step
        for step in analyzed.passes("optimizer")
        if previous.end <= step.start and step.end <= last.start
    ]
    if not steps:
        return ""
    gradients = [
        block
        for block in analyzed.alive
        if analyzed.device.categories[block] == "gradients" and block.time < steps[0].start
    ]
    began = current.start if current else _INFINITY
    # To accumulate a gradient, the backward allocates a block of its size and frees it afterwards:
    # any block of that size counts as one.
    addends = Counter(
        block.size
        for block in analyzed.blocks
        if began <= block.time <= analyzed.time and not block.alive(analyzed.top)
    )
    unused = Counter(block.size for block in gradients) - addends
    nbytes = sum(size * number for size, number in unused.items())
    if not analyzed.matters(nbytes):
        return ""
    return (
        f"gradients of {format_size(nbytes)} that the optimizer had already used were "
        "still allocated at the peak: zero_grad() before the forward pass frees them "
        "(set_to_none=False keeps them)"
    )


def earlier_activations(analyzed: AnalyzedPeak) -> list[tuple[Call, list[Block]]]:
    """Return earlier forwards, each with its activations at the peak that no backward frees."""
    begun = [call for call in analyzed.forwards if call.start <= analyzed.time]
    newest = {call.path: call.start for call in begun}
    starts = [call.start for call in begun]
    backwards = analyzed.passes("backward")
    # Count activations of earlier forwards that also outlive the last forward, except those that a
    # backward frees later: that backward uses them.
    held: dict[int, list[Block]] = {}
    for block in analyzed.alive:
        at = bisect_right(starts, block.time) - 1
        if at < 0 or analyzed.device.categories[block] != "activations":
            continue
        if begun[at].start == newest[begun[at].path] or block.end_time <= begun[-1].end:
            continue
        if not any(running.start <= block.end_time <= running.end for running in backwards):
            held.setdefault(at, []).append(block)
    return [(begun[at], blocks) for at, blocks in held.items()]


def kept_graphs(analyzed: AnalyzedPeak) -> str:
    """Return a hint on activations of earlier forwards that no backward frees; "" without any."""
    held = [(call, blocks) for call, blocks in earlier_activations(analyzed) if call.grad]
    # A module's output, which has a tag, can be kept without its graph; inner activations cannot.
    number = Counter(
        call.path
        for call, blocks in held
        if any(all(tag.category != "activations" for tag in block.tags) for block in blocks)
    )
    forwards = max(number.values(), default=0)
    nbytes = sum(block.size for _, blocks in held for block in blocks)
    if forwards < MIN_FORWARDS or not analyzed.matters(nbytes):
        return ""
    return (
        f"activations of {format_size(nbytes)} from {forwards} earlier forward passes were "
        "still allocated at the peak: a tensor keeps their autograd graph; loss.item() "
        "and loss.detach() keep no graph, and torch.no_grad() makes none"
    )


def unused_graphs(analyzed: AnalyzedPeak) -> str:
    """Return a hint on activations that outlive a forward that no backward follows; else ""."""
    last = max((running.start for running in analyzed.passes("backward")), default=-_INFINITY)
    begun = [call for call in analyzed.forwards if last < call.start <= analyzed.time and call.grad]
    starts = [call.start for call in begun]
    held: Counter[int] = Counter()
    for block in analyzed.alive:
        at = bisect_right(starts, block.time) - 1
        if at < 0 or analyzed.device.categories[block] != "activations":
            continue
        is_output = any(tag.category == "activations" for tag in block.tags)
        if block.time <= begun[at].end < block.end_time and not is_output:
            held[at] += block.size
    nbytes = sum(held.values())
    if not analyzed.matters(nbytes) or kept_graphs(analyzed):
        return ""
    passes = "a forward pass" if len(held) == 1 else f"{len(held)} forward passes"
    return (
        f"activations of {format_size(nbytes)} are of {passes} that no backward pass "
        "followed: torch.no_grad() frees them during the pass"
    )


# -- memory that could be less --


def float32_activations(analyzed: AnalyzedPeak) -> str:
    """Return a hint on autocast, if float32 activations are the largest part of a peak; else ""."""
    recording, categories = analyzed.device.recording, analyzed.breakdown.categories
    nbytes = categories.get("activations", 0)
    if recording.autocast or recording.dtypes != {"float32"}:
        return ""
    if not nbytes or nbytes < max(categories.values()):
        return ""
    before = (0, 0) < recording.capability < BFLOAT16_SINCE  # (0, 0): no GPU of NVIDIA's
    name = "float16" if before else "bfloat16"
    return (
        f"activations take {format_size(nbytes)} of the peak; "
        f"torch.autocast({recording.device_type!r}, torch.{name}) would roughly halve them, to "
        f"{format_size(nbytes // 2)}"
    )


# -- fragmentation --


def wastes_much(peak: Peak) -> bool:
    """Return whether reserved exceeds allocated by more than 512 MiB and 20 %.

    Then a run with expandable segments is worth its time.
    """
    wasted = peak.reserved - peak.allocated
    return wasted > max(WASTED_BYTES, peak.reserved * WASTED_PERCENT // 100)


def fragmentation(peak: Peak, expandable: Peak | None) -> str:
    """Return the hint on expandable segments; "" if they save less than MIN_PERCENT.

    ``expandable`` is the peak with expandable segments; None if it was not measured.
    """
    wasted = format_size(peak.reserved - peak.allocated)
    sentence = f"peak reserved is {wasted} above peak allocated"
    remedy = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if expandable is None:
        return f"{sentence}: the allocator's memory is fragmented or cached; try {remedy}"
    saved = peak.reserved - expandable.reserved
    if saved * 100 < peak.reserved * MIN_PERCENT:
        return ""
    return (
        f"{sentence}: with {remedy} this step reserves {format_size(expandable.reserved)}, "
        f"{format_size(saved)} less"
    )
