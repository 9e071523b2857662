"""The allocator's figures as the test's own code reads them: as if nothing were measured.

A measurement resets PyTorch's peaks, which are global, and holds blocks of its own (plugs). The
bindings below ``torch.cuda.memory`` and ``torch.accelerator.memory`` are wrapped, once a process,
so that every function, also one imported earlier, returns the values without that:

- a peak is the highest since the test's own last reset, the measurement's resets left out;
- blocks and counts of the measurement are left out of statistics and snapshots.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    Stats = dict[str, Any]
    """a device's statistics, nested as ``torch.cuda.memory_stats_as_nested_dict`` has them"""

STATS: Final = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
PEAK_RESETS: Final = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
TOTAL_RESETS: Final = ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats")
RELEASES: Final = ("_cuda_emptyCache", "_accelerator_emptyCache")
SNAPSHOT: Final = "_cuda_memorySnapshot"
HISTORY: Final = "_cuda_record_memory_history"
MOST_EVENTS: Final = 1_000_000
"""allocations and frees that a history keeps; of more the first are lost"""
RETRIES: Final = "num_alloc_retries"
TOTALS: Final = ("allocated", "freed")
"""figures of a statistic that only grow, until they are reset"""
COUNTS: Final = ("allocation", "active")
"""statistics of a number of blocks"""
SIZES: Final = ("allocated_bytes", "active_bytes", "requested_bytes")
"""statistics of the blocks' bytes"""


Path = tuple[Any, ...]
"""the keys that lead to a figure in nested statistics"""


class Plug(NamedTuple):
    """A block of the measurement's own."""

    device: int
    address: int
    size: int
    """bytes"""
    pool: str
    """the allocator's: ``"small_pool"`` or ``"large_pool"``"""
    fills: bool
    """nothing is left of the free room that it was taken from"""

    def current_figures(self) -> Iterator[tuple[Path, int]]:
        """Yield its share in each current figure of its device."""
        for pool in ("all", self.pool):
            yield from (((count, pool, "current"), 1) for count in COUNTS)
            yield from (((size, pool, "current"), self.size) for size in SIZES)
            yield ("inactive_split", pool, "current"), -int(self.fills)
            yield ("inactive_split_bytes", pool, "current"), -self.size


class AllocatorView:
    """Wraps PyTorch's bindings, and knows the allocator's real figures."""

    def __init__(self) -> None:
        self._real: dict[str, Callable[..., Any]] = {}
        self._peaks: defaultdict[int, dict[Path, int]] = defaultdict(dict)
        """of each device and statistic: the highest of the time before the measurement's reset"""
        self._hidden: defaultdict[int, defaultdict[Path, int]] = defaultdict(
            lambda: defaultdict(int)
        )
        """of each device, counter and total: the measurement's share"""
        self._hidden_times: list[tuple[int, int]] = []
        """microseconds since 1970: from and until when the allocator worked for the measurement"""
        self._earlier_retries: defaultdict[int, int] = defaultdict(int)
        """of each device: retries before the test's own last reset"""
        self._listeners: list[Callable[[], object]] = []
        self._histories: list[bool] = []
        """the measurement's histories under way: whether each needs frames"""
        self.history_number = 0
        """grows when the real history begins anew"""
        self.releases = 0
        """calls of ``torch.cuda.empty_cache()`` by the test's code, while a history is under way"""
        self._test_history: tuple[Any, ...] | None = None
        """arguments with which the test's own code switched the history on"""
        self._test_start = 0
        """microseconds since 1970: when it did"""
        self._test_events: list[list[dict[str, Any]]] = []
        """of each device: the test's events that the real history no longer has"""
        self._shows_all = False
        self.plugs: dict[tuple[int, int], Plug] = {}
        """by device and address: blocks that snapshots and statistics show as free"""
        self._plugged: defaultdict[int, Counter[Path]] = defaultdict(Counter)
        """of each device and current figure: the share of the plugs"""

    def install(self) -> None:
        """Wrap the bindings; nothing if that is done."""
        if self._real:
            return
        import torch

        wrappers: dict[str, Callable[..., Any]] = {
            SNAPSHOT: self._show_snapshot,
            HISTORY: self._set_history_of_test,
        }
        wrappers |= dict.fromkeys(STATS, self._show_stats)
        for names, reset in (
            (PEAK_RESETS, self._reset_peaks_of_test),
            (TOTAL_RESETS, self._reset_totals_of_test),
            (RELEASES, self._empty_cache_of_test),
        ):
            wrappers |= dict.fromkeys(names, reset)
        for name, wrapper in wrappers.items():
            binding = getattr(torch._C, name, None)
            if binding is not None:
                self._real[name] = binding
                setattr(torch._C, name, _bound(wrapper, binding))

    # -- the measurement's side --

    def stats(self, device: int) -> Stats:
        """Return the allocator's real statistics of a device, none before it has been used.

        The number of retries is that of the whole process, whatever the test's code has reset.
        """
        self.install()
        stats: Stats = self._real[STATS[0]](device)
        if stats:
            stats[RETRIES] += self._earlier_retries[device]
        return stats

    def snapshot(self) -> dict[str, Any]:
        """Return ``torch.cuda.memory._snapshot()`` with the measurement's blocks and events."""
        import torch

        with self._unchanged():
            snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        return snapshot

    def segments(self) -> list[dict[str, Any]]:
        """Return ``torch.cuda.memory_snapshot()`` with the measurement's blocks."""
        import torch

        with self._unchanged():
            segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
        return segments

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        start = time.time_ns() // 1000
        self._shows_all = True
        try:
            yield
        finally:
            self._shows_all = False
            if self._test_history is not None:  # a snapshot is an event of its own
                self._hidden_times.append((start, time.time_ns() // 1000 + 1))

    def reset_peaks(self, device: int) -> None:
        """Reset the real peaks; the test's code goes on reading the highest."""
        self._note_peaks(device)
        self._real[PEAK_RESETS[0]](device)

    def empty_cache(self) -> None:
        """Call ``torch.cuda.empty_cache()`` for the measurement."""
        self.install()
        self._real[RELEASES[0]]()

    @contextmanager
    def hidden(self, devices: Iterable[int]) -> Iterator[None]:
        """Leave the allocator's work inside out of the figures that the test's code reads.

        Blocks that stay have to be plugs: the difference of the memory held has the work of
        other threads as well.
        """
        start = time.time_ns() // 1000
        devices = list(devices)
        for device in devices:
            self._note_peaks(device)
        with self._hidden_differences(devices, lambda path: path[-1] not in {"peak", "current"}):
            yield
        self._hidden_times.append((start, time.time_ns() // 1000 + 1))
        for device in devices:
            self._real[PEAK_RESETS[0]](device)

    def add_plug(self, plug: Plug) -> None:
        """Show a block as free from now on."""
        self.plugs[plug.device, plug.address] = plug
        self._plugged[plug.device].update(dict(plug.current_figures()))

    def remove_plug(self, device: int, address: int) -> None:
        """Show a block that is freed now as it is."""
        plug = self.plugs.pop((device, address))
        self._plugged[device].subtract(dict(plug.current_figures()))

    def hidden_counters(self, devices: Iterable[int]) -> AbstractContextManager[None]:
        """Leave the calls inside out of the counters that the test's code reads."""
        return self._hidden_differences(devices, _is_counter)

    @contextmanager
    def _hidden_differences(
        self, devices: Iterable[int], selects: Callable[[Path], bool]
    ) -> Iterator[None]:
        start = {device: dict(_figures(self.stats(device))) for device in devices}
        try:
            yield
        finally:
            for device, figures in start.items():
                for path, value in _figures(self.stats(device)):
                    if selects(path) and value != figures.get(path, 0):
                        self._hidden[device][path] += value - figures.get(path, 0)

    def begin_history(self, *, frames: bool) -> None:
        """Switch the allocator's history on; the test's code sees events of its own history only.

        Args:
            frames: record the Python frames of each allocation.
        """
        self._notify()
        self._histories.append(frames)
        self.clear_history()

    def end_history(self, *, frames: bool) -> None:
        """End a history that was begun so."""
        self._notify()
        self._histories.remove(frames)
        self.clear_history()

    @property
    def clearable(self) -> bool:
        """Whether no recording would lose events if the history began anew."""
        return not any(self._histories)

    def clear_history(self) -> None:
        """Begin the real history anew, with all that the histories under way need."""
        import torch

        self.install()
        if self._test_history is not None:
            self._test_events = self._events_of_test(self.snapshot()["device_traces"])
        record = torch.cuda.memory._record_memory_history
        with self._unchanged():
            record(None)  # else older events stay
            if any(self._histories) or (self._histories and self._test_history is not None):
                record("all", context="alloc", stacks="python", max_entries=MOST_EVENTS)
            elif self._histories:
                record("all", context=None, max_entries=MOST_EVENTS)
            elif self._test_history is not None:
                self._real[HISTORY](*self._test_history)
        self.history_number += 1

    @contextmanager
    def watched_resets(self, notify: Callable[[], object]) -> Iterator[None]:
        """Call ``notify`` just before statistics or the history are reset, which are global."""
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
        peaks = self._peaks[device]
        for path, value in _figures(self.stats(device)):
            if path[-1] == "peak":
                plugged = self._plugged[device][(*path[:-1], "current")]
                peaks[path] = max(peaks.get(path, 0), value - plugged)

    # -- the test's side --

    def _show_stats(self, binding: Callable[..., Any], device: int) -> Stats:
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
                own = value - self._plugged[device][(*outer, "current")]
                statistic[name] = max(own, peaks.get(path, 0))
            elif name == "current":
                statistic[name] = value - self._plugged[device][path]
            else:
                statistic[name] = value - hidden[path]
        return stats

    def _reset_peaks_of_test(self, binding: Callable[..., Any], device: int) -> object:
        self._notify()
        result: object = binding(device)
        self._peaks[device].clear()
        return result

    def _reset_totals_of_test(self, binding: Callable[..., Any], device: int) -> object:
        self._notify()
        self._earlier_retries[device] = self.stats(device).get(RETRIES, 0)
        result: object = binding(device)
        hidden = self._hidden[device]
        for path, value in _figures(self._real[STATS[0]](device)):
            if path[-1] in TOTALS or _is_counter(path):
                hidden[path] = min(hidden[path], value)  # nothing of 0 is hidden
        return result

    def _empty_cache_of_test(self, binding: Callable[..., Any]) -> object:
        if self._histories:  # the history has no event of a call that found nothing to release
            self._notify()
            self.releases += 1
        return binding()

    def _set_history_of_test(self, binding: Callable[..., Any], *arguments: Any) -> object:  # noqa: ANN401 - the binding's
        if self._shows_all:
            return binding(*arguments)
        began = self._test_history is None
        self._test_history = arguments if arguments and arguments[0] else None
        if began or self._test_history is None:
            self._test_start = time.time_ns() // 1000
            self._test_events = []
        if not self._histories:
            return binding(*arguments)
        if self.clearable:  # a recording of the measurement's has all that the test's needs
            self._notify()
            self.clear_history()
        return None

    def _events_of_test(self, traces: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """Return the events that the test's own history has, of the real one's."""
        if self._histories and self._test_history is None:
            return [[] for _ in traces]
        start = self._test_start if self._histories else 0
        shown = []
        for device, events in enumerate(traces):
            earlier = self._test_events[device] if device < len(self._test_events) else []
            own = [
                event
                for event in events
                if event["time_us"] >= start
                and not any(hidden <= event["time_us"] < end for hidden, end in self._hidden_times)
            ]
            shown.append([*earlier, *own])
        return shown

    def _show_snapshot(self, binding: Callable[..., Any], *arguments: object) -> dict[str, Any]:
        snapshot: dict[str, Any] = binding(*arguments)
        if self._shows_all:
            return snapshot
        for segment in snapshot["segments"]:
            if any(device == segment["device"] for device, _ in self.plugs):
                self._hide_plugs(segment)
        snapshot["device_traces"] = self._events_of_test(snapshot.get("device_traces", []))
        return snapshot

    def _hide_plugs(self, segment: dict[str, Any]) -> None:
        """Show plugs as the free rooms that they fill, joined with free ones beside them."""
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


def _is_counter(path: Path) -> bool:
    """Return whether a figure counts events: "num_ooms", not the setting "max_split_size"."""
    return len(path) == 1 and str(path[0]).startswith("num_")


def _bound(wrapper: Callable[..., Any], binding: Callable[..., Any]) -> Callable[..., Any]:
    def binding_as_seen(*arguments: object) -> object:
        return wrapper(binding, *arguments)

    binding_as_seen.__name__ = getattr(binding, "__name__", "binding")
    return binding_as_seen


def _figures(stats: Stats, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield each figure of nested statistics, with the keys that lead to it."""
    for key, value in stats.items():
        if isinstance(value, dict):
            yield from _figures(value, (*path, key))
        else:
            yield (*path, key), value


VIEW: Final = AllocatorView()
