"""The parts of a measurement: frozen records of integers and text, without behaviour.

All sizes are bytes. "Allocated" is the memory of live tensors, "reserved" the memory that PyTorch's
caching allocator holds from the device: the terms of ``torch.cuda.memory_stats``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, NamedTuple, get_args

from pytest_gpumem.notes import Hinted, Note

DeviceKind = Literal["cuda", "virtual"]
Signed = Annotated[int, "may be below zero"]
"""a number that files may have with a sign; any other one of a record is a size or a count"""


@dataclass(frozen=True, slots=True)
class Peak:
    """Memory of one device, in bytes."""

    allocated: int
    reserved: int
    pinned: int = 0
    """pinned host memory of the whole process, on the first of a test's devices; 0 on further
    ones"""


@dataclass(frozen=True, slots=True)
class PeakRange:
    """The ends between which the peaks lie where a library's choice of a workspace is not known."""

    least: tuple[Peak, ...]
    """one a device"""
    most: tuple[Peak, ...]
    reason: str
    """the choice that is not known: "cuDNN's choice in benchmark mode" """
    judged: bool = False
    """whether limits are held to ``most``; those of an estimate are held to the peaks"""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The versions and settings that a measurement was made with."""

    torch: str
    """``torch.__version__``"""
    cuda: str
    """the CUDA version that torch was built for, ``torch.version.cuda``"""
    cudnn: str
    """cuDNN's version as torch sees it, or "none" """
    driver: str
    """the NVIDIA driver's version, or "virtual" """
    allocator: str
    """the value of ``PYTORCH_CUDA_ALLOC_CONF`` (or ``PYTORCH_ALLOC_CONF``), "" where unset"""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device that a step ran on; where it ran on several, they are alike."""

    kind: DeviceKind
    name: str
    """the card ("T4") on the virtual GPU, CUDA's device name ("NVIDIA H200") on a real one"""
    total_memory: int
    """bytes of device memory as CUDA reports it"""
    capability: tuple[int, int]
    """CUDA compute capability"""
    sm_count: int
    """number of streaming multiprocessors"""
    context: int = 0
    """bytes that the CUDA context takes of it (known of a card's profile; 0 where unknown)"""

    @property
    def is_predicted(self) -> bool:
        """Whether it is virtual: no kernel runs, and its figures are predictions for its card.

        Values that are computed are in host memory, and no driver or other process takes memory.
        """
        return self.kind == "virtual"

    @property
    def key(self) -> str:
        """The name of this device's baselines: "virtual-T4", "cuda-NVIDIA-H200"."""
        return device_key(self.kind, self.name)


@cache
def device_key(kind: DeviceKind, name: str) -> str:
    """Return the name of a device's baselines."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in name)
    return f"{kind}-{name.strip('-.') or 'unnamed'}"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One out-of-memory error of PyTorch's allocator, in bytes."""

    requested: int | None
    """the size of the failed request; None if the error does not have it"""
    allocated: int
    """memory of the test's live tensors at that moment"""
    reserved: int
    """memory that the caching allocator held for the test at that moment"""
    site: str
    """the line that requested the memory: "examples/test_mlp.py:31 in step" ("" if unknown)"""
    device_index: int = 0
    """which of the test's devices ran out"""
    needed: Peak | None = None
    """the peak of a second run without the limit; None without such a run"""
    path: str = ""
    """the file of that line; "" where it is unknown"""
    line: int = 0
    """its number, from 1"""


PinnedCount = Literal["counted", "by time", "uncounted"]
"""of pinned host memory: how sure its peak is. It depends on time where threads of DataLoader's pin
batches ahead; PyTorch counts it from 2.10 on."""

Category = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "batch data",
    "activations",
    "workspaces",
    "temporaries",
    "other",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""in the order in which they are shown; "other" is memory of unknown use"""


@dataclass(frozen=True, slots=True)
class Site:
    """A source line, and the blocks alive at the peak that it allocated, of one category."""

    path: str
    """relative to the project if the file is in it; "" if no Python code was running"""
    line: int
    """from 1, or 0"""
    function: str
    """the qualified name: "Attention.forward" """
    code: str
    """the text of the line, without its indent"""
    module: str
    """the path of the running module from the outermost module; "GPT2.h.*.attn" stands for several
    modules, "" for none"""
    category: Category
    nbytes: int
    blocks: int


LineKey = tuple[str, str, str]
"""file, function and code: the same line, though its number changed"""


@dataclass(frozen=True, slots=True)
class LinePeak:
    """A source line, and the most memory that it had at one time: its own peak, in bytes."""

    path: str
    """these four are as a :class:`Site` has them"""
    line: int
    function: str
    code: str
    nbytes: int
    calls_pass: bool = False
    """whether a backward pass that the line calls has allocated it, and not the line"""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One device's memory at its peak allocated, in bytes."""

    categories: dict[Category, int]
    """without zeros; they add up to the peak allocated"""
    cached: int
    """reserved, but not allocated, at that moment"""
    sites: tuple[Site, ...] = ()
    """the largest first"""
    lines: tuple[LinePeak, ...] = ()
    """of the whole step, the largest first; none where it was not recorded"""
    unsplit: int | None = None
    """bytes at the peak beyond the requested bytes; None where that was not recorded"""
    autocast: bool | None = None
    """whether a module was called under autocast; None where that was not recorded"""
    course: tuple[int, ...] = ()
    """the highest allocated memory in equal stretches of the step; empty where not recorded"""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a timeline."""

    name: Literal["forward", "backward", "optimizer"]
    start: int
    """index of its first point"""
    end: int
    """index after its last point"""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One device's memory over a step, in bytes; all lists are of one length.

    Points are moments at which memory was allocated or freed, in their order; of too many, a
    selection with the peaks in it.
    """

    categories: dict[Category, tuple[int, ...]]
    """allocated, by category; their sum is all that was allocated"""
    reserved: tuple[int, ...]
    phases: tuple[Phase, ...]
    peak: int
    """index of the peak allocated"""
    lines: tuple[str, ...] = ()
    """source lines that allocated or freed at the points: "model.py:29 in Tiny.forward" """
    line_of: tuple[int, ...] = ()
    """the index of each point's line among these, -1 of none; empty where no line is known"""


@dataclass(frozen=True, slots=True)
class Keeper:
    """An object that keeps blocks of a line alive at a peak; the baseline had fewer blocks."""

    path: str
    line: int
    category: Category
    """these three are the :class:`Site`'s"""
    text: str
    """in words: "local variable best (train.py:11)" """
    nbytes: int
    blocks: int
    steps: tuple[int, ...] = ()
    """steps of training that allocated the blocks, from 1; empty where none is known"""

    @property
    def name(self) -> str:
        """Its kind and name alone, which several tests may share: "local variable best"."""
        # From a text as "the graph of local variable loss of train, train.py:13 (list of 3)".
        head = self.text.partition(" (")[0].partition(",")[0]
        return head.rpartition(" of ")[0] or head


class ExtraBlocks(NamedTuple):
    """The blocks that a source line has more than in the baseline."""

    blocks: int
    nbytes: int
    unused: int = 0
    """bytes of the baseline's blocks that were not requested, at most: see ``Breakdown.unsplit``"""


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """A request for which the allocator took a new segment, beyond all it had reserved before."""

    path: str
    """these four are as a :class:`Site` has them"""
    line: int
    function: str
    code: str
    requested: int
    """bytes that were asked for"""
    nbytes: int
    """of the segment"""
    reserved: int
    """with it, of the test"""
    cached: int
    """bytes that were cached in segments of the same kind, of no use for the request"""
    pieces: int
    """in how many pieces"""
    largest: int
    """the largest of these, in bytes"""
    held_by: tuple[str, ...] = ()
    """lines of live blocks in the segment that could have held the request: "model.py:29" """


@dataclass(frozen=True, slots=True)
class Attribution(Hinted):
    """Where one device's peak comes from."""

    breakdown: Breakdown
    timeline: Timeline | None = None
    notes: tuple[Note, ...] = ()
    """sentences that a reader of the figures should know"""
    hints: tuple[Note, ...] = ()
    """changes that would lower the peak, and allocations that raise the next step's, with bytes"""
    keepers: tuple[Keeper, ...] = ()
    """the keepers of the blocks that the baseline's peak did not have, from a second run"""
    segments: tuple[SegmentRequest, ...] = ()
    """the last requests that raised the memory reserved, in their order"""
    kept: int = 0
    """bytes of the peak that earlier forward passes made, and that no backward pass frees"""
    earlier: tuple[Site, ...] = ()
    """lines of the part of the peak that was allocated before the part of the test began, the
    largest first; none for the whole test"""


@dataclass(frozen=True, slots=True)
class Slope:
    """How peak allocated grows with the batch size: fixed + per_sample * size, in bytes."""

    sizes: tuple[int, ...]
    """batch sizes that were measured, ascending"""
    fixed: Signed
    per_sample: Signed


@dataclass(frozen=True, slots=True)
class Holder:
    """An object that refers to leaked memory."""

    text: str
    """in words: "global variable CACHE of test_it.py (list of 5)" """
    nbytes: int
    blocks: int
    others: tuple[str, ...] = ()
    """what holds some of this memory as well, in words"""
    shared: int = 0
    """bytes that are freed only if these let go too"""

    @property
    def names(self) -> str:
        """The holder in words, with the others if it frees nothing without them."""
        return " and ".join(
            [self.text, *self.others] if self.shared == self.nbytes else [self.text]
        )


@dataclass(frozen=True, slots=True)
class Stayed:
    """A leak of one device: held after the test, or growing from step to step, in bytes."""

    device: int
    nbytes: Signed
    sites: tuple[Site, ...] = ()
    """the lines that allocated it, the largest first; none without a recorded history"""
    holders: tuple[Holder, ...] = ()
    """the objects that refer to it, the largest first"""


MIN_OUTSIDE = 4 << 20
"""bytes beside PyTorch's allocator from which on a report speaks of them"""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A device's used memory during a step, of all processes, in bytes, as nvidia-smi shows it."""

    peak: int
    """the highest value seen"""
    besides: Signed
    """in use when the step began, besides the memory that PyTorch's allocator had reserved: CUDA
    contexts, other libraries, other processes"""
    outside: Signed
    """the most of it besides PyTorch's memory that came during the step: exact at its end, and on
    the virtual GPU at least so much at its highest"""
    others: Signed = 0
    """memory of other processes when the step ended, as far as it is known"""
    processes: int = 0
    """number of these processes"""
    source: str = ""
    """the interface that was read: "NVML" """
    every_ms: int = 0
    """milliseconds between two readings; 0: continuous, or only at both ends"""


MIN_INHERITED = 20 << 20
"""bytes reserved and not allocated, from which on a report says that earlier code reserved them"""


class Fullest:
    """A record with peaks: those of the fullest of its devices, in bytes."""

    __slots__ = ()
    peaks: tuple[Peak, ...]

    @property
    def peak_allocated(self) -> int:
        """Peak bytes in live tensors, of the fullest device."""
        return max((peak.allocated for peak in self.peaks), default=0)

    @property
    def peak_reserved(self) -> int:
        """Peak bytes held by the caching allocator, of the fullest device."""
        return max((peak.reserved for peak in self.peaks), default=0)

    @property
    def peak_pinned(self) -> int:
        """Peak bytes of pinned host memory, of the whole process."""
        return sum(peak.pinned for peak in self.peaks)


@dataclass(frozen=True, slots=True)
class Measurement(Fullest, Hinted):
    """One step's memory on its device or devices.

    ``peaks`` has one entry a device; ``peak_allocated`` and ``peak_reserved`` are those of the
    fullest one.
    """

    device: DeviceInfo
    provenance: Provenance
    peaks: tuple[Peak, ...]
    """highest memory of the step, without the memory that was held before it"""
    held: tuple[Peak, ...]
    """memory that earlier tests held when the step began; it is not part of the peaks"""
    retained: tuple[Peak, ...]
    """memory that the step still held when it ended, after garbage collection"""
    alloc_retries: int = 0
    """how often the allocator emptied its cache to satisfy a request"""
    segments: int = 0
    """number of segments that the allocator held from the device when the step had ended"""
    out_of_memory: OutOfMemory | None = None
    notes: tuple[Note, ...] = ()
    """sentences that a reader of the figures should know"""
    attributions: tuple[Attribution, ...] = ()
    """one a device; empty if not asked for"""
    hints: tuple[Note, ...] = ()
    """changes that would lower a peak, found by a second run; attributions have their own hints"""
    slope: Slope | None = None
    """of a test that runs with several batch sizes; its peaks are those of the largest"""
    steps: tuple[tuple[int, ...], ...] = ()
    """for each device, the memory in use after each step, with ``steady=True``"""
    left: tuple[int, ...] = ()
    """for each device, the memory that stayed after the tear-down; empty if not requested"""
    device_use: tuple[DeviceUse, ...] = ()
    """used memory of each device, of all processes; not in baselines"""
    stayed: Stayed | None = None
    """the leak, if the test failed by one"""
    largest: int | None = None
    """the largest value that a search found to fit; the peaks are that value's"""
    range: PeakRange | None = None
    """the range of the peaks; None if they are certain, or if the range is unknown"""
    host: int | None = None
    """the growth of the process's resident memory in bytes; None for a part, or if unknown"""
    pinned_count: PinnedCount = "counted"
    """whether the peak pinned can be compared"""
    pinned_lines: tuple[LinePeak, ...] = ()
    """the lines that pin most, of a test that failed by its peak pinned, the largest first"""
    garbage: int = 0
    """bytes that one run of Python's garbage collector freed during the step, at most"""
    began: tuple[Peak, ...] = ()
    """the test's memory when a part of it began, one a device; empty for the whole test"""

    def reserved_before(self, device: int) -> int:
        """Return the bytes reserved before a part began, if the part took no more, else 0."""
        if len(self.began) <= device or self.out_of_memory is not None:
            return 0
        before, peak = self.began[device].reserved, self.peaks[device]
        free = peak.reserved - peak.allocated
        return before if peak.reserved <= before and free >= MIN_INHERITED else 0


@dataclass(frozen=True, slots=True)
class BaselineEntry(Fullest):
    """The part of a measurement that a baseline file keeps."""

    peaks: tuple[Peak, ...]
    """one a device, in bytes"""
    provenance: Provenance
    batch_size: int | None = None
    world_size: int | None = None
    """number of ranks of the distributed run that it was one of"""
    rank: int | None = None
    """its rank among them; None of a test without ranks"""
    breakdowns: tuple[Breakdown, ...] = ()
    """one a device, with the largest sites; empty without attribution"""
    slope: Slope | None = None
    """of a test that runs with several batch sizes"""
    largest: int | None = None
    """the largest value that a search found to fit"""
