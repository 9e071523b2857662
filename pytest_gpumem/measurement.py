"""The parts of a measurement: frozen records of integers and text, without behaviour.

All sizes are bytes. "Allocated" is the memory of live tensors, "reserved" the memory that PyTorch's
caching allocator holds from the device: the terms of ``torch.cuda.memory_stats``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, NamedTuple, get_args

from pytest_gpumem.notes import Hinted, Note

DeviceKind = str
""""virtual", "cuda", or the type that torch gives another accelerator: "xpu", "mps" """
Signed = Annotated[int, "may be below zero"]
"""an integer that may be negative; all other integers of records are sizes or counts"""


@dataclass(frozen=True, slots=True)
class Peak:
    """Memory of one device, in bytes."""

    allocated: int
    reserved: int
    pinned: int = 0
    """pinned host memory of the whole process; set for the first of a test's devices only"""


@dataclass(frozen=True, slots=True)
class PeakRange:
    """Bounds of the peaks if they depend on an unknown choice, such as a workspace's size."""

    least: tuple[Peak, ...]
    """one per device"""
    most: tuple[Peak, ...]
    reason: str
    """the unknown choice: "cuDNN's choice in benchmark mode" """
    judged: bool = False
    """whether limits are compared with the range; False for an estimate, which is only reported"""


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
    """the value of ``PYTORCH_CUDA_ALLOC_CONF`` (or ``PYTORCH_ALLOC_CONF``), "" if unset"""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device that a step ran on, or one of several identical devices."""

    kind: DeviceKind
    name: str
    """the card ("T4") of a virtual GPU, the device name ("NVIDIA H200") of a real one"""
    total_memory: int
    """bytes of device memory as its driver reports it; 0 if unknown"""
    capability: tuple[int, int]
    """CUDA compute capability; (0, 0) for other accelerators"""
    sm_count: int
    """number of streaming multiprocessors; 0 for other accelerators"""
    context: int = 0
    """bytes of device memory that the CUDA context uses, from the table of cards; 0 if unknown"""

    @property
    def is_predicted(self) -> bool:
        """Whether the device is virtual: no kernel runs, and figures are predictions for its card.

        Computed values are in host memory, and no driver or other process uses device memory.
        """
        return self.kind == "virtual"

    @property
    def usable_memory(self) -> int:
        """Bytes that PyTorch's allocator can reserve at most; 0 if unknown."""
        return self.total_memory - self.context

    @property
    def device_type(self) -> str:
        """``torch.device.type`` of the tensors on the device."""
        return "cuda" if self.is_predicted else self.kind

    @property
    def key(self) -> str:
        """The device's name in baselines: "virtual-T4", "cuda-NVIDIA-H200"."""
        return device_key(self.kind, self.name)


@cache
def device_key(kind: DeviceKind, name: str) -> str:
    """Return a device's name in baselines, which is also the name of their folder."""

    def plain(text: str) -> str:
        kept = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in text)
        return kept.strip("-.") or "unnamed"

    return f"{plain(kind)}-{plain(name)}"  # a third-party backend may choose any kind


def type_of_key(key: str) -> str:
    """Return the type of the devices with this name in baselines: "cuda", "xpu"."""
    kind = key.partition("-")[0]
    return "cuda" if kind == "virtual" else kind


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One out-of-memory error of PyTorch's allocator, in bytes."""

    requested: int | None
    """size of the failed request; None if the error does not contain it"""
    allocated: int
    """memory of the test's live tensors at that moment"""
    reserved: int
    """memory that the caching allocator held for the test at that moment"""
    site: str
    """the line that requested the memory: "examples/test_mlp.py:31 in step" ("" if unknown)"""
    device_index: int = 0
    """index, among the test's devices, of the device that ran out of memory"""
    needed: Peak | None = None
    """the peak of a second run without the limit; None without such a run"""
    path: str = ""
    """the file of the line in ``site``; "" if unknown"""
    line: int = 0
    """the number of that line, from 1; 0 if unknown"""


PinnedCount = Literal["counted", "by time", "uncounted"]
"""how the peak of pinned host memory was counted: "by time" if it depends on when DataLoader's
threads pin batches ahead; "uncounted" before torch 2.10"""

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
"""in display order; "other" is memory of unknown use"""


@dataclass(frozen=True, slots=True)
class Site:
    """The blocks of one category that a source line allocated and that are alive at the peak."""

    path: str
    """relative to the project if the file is inside; "" if no Python code was running"""
    line: int
    """from 1; 0 if unknown"""
    function: str
    """the qualified name: "Attention.forward" """
    code: str
    """the text of the line, without its indent"""
    module: str
    """path of the running module from the outermost module; "GPT2.h.*.attn" stands for several
    modules, "" for none"""
    category: Category
    nbytes: int
    blocks: int


LineKey = tuple[str, str, str]
"""(file, function, code), which identify a line even if its number changed"""


@dataclass(frozen=True, slots=True)
class LinePeak:
    """A source line's own peak: the most bytes that it had allocated at one time."""

    path: str
    """path, line, function and code are as in :class:`Site`"""
    line: int
    function: str
    code: str
    nbytes: int
    calls_pass: bool = False
    """whether the bytes were allocated by a backward pass that the line calls, not by the line"""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One device's memory at its peak allocated, in bytes."""

    categories: dict[Category, int]
    """without zeros; their sum is the peak allocated"""
    cached: int
    """reserved, but not allocated, at the peak"""
    sites: tuple[Site, ...] = ()
    """the largest first"""
    lines: tuple[LinePeak, ...] = ()
    """line peaks of the whole step, the largest first; empty if it was not recorded"""
    unsplit: int | None = None
    """bytes at the peak that exceed the rounded requests because blocks were not split; None if not
    recorded"""
    autocast: bool | None = None
    """whether a module was called under autocast; None if not recorded"""
    course: tuple[int, ...] = ()
    """peak allocated in each of several stretches of the step, which have equally many allocator
    events; empty if not recorded"""


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive points of a timeline in one phase of training."""

    name: Literal["forward", "backward", "optimizer"]
    start: int
    """index of its first point"""
    end: int
    """index after its last point"""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One device's memory over a step, in bytes, at a number of points.

    Each category, ``reserved`` and ``line_of`` have one element per point. Points are moments at
    which memory was allocated or freed, in order; if there are too many, a selection that includes
    the peaks.
    """

    categories: dict[Category, tuple[int, ...]]
    """allocated bytes by category; their sum is all allocated memory"""
    reserved: tuple[int, ...]
    phases: tuple[Phase, ...]
    peak: int
    """index of the peak allocated"""
    lines: tuple[str, ...] = ()
    """source lines that allocated or freed at the points: "model.py:29 in Tiny.forward" """
    line_of: tuple[int, ...] = ()
    """index of each point's line in ``lines``, -1 for none; empty if no line is known"""


@dataclass(frozen=True, slots=True)
class Keeper:
    """An object that keeps blocks of a source line alive at a peak that is too high."""

    path: str
    line: int
    category: Category
    """path, line and category are those of the :class:`Site`"""
    text: str
    """description: "local variable best (train.py:11)" """
    nbytes: int
    blocks: int
    steps: tuple[int, ...] = ()
    """training steps that allocated the blocks, from 1; empty if unknown"""

    @property
    def name(self) -> str:
        """Its kind and name, which several tests may share: "local variable best"."""
        # Parses for example "the graph of local variable loss of train, train.py:13 (list of 3)".
        head = self.text.partition(" (")[0].partition(",")[0]
        return head.rpartition(" of ")[0] or head


class ExtraBlocks(NamedTuple):
    """The blocks that a source line has in addition to the baseline's."""

    blocks: int
    nbytes: int
    unused: int = 0
    """upper bound of the unsplit bytes in the baseline's blocks: the baseline's
    ``Breakdown.unsplit``"""


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """A request for which the allocator reserved a segment, so that peak reserved rose."""

    path: str
    """path, line, function and code are as in :class:`Site`"""
    line: int
    function: str
    code: str
    requested: int
    nbytes: int
    """bytes of the segment"""
    reserved: int
    """bytes that the test had reserved, including this segment"""
    cached: int
    """cached bytes in segments of the same pool, which could not serve the request"""
    pieces: int
    """number of free blocks that the cached bytes were divided into"""
    largest: int
    """the largest of these blocks, in bytes"""
    held_by: tuple[str, ...] = ()
    """lines with live blocks in the segment that has most cached bytes among those large enough for
    the request: "model.py:29" """


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
    """found by a second run: for a peak that grew, keepers of the blocks that the baseline's peak
    did not have; for a peak over a limit, keepers of the blocks of the largest lines"""
    segments: tuple[SegmentRequest, ...] = ()
    """the last requests that raised the reserved memory, in order"""
    kept: int = 0
    """bytes of the peak that earlier forward passes allocated and no backward pass frees"""
    earlier: tuple[Site, ...] = ()
    """for a part of the test: lines whose memory at the peak was allocated before the part began,
    the largest first; empty for the whole test"""


@dataclass(frozen=True, slots=True)
class Slope:
    """How peak allocated grows with the batch size: fixed + per_sample * size, in bytes."""

    sizes: tuple[int, ...]
    """measured batch sizes, ascending"""
    fixed: Signed
    per_sample: Signed


@dataclass(frozen=True, slots=True)
class Holder:
    """An object that refers to leaked memory."""

    text: str
    """description: "global variable CACHE of test_it.py (list of 5)" """
    nbytes: int
    blocks: int
    others: tuple[str, ...] = ()
    """descriptions of other objects that also hold some of this memory"""
    shared: int = 0
    """bytes that are freed only if the others release them too"""

    @property
    def names(self) -> str:
        """The description, with ``others`` too if releasing this holder alone frees nothing."""
        return " and ".join(
            [self.text, *self.others] if self.shared == self.nbytes else [self.text]
        )


@dataclass(frozen=True, slots=True)
class Stayed:
    """A leak on one device, in bytes: memory held after the test, or growth from step to step."""

    device: int
    nbytes: Signed
    sites: tuple[Site, ...] = ()
    """lines that allocated it, the largest first; empty without a recorded history"""
    holders: tuple[Holder, ...] = ()
    """the objects that refer to it, the largest first"""


MIN_OUTSIDE = 4 << 20
"""reports mention memory outside of PyTorch's allocator from this size on"""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A device's used memory during a step, of all processes, in bytes, as nvidia-smi shows it."""

    peak: int
    """the highest value seen"""
    besides: Signed
    """bytes in use when the step began that PyTorch's allocator had not reserved: CUDA contexts,
    other libraries, other processes"""
    outside: Signed
    """growth, from the step's start to its end, of memory that neither PyTorch's allocator nor
    another process uses, at least 0; on the virtual GPU a lower bound of the highest growth during
    the step"""
    others: Signed = 0
    """memory of other processes when the step ended, as far as known"""
    processes: int = 0
    """number of the other processes"""
    source: str = ""
    """the interface that was read: "NVML" """
    every_ms: int = 0
    """milliseconds between two readings; 0 if readings are continuous, or only at start and end"""


@dataclass(frozen=True, slots=True)
class ServerStart:
    """An inference server's memory decisions at its start on one device, in bytes."""

    server: str
    """name and version: "vLLM 0.33.0" """
    device: int
    """index among the test's devices"""
    total: int = 0
    """the device's memory, as the server read it"""
    requested: int = 0
    """memory that the server allows itself to use"""
    weights: int = 0
    activations: int = 0
    """peak of the server's profiling run, above the weights"""
    outside: Signed = 0
    """memory that the server counted besides weights and activations"""
    graphs: Signed = 0
    """memory that the server set aside for CUDA graphs before it sized the cache"""
    graphs_taken: int = 0
    """memory that capturing the CUDA graphs used"""
    captured: int = 0
    """number of CUDA graphs that the server captured"""
    cache: Signed = 0
    """memory left for the KV cache"""
    needed: int = 0
    """KV cache that one request of maximum length needs"""
    tokens: int = 0
    """number of tokens that the cache holds"""
    requests: int = 0
    """number of requests of maximum length that the cache holds"""
    length: int = 0
    """longest request that the server accepts, in tokens"""
    free: Signed | None = None
    """lowest free memory of the device during the start; None if the server refused to start"""
    refusal: str = ""
    """the error with which the server refused to start; "" if it started"""
    unseen: tuple[int, int] = (0, 0)
    """lower and upper bound of the memory that a real GPU, unlike the virtual GPU, uses before the
    cache is sized"""
    unseen_later: int = 0
    """upper bound of the memory that only a real GPU uses after the cache was sized"""

    @property
    def range(self) -> tuple[int, int]:
        """The least and the most memory left for the KV cache on a real GPU; may be negative."""
        least, most = self.unseen
        return self.cache - most, self.cache - least

    @property
    def least_tokens(self) -> int:
        """The number of tokens that fit in the lower end of ``range``."""
        return self.tokens * max(self.range[0], 0) // self.cache if self.cache > 0 else 0


MIN_INHERITED = 20 << 20
"""from this many reserved but unallocated bytes on, reports say that earlier code reserved them"""


class Fullest:
    """A record with peaks; gives those of its fullest device, in bytes."""

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

    ``peaks`` has one entry per device; ``peak_allocated`` and ``peak_reserved`` are those of the
    fullest device.
    """

    device: DeviceInfo
    provenance: Provenance
    peaks: tuple[Peak, ...]
    """peaks of the step, without the memory that was held before it"""
    held: tuple[Peak, ...]
    """memory that earlier tests held when the step began; it is not part of the peaks"""
    retained: tuple[Peak, ...]
    """memory that the step still held when it ended; for a whole test, after garbage collection"""
    alloc_retries: int = 0
    """how often the allocator emptied its cache to satisfy a request"""
    segments: int = 0
    """number of the allocator's segments when the step had ended; includes those of earlier tests,
    unlike ``peaks``, so no verdict depends on it"""
    out_of_memory: OutOfMemory | None = None
    notes: tuple[Note, ...] = ()
    """sentences that a reader of the figures should know"""
    attributions: tuple[Attribution, ...] = ()
    """one per device; empty if not requested"""
    hints: tuple[Note, ...] = ()
    """changes that would lower a peak, found by a second run; attributions have their own hints"""
    slope: Slope | None = None
    """set if the test runs with several batch sizes; the peaks are those of the largest size"""
    steps: tuple[tuple[int, ...], ...] = ()
    """for each device, the requested bytes of live tensors after each step, with ``steady=True``"""
    left: tuple[int, ...] = ()
    """for each device, the memory that stayed after the tear-down; empty if not requested"""
    device_use: tuple[DeviceUse, ...] = ()
    """used memory of each device, of all processes; not in baselines"""
    stayed: Stayed | None = None
    """the leak, if the test failed because of one"""
    largest: int | None = None
    """the largest value that fits, as found by a search; the peaks are that value's"""
    range: PeakRange | None = None
    """the range of the peaks; None if they are certain, or if the range is unknown"""
    host: int | None = None
    """the growth of the process's resident memory in bytes; None for a part, or if unknown"""
    pinned_count: PinnedCount = "counted"
    """how the peak pinned was counted, which decides whether it is compared with a baseline"""
    pinned_lines: tuple[LinePeak, ...] = ()
    """if the test failed by its peak pinned: the lines that pin most, the largest first"""
    garbage: int = 0
    """the most bytes that one run of Python's garbage collector freed during the step"""
    began: tuple[Peak, ...] = ()
    """for a part: the test's memory when the part began, per device; empty for the whole test"""
    servers: tuple[ServerStart, ...] = ()
    """starts of an inference server in the test, one per device; not in baselines"""

    @property
    def cache_tokens(self) -> int | None:
        """The number of tokens that a server's KV cache holds; None without a server."""
        return min((start.tokens for start in self.servers), default=None)

    def reserved_before(self, device: int) -> int:
        """Return the bytes reserved before a part began, if the part reserved no more, else 0.

        Also 0 if less than MIN_INHERITED of them are free at the peak, or memory ran out.
        """
        if len(self.began) <= device or self.out_of_memory is not None:
            return 0
        before, peak = self.began[device].reserved, self.peaks[device]
        free = peak.reserved - peak.allocated
        return before if peak.reserved <= before and free >= MIN_INHERITED else 0


@dataclass(frozen=True, slots=True)
class BaselineEntry(Fullest):
    """The part of a measurement that a baseline file stores."""

    peaks: tuple[Peak, ...]
    """in bytes, one per device"""
    provenance: Provenance
    batch_size: int | None = None
    world_size: int | None = None
    """number of ranks of the distributed run, if the test runs as one of them"""
    rank: int | None = None
    """the test's rank; None if it does not run as a rank"""
    breakdowns: tuple[Breakdown, ...] = ()
    """one per device, with the largest sites; empty without attribution"""
    slope: Slope | None = None
    """set if the test runs with several batch sizes"""
    largest: int | None = None
    """the largest value that fits, as found by a search"""
    cache_tokens: int | None = None
    """number of tokens that an inference server's KV cache holds"""
