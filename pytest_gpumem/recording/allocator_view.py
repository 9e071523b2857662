"""Show the test's code the allocator's figures as if nothing were measured.

A measurement resets PyTorch's peaks, which are global, and allocates blocks of its own (plugs). The
bindings below ``torch.cuda.memory`` and ``torch.accelerator.memory`` are wrapped, once per process,
so that every function, also one imported earlier, returns what it would without a measurement:

- a peak is the highest since the test's own last reset, whatever the measurement reset in between;
- statistics and snapshots leave out the measurement's blocks and counts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.backend import CUDA
from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.shared_history import SharedHistory, from_legacy
from pytest_gpumem.source_lines import OWN_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.backend import Backend

    Stats = dict[str, Any]
    """a device's statistics, nested as by ``torch.cuda.memory_stats_as_nested_dict``"""

STATS: Final = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
PEAK_RESETS: Final = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
TOTAL_RESETS: Final = ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats")
RELEASES: Final = ("_cuda_emptyCache", "_accelerator_emptyCache")
PINNED_STATS: Final = CUDA.bindings.pinned_stats
PINNED_PEAK_RESET: Final = CUDA.bindings.reset_pinned_peaks
SNAPSHOT: Final = "_cuda_memorySnapshot"
HISTORY: Final = "_cuda_record_memory_history"
LEGACY_HISTORY: Final = "_cuda_record_memory_history_legacy"
BINDINGS: Final = Patch(
    "torch._C",
    *(*STATS, *PEAK_RESETS, *TOTAL_RESETS, *RELEASES, PINNED_STATS, PINNED_PEAK_RESET),
    *(SNAPSHOT, HISTORY, LEGACY_HISTORY),
    reason="code under test reads the allocator's figures as if nothing were measured",
)
LAZY_MODULES: Final = Patch(
    "torch", "_lazy_modules", reason="a snapshot imports no Inductor if the program has not"
)
RETRIES: Final = "num_alloc_retries"
TOTALS: Final = ("allocated", "freed")
"""figures that only grow until they are reset"""
COUNTS: Final = ("allocation", "active")
"""statistics that count blocks"""
SIZES: Final = ("allocated_bytes", "active_bytes")
"""statistics of the blocks' bytes, rounded up by the allocator"""
REQUESTED: Final = "requested_bytes"
"""the statistic of the bytes that programs requested, before rounding"""

INDUCTOR: Final = "_inductor"
"""Inductor's attribute of ``torch``, imported on first use"""

Path = tuple[Any, ...]
"""the keys that lead to a figure in nested statistics"""


class Plug(NamedTuple):
    """A block that the measurement holds, and hides from the test's code."""

    device: int
    address: int
    size: int
    """bytes"""
    pool: str
    """the allocator's pool: ``"small_pool"`` or ``"large_pool"``"""
    fills: bool
    """whether the plug fills a free block, or the last part of one, so that there is one less"""
    requested: int = -1
    """bytes that were requested; -1 if as many as ``size``"""
    split: bool = True
    """whether the block is only a part of its segment"""

    def figures(self) -> Iterator[tuple[str, int]]:
        """Yield each statistic of allocated blocks, with the number that the plug adds to it."""
        yield from ((count, 1) for count in COUNTS)
        yield from ((nbytes, self.size) for nbytes in SIZES)
        yield REQUESTED, self.size if self.requested < 0 else self.requested

    def current_figures(self) -> Iterator[tuple[Path, int]]:
        """Yield each current figure of the device, with the number that the plug adds to it."""
        for pool in ("all", self.pool):
            yield from (
                ((statistic, pool, "current"), share) for statistic, share in self.figures()
            )
            if self.split:
                yield ("inactive_split", pool, "current"), -int(self.fills)
                yield ("inactive_split_bytes", pool, "current"), -self.size

    def freed_figures(self) -> Iterator[tuple[Path, int]]:
        """Yield each total of freed memory, with the number that freeing the plug adds to it."""
        for pool in ("all", self.pool):
            yield from (((statistic, pool, "freed"), share) for statistic, share in self.figures())


def _keep_frames(snapshot: dict[str, Any], keeps: Callable[[str], bool]) -> None:
    """Drop from a snapshot the frames whose file names ``keeps`` does not accept."""
    kept_frames: dict[int, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
    records = [each for segment in snapshot["segments"] for each in (segment, *segment["blocks"])]
    records += [event for events in snapshot["device_traces"] for event in events]
    for record in records:
        if frames := record.get("frames"):
            if id(frames) not in kept_frames:  # several records share one list of frames
                kept = [frame for frame in frames if keeps(frame["filename"])]
                kept_frames[id(frames)] = frames, kept
            record["frames"] = kept_frames[id(frames)][1]


class PinnedStats(NamedTuple):
    """Statistics of PyTorch's pinned host memory, in bytes; empty if torch is too old for them."""

    owned: dict[str, int]
    """``"allocated_bytes"``: all pinned blocks, including those that no tensor uses"""
    active: dict[str, int]
    """``"active_bytes"``: the pinned blocks that tensors or unfinished copies use"""


class AllocatorView:
    """Wraps PyTorch's bindings and still reads the allocator's real figures."""

    def __init__(self) -> None:
        self.backend: Backend = CUDA
        """PyTorch's functions for the type of device that is measured"""
        self._real: dict[str, Callable[..., Any]] = {}
        self._peaks: defaultdict[int, dict[Path, int]] = defaultdict(dict)
        """for each device, the test's peaks before the measurement's last reset"""
        self._noted: dict[int, Stats] = {}
        """for each device, statistics read just before a reset, whose peaks are already in
        ``_peaks``"""
        self._pinned_peaks: dict[Path, int] = {}
        """the test's peaks of pinned memory before the measurement's last reset"""
        self._hidden: defaultdict[int, defaultdict[Path, int]] = defaultdict(
            lambda: defaultdict(int)
        )
        """for each device, the numbers that the measurement has added to counters and totals"""
        self._earlier_retries: defaultdict[int, int] = defaultdict(int)
        """for each device, allocation retries before the test's code last reset the totals"""
        self._listeners: list[Callable[[], object]] = []
        self._readers: list[Callable[[], object]] = []
        """called before the test's code reads a figure"""
        self._emptier: Callable[[Callable[[], object]], object] | None = None
        """called with the real ``torch.cuda.empty_cache`` when the test's code calls that function;
        None: the real function is called alone"""
        self._shows_all = False
        self.history = SharedHistory(
            self._notify,
            self._unchanged,
            lambda: self.snapshot()["device_traces"],
            self._switch_history,
            self._record_history,
        )
        self.plugs: dict[tuple[int, int], Plug] = {}
        """by device and address: blocks that snapshots and statistics show as free"""
        self._plugged: defaultdict[int, Counter[Path]] = defaultdict(Counter)
        """for each device, the numbers that the plugs add to current figures"""

    def install(self) -> None:
        """Wrap the bindings, once."""
        if self._real:
            return
        import torch

        wrappers: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(STATS, self._show_stats),
            **dict.fromkeys(PEAK_RESETS, self._reset_peaks_of_test),
            **dict.fromkeys(TOTAL_RESETS, self._reset_totals_of_test),
            **dict.fromkeys(
                RELEASES, lambda binding: self._emptier(binding) if self._emptier else binding()
            ),
            PINNED_STATS: self._show_pinned_stats,
            PINNED_PEAK_RESET: self._reset_pinned_peaks_of_test,
            SNAPSHOT: self._show_snapshot,
            HISTORY: self._set_history,
            LEGACY_HISTORY: self._set_legacy_history,
        }
        self._real = BINDINGS.values(torch._C)
        bound = {name: _bound(wrappers[name], binding) for name, binding in self._real.items()}
        BINDINGS.put(torch._C, bound)

    # -- for the measurement --

    def stats(self, device: int) -> Stats:
        """Return the allocator's real statistics of a device; {} before the device's first use.

        The retries are counted over the whole process, whatever the test's code has reset.
        """
        self.install()
        stats = self.backend.complete(self._real[self.backend.bindings.stats](device))
        if stats:
            stats[RETRIES] += self._earlier_retries[device]
        return stats

    def snapshot(self) -> dict[str, Any]:
        """Return the backend's snapshot, including what is hidden from the test's code.

        Frames of C++ are left out.
        """
        with self._unchanged(), _inductor_not_imported():
            snapshot = self.backend.snapshot()
        if self.history.has_frames_of_cpp:
            # File names such as "<string>" and "<frozen importlib._bootstrap>" are Python's, too.
            _keep_frames(snapshot, lambda filename: filename.endswith((".py", ">")))
        return snapshot

    def segments(self) -> list[dict[str, Any]]:
        """Return ``torch.cuda.memory_snapshot()``, including blocks hidden from the test's code.

        The list is empty if the backend's allocator does not list its blocks.
        """
        import torch

        if not self.backend.lists_blocks:
            return []

        with self._unchanged(), _inductor_not_imported():
            segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(**_without_traces())
        return segments

    def live_blocks(self) -> dict[tuple[int, int], int]:
        """Map device and address of each allocated block, on any device, to its bytes."""
        blocks = {}
        for segment in self.segments():
            address = segment["address"]
            for block in segment["blocks"]:
                address = block.get("address", address)
                if block["state"] == "active_allocated":
                    blocks[segment["device"], address] = block["size"]
                address += block["size"]
        return blocks

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        start = time.time_ns() // 1000
        self._shows_all = True
        try:
            yield
        finally:
            self._shows_all = False
            if self.history.is_used_by_test:  # taking a snapshot adds an event
                self.history.hide_since(start)

    def reset_peaks(self, device: int) -> None:
        """Reset the real peaks; the test's code still reads its highest peaks."""
        self._note_peaks(device)
        self._real[self.backend.bindings.reset_peaks](device)

    def pinned_stats(self) -> PinnedStats:
        """Return the real statistics of pinned host memory; two empty dicts before torch 2.10.

        In older versions the statistics have other names, and their peaks mean something else.
        """
        stats = self._read_pinned()
        if "active_bytes" not in stats:
            return PinnedStats({}, {})
        return PinnedStats(stats["allocated_bytes"], stats["active_bytes"])

    def _read_pinned(self) -> Stats:
        self.install()
        read = self._real.get(self.backend.bindings.pinned_stats)
        return {} if read is None else read()  # an older torch does not have it

    def reset_pinned_peaks(self) -> None:
        """Reset the real peaks of pinned host memory; the test's code still reads its highest."""
        for path, peak in _peaks(self._read_pinned()):
            self._pinned_peaks[path] = max(self._pinned_peaks.get(path, 0), peak)
        reset = self._real.get(self.backend.bindings.reset_pinned_peaks)
        if reset is not None:
            reset()

    def empty_cache(self) -> None:
        """Call the real ``torch.cuda.empty_cache()``."""
        self.install()
        self._real[self.backend.bindings.empty_cache]()

    @contextmanager
    def hidden(self, devices: Iterable[int]) -> Iterator[None]:
        """Leave what the allocator does inside the block out of the figures that the test reads.

        Blocks that stay allocated must be plugs: current memory is not compared, because other
        threads may allocate meanwhile.
        """
        start = time.time_ns() // 1000
        devices = list(devices)
        for device in devices:
            self._note_peaks(device)
        try:
            with self._hidden_differences(
                devices, lambda path: path[-1] not in {"peak", "current"}
            ):
                yield
        finally:
            self.history.hide_since(start)
            for device in devices:
                self._real[self.backend.bindings.reset_peaks](device)

    def add_plug(self, plug: Plug) -> None:
        """Show a block to the test's code as free from now on."""
        self.plugs[plug.device, plug.address] = plug
        self._noted.pop(plug.device, None)
        self._plugged[plug.device].update(dict(plug.current_figures()))

    def remove_plug(self, device: int, address: int) -> Plug:
        """Stop hiding a block, now that it is freed, and return it."""
        plug = self.plugs.pop((device, address))
        self._noted.pop(device, None)
        self._plugged[device].subtract(dict(plug.current_figures()))
        return plug

    # -- blocks that the test's code freed and the measurement keeps allocated --

    def add_reader(self, look: Callable[[], object]) -> None:
        """Call ``look`` before the test's code reads a figure."""
        self._readers.append(look)

    def remove_reader(self, look: Callable[[], object]) -> None:
        """Undo :meth:`add_reader`, if it was called."""
        if look in self._readers:
            self._readers.remove(look)

    def show_freed(self, plugs: Sequence[Plug]) -> None:
        """Show blocks to the test's code as free from now on, although they stay allocated."""
        self._notify()
        self._change_plugs(plugs, self.add_plug, -1)

    def hide_freed(self, plugs: Sequence[Plug]) -> None:
        """Undo :meth:`show_freed`, now that the blocks are free."""
        self._change_plugs(plugs, lambda plug: self.remove_plug(plug.device, plug.address), 1)

    def _change_plugs(
        self, plugs: Sequence[Plug], change: Callable[[Plug], object], sign: int
    ) -> None:
        devices = {plug.device for plug in plugs}
        for device in devices:
            self._note_peaks(device)
        for plug in plugs:
            change(plug)
            for path, share in plug.freed_figures():
                self._hidden[plug.device][path] += sign * share
        for device in devices:
            self._real[self.backend.bindings.reset_peaks](device)

    @contextmanager
    def emptying(self, empty: Callable[[Callable[[], object]], object]) -> Iterator[None]:
        """Call ``empty`` when the test calls ``torch.cuda.empty_cache``, until the block ends.

        ``empty`` gets the real function as its argument.
        """
        outer, self._emptier = self._emptier, empty
        try:
            yield
        finally:
            self._emptier = outer

    def hidden_counters(self, devices: Iterable[int]) -> AbstractContextManager[None]:
        """Hide from the test's code what calls inside the block add to counters."""
        return self._hidden_differences(devices, _is_counter)

    @contextmanager
    def _hidden_differences(
        self, devices: Iterable[int], hides: Callable[[Path], bool]
    ) -> Iterator[None]:
        start = {device: self.stats(device) for device in devices}
        try:
            yield
        finally:
            for device, old_stats in start.items():
                new_stats = self.stats(device)
                if new_stats == old_stats:  # the usual case: comparing every figure takes longer
                    continue
                figures = dict(_figures(old_stats))
                for path, value in _figures(new_stats):
                    if hides(path) and value != figures.get(path, 0):
                        self._hidden[device][path] += value - figures.get(path, 0)

    @contextmanager
    def watched_resets(self, notify: Callable[[], object]) -> Iterator[None]:
        """Call ``notify`` just before anything resets the global statistics or history."""
        self.install()
        self._listeners.append(notify)
        try:
            yield
        finally:
            self._listeners.remove(notify)

    def _notify(self) -> None:
        for notify in self._listeners:
            notify()

    def _note_peaks(self, device: int) -> None:
        stats = self.stats(device)
        if stats == self._noted.get(device):
            return
        self._noted[device] = stats
        peaks, plugged = self._peaks[device], self._plugged[device]
        for path, peak in _peaks(stats):
            current = (*path[:-1], "current")
            own = peak - plugged[current]
            if own > peaks.get(path, 0):
                peaks[path] = own

    # -- for the test's code --

    def _read(self) -> None:
        for look in self._readers:
            look()

    def _show_stats(self, binding: Callable[..., Any], device: int) -> Stats:
        self._read()
        stats: Stats = binding(device)
        peaks, hidden = self._peaks[device], self._hidden[device]
        if not peaks and not hidden and not self.plugs:
            return stats
        for path, value in list(_figures(stats)):
            *outer, name = path
            statistic = stats
            for key in outer:
                statistic = statistic[key]
            if name == "peak":
                current = (*outer, "current")
                own = value - self._plugged[device][current]
                statistic[name] = max(own, peaks.get(path, 0))
            elif name == "current":
                statistic[name] = value - self._plugged[device][path]
            else:
                statistic[name] = value - hidden[path]
        return stats

    def _show_pinned_stats(self, binding: Callable[..., Any]) -> Stats:
        stats: Stats = binding()
        for (name, *_), value in self._pinned_peaks.items():
            stats[name]["peak"] = max(stats[name]["peak"], value)
        return stats

    def _reset_pinned_peaks_of_test(self, binding: Callable[..., Any]) -> object:
        self._notify()
        self._pinned_peaks.clear()
        result: object = binding()
        return result

    def _reset_peaks_of_test(self, binding: Callable[..., Any], device: int) -> object:
        self._read()
        self._notify()
        result: object = binding(device)
        self._peaks[device].clear()
        self._noted.pop(device, None)
        return result

    def _reset_totals_of_test(self, binding: Callable[..., Any], device: int) -> object:
        self._read()
        self._notify()
        self._earlier_retries[device] = self.stats(device).get(RETRIES, 0)
        result: object = binding(device)
        hidden = self._hidden[device]
        for path, value in _figures(self._real[self.backend.bindings.stats](device)):
            if path[-1] in TOTALS or _is_counter(path):
                # The test's code reads ``value - hidden[path]``, which must not be negative.
                hidden[path] = max(0, min(hidden[path], value))
        return result

    def _record_history(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - PyTorch's
        self.backend.record_history(*arguments, **options)

    def _switch_history(self, *arguments: Any) -> object:  # noqa: ANN401 - the binding's
        result: object = self._real[HISTORY](*arguments)
        return result

    def _set_history(self, binding: Callable[..., Any], *arguments: Any) -> object:  # noqa: ANN401 - the binding's
        return binding(*arguments) if self._shows_all else self.history.set_by_test(*arguments)

    def _set_legacy_history(self, _binding: Callable[..., Any], *arguments: Any) -> object:  # noqa: ANN401 - the binding's
        return self._set_history(self._real[HISTORY], *from_legacy(arguments))

    def _show_snapshot(self, binding: Callable[..., Any], *arguments: object) -> dict[str, Any]:
        if self._shows_all:
            whole: dict[str, Any] = binding(*arguments)
            return whole
        self._read()
        snapshot: dict[str, Any] = binding(*arguments)
        for segment in snapshot["segments"]:
            if any(device == segment["device"] for device, _ in self.plugs):
                self._hide_plugs(segment)
        snapshot["device_traces"] = self.history.shown(snapshot.get("device_traces", []))
        if self.history.hides_frames_of_blocks:
            for segment in snapshot["segments"]:
                for record in (segment, *segment["blocks"]):
                    record["frames"] = []
        # Operators run through this package, so its frames are on their stacks.
        _keep_frames(snapshot, lambda filename: not filename.startswith(OWN_FOLDER))
        return snapshot

    def _hide_plugs(self, segment: dict[str, Any]) -> None:
        """Show plugs as free blocks, merged with the free blocks beside them."""
        blocks: list[dict[str, Any]] = []
        address = segment["address"]
        for block in segment["blocks"]:
            if (segment["device"], address) in self.plugs:
                block["state"] = "inactive"
                for total, size in (
                    ("allocated_size", block["size"]),
                    ("active_size", block["size"]),
                    ("requested_size", block.get("requested_size", 0)),
                ):
                    if total in segment:
                        segment[total] -= size
                block["requested_size"] = 0
            address += block["size"]
            if blocks and block["state"] == blocks[-1]["state"] == "inactive":
                blocks[-1]["size"] += block["size"]
            else:
                blocks.append(block)
        segment["blocks"] = blocks


class _NamesButInductor(set[str]):
    """A set of module names that hides Inductor's name from the thread that created the set."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._thread = threading.get_ident()

    def __contains__(self, name: object) -> bool:
        hidden = name == INDUCTOR and threading.get_ident() == self._thread
        return not hidden and super().__contains__(name)


@functools.cache
def _without_traces() -> dict[str, Any]:
    """Return the argument that leaves events out of a snapshot, if this torch has it."""
    import torch

    takes = inspect.signature(torch.cuda.memory_snapshot).parameters
    return {"include_traces": False} if "include_traces" in takes else {}


@contextmanager
def _inductor_not_imported() -> Iterator[None]:
    """Keep a snapshot from importing Inductor where nothing has imported it yet.

    To resolve lines of compiled code PyTorch calls ``hasattr(torch, "_inductor")``, which imports
    Inductor with Dynamo and sympy: this takes seconds, even in a program that compiles nothing.
    """
    torch: Any = importlib.import_module("torch")
    names = getattr(torch, "_lazy_modules", None)
    if f"torch.{INDUCTOR}" in sys.modules or not isinstance(names, set):
        yield
        return
    with ExitStack() as stack:
        LAZY_MODULES.put(torch, {"_lazy_modules": _NamesButInductor(names)}, stack)
        yield


def _is_counter(path: Path) -> bool:
    """Return whether a figure counts events: "num_ooms" does; "max_split_size" is a setting."""
    return len(path) == 1 and str(path[0]).startswith("num_")


def _peaks(stats: Stats, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield each peak with the keys that lead to it.

    This is faster than :func:`_figures`, which matters because statistics are read often.
    """
    for key, value in stats.items():
        if not isinstance(value, dict):
            continue
        if "peak" in value:
            yield (*path, key, "peak"), value["peak"]
        else:
            yield from _peaks(value, (*path, key))


def _bound(wrapper: Callable[..., Any], binding: Callable[..., Any]) -> Callable[..., Any]:
    def binding_as_seen(*arguments: object) -> object:
        return wrapper(binding, *arguments)

    binding_as_seen.__name__ = getattr(binding, "__name__", "binding")
    return binding_as_seen


def _figures(stats: Stats, path: Path = ()) -> Iterator[tuple[Path, int]]:
    for key, value in stats.items():
        if isinstance(value, dict):
            yield from _figures(value, (*path, key))
        else:
            yield (*path, key), value


VIEW: Final = AllocatorView()
