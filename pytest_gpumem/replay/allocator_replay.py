"""Replay a run's requests in PyTorch's allocator, with the bounds of sizes that are unknown.

The allocator itself is the model: it rounds, splits and releases segments as it does in a run. No
part of the step runs again. The allocator separates the memory of each stream, and of each CUDA
graph's pool. So the replay uses new streams and pools, and does not touch live memory in those of
the run.

The requests come from the run's recording. A workspace that the run did not request, because its
usual size is zero, is requested at the time of the library's query or call.

cuDNN's choice of a plan changes the requests: with ``torch.backends.cudnn.benchmark`` PyTorch
allocates the largest workspace to time plans, then that of the fastest plan. At the lower bound
both have the size of the smallest plan's workspace. If the largest workspace of a convolution does
not fit, PyTorch uses the next plan, with the usual workspace.

In the run, a tensor that another stream uses (``record_stream``) is freed as soon as PyTorch
queries its event. At the upper bound it is freed when the program has waited for that stream, or
before PyTorch empties its cache or fails, because PyTorch itself then waits for such streams.
PyTorch counts such a tensor as allocated until the program drops it, and its memory as reserved for
longer.

Requests of a GPU that times kernels, or that chose a faster kernel with more memory, are made only
at the upper bound.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from pytest_gpumem.devices.memory_cap import set_cap
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.peaks import minus
from pytest_gpumem.meter.plugs import Plugs
from pytest_gpumem.meter.reading import current, peak_in
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.replay.match_alternatives import NoRangeError, add_alternatives
from pytest_gpumem.replay.request_script import SHARED, RequestScript, ServedRequests
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from pytest_gpumem.devices.base import Alternatives, Device, RangeEnd
    from pytest_gpumem.measurement import DeviceInfo
    from pytest_gpumem.meter.meter import Meter
    from pytest_gpumem.meter.peaks import Held
    from pytest_gpumem.recording.recording import Recording, Span
    from pytest_gpumem.replay.request_script import Pool, Request, Step
    from pytest_gpumem.spec import MemorySpec

TOO_MANY: Final = "the range is unknown: the run has too many allocations"
NO_POOLS: Final = "the range is unknown: this torch has no pools of memory in expandable segments"
UNFIT: Final = "the step does not fit with the largest figures"


class ReplayedRun(Protocol):
    """The attributes of a finished :class:`~pytest_gpumem.testrun.run.Run` that a replay needs."""

    spec: MemorySpec
    device: Device
    info: DeviceInfo
    meter: Meter

    @property
    def limit(self) -> int | None:
        """Bytes that the step may reserve; None without a limit."""

    @property
    def held_before(self) -> Sequence[Held]:
        """Memory per device of the used live fixtures of wider scope that earlier tests set up."""

    @property
    def searches(self) -> Mapping[str, object]:
        """Results of searches with a baseline, by the baseline's name."""

    def limit_of(self, part: str) -> int | None:
        """Return a part's own limit of reserved bytes; None if the part has none."""

    def windows(self, part: str) -> list[Span]:
        """Return the time spans in which the test (""), or a part of it, was measured."""

    def peaks_of(self, part: str) -> tuple[Peak, ...]:
        """Return the peaks of the test ("") or of a part; empty if the part did not run."""


class AllocatorReplay:
    """Finds the peaks of one run with other sizes of requests, and with later frees."""

    def __init__(
        self,
        run: ReplayedRun,
        recording: Recording,
        parts: Sequence[str],
        alternatives: Alternatives,
    ) -> None:
        """Read a recording.

        Raises:
            NoRangeError: the recording has too many requests or lacks some, or the step caught an
                out-of-memory error.
        """
        blocks, awaited = alternatives.blocks, alternatives.events
        if recording.overflowed or blocks is None or awaited is None:
            raise NoRangeError(TOO_MANY)
        # Skip blocks of an earlier run of the test: the recording has no requests for them.
        blocks = [block for block in blocks if block.time >= recording.began]
        self._run = run
        self.alone: dict[str, tuple[Peak, ...]] = {}
        """the replay's peaks of the test and its parts with the run's own sizes"""
        self.passed_over = 0
        """bytes of the largest request that PyTorch may refuse on a GPU although a block that it
        waits for has room; 0 if there is none (see ``_Stage.passed_over``)"""
        self._windows = {part: run.windows(part) for part in parts}
        self._scripts: list[RequestScript] = []
        first = run.meter.devices.start
        for device in run.meter.devices:
            script = RequestScript.read(recording, device, retried=run.meter.alloc_retries > 0)
            if script is None:
                raise NoRangeError(TOO_MANY)
            if script.refused:
                raise NoRangeError("the range is unknown: the step caught an out-of-memory error")
            # A block with an address matches only on its own device; a block without address and
            # place is assigned to the first device.
            mine = [
                block
                for block in blocks
                if (block.place[0] == device if block.place else block.address or device == first)
            ]
            add_alternatives(script, mine, [event for event in awaited if event.device == device])
            self._scripts.append(script)
        self._measured = {part: tuple(map(unpinned, run.peaks_of(part))) for part in parts}
        self._initial = [unpinned(held) for held in run.held_before]

    @contextmanager
    def checked(self) -> Iterator[AllocatorReplay]:
        """Allow replays within the block, if the run's own sizes reproduce the measured peaks.

        If memory of earlier tests may have changed the measured peak reserved, only the peak
        allocated is compared.

        Raises:
            NoRangeError: the run's own sizes do not reproduce the peaks.
        """
        meter = self._run.meter
        with meter.separately(), VIEW.hidden(meter.devices):
            self.alone, _ = self.peaks("usual")
            # If the allocator retried a request on a full device, the program may have made other
            # requests than in a test that runs alone: then the peak reserved is compared, too.
            in_doubt = meter.isolation.is_reserved_in_doubt and not meter.alloc_retries
            for part, peaks in self._measured.items():
                for alone, measured in zip(self.alone[part], peaks, strict=True):
                    is_same = (
                        alone.allocated == measured.allocated if in_doubt else alone == measured
                    )
                    if not is_same:
                        raise NoRangeError(
                            "the range is unknown: a replay of the run's requests had other peaks"
                        )
            yield self

    def has_late_frees(self) -> bool:
        """Return whether other streams may use tensors longer than in the run."""
        return any(script.late for script in self._scripts)

    def reasons(self) -> list[str]:
        """Return the unknown choices that may make a GPU request more."""
        requests = (request for script in self._scripts for request in script.requests)
        reasons = (request.block.reason for request in requests if request.block is not None)
        return list(dict.fromkeys(filter(None, reasons)))

    def peaks(
        self, end: RangeEnd, without: Collection[str] = (), *, share: float = 1
    ) -> tuple[dict[str, tuple[Peak, ...]], int]:
        """Return the peaks per device of the test and its parts, if all sizes are at a range's end.

        At the upper bound the requests that only some GPUs make are added, except those for the
        reasons in ``without``, and other streams use tensors for a ``share`` of the longest
        possible delay.

        Returns:
            the peaks by part, and how many of the largest workspaces did not fit and were replaced
            by a smaller one.

        Raises:
            NoRangeError: the test does not fit with these sizes.
        """
        run, unfit = self._run, 0
        columns: dict[str, list[Peak]] = {part: [] for part in self._windows}
        for script, initial, device in zip(
            self._scripts, self._initial, run.meter.devices, strict=True
        ):
            sizes = [request.size_at(end, without) for request in script.requests]
            stage = _Stage(run, device, initial, script, sizes)
            try:
                if end == "most":
                    peaks = stage.serve(script.steps_with_waits(share), self._windows)
                else:
                    peaks = stage.serve(script.steps, self._windows)
            finally:
                stage.end()
            unfit += stage.unfit
            self.passed_over = max(self.passed_over, stage.passed_over)
            for part, peak in peaks.items():
                limit = run.limit_of(part)
                if limit is not None and peak.reserved > limit:
                    raise NoRangeError(UNFIT)
                columns[part].append(peak)
        return {part: tuple(column) for part, column in columns.items()}, unfit


def segment_of(size: int) -> int:
    """Return the bytes of the segment that PyTorch reserves to serve a request.

    The rule is get_allocation_size's in c10/cuda/CUDACachingAllocator.cpp; it does not hold with
    expandable segments.
    """
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


def unpinned(peak: Peak | Held) -> Peak:
    """Return a peak without pinned memory, which a replay does not request."""
    return Peak(peak.allocated, peak.reserved)


class _Stage:
    """One device during a replay, with the new streams and pools that serve the requests."""

    def __init__(
        self,
        run: ReplayedRun,
        device: int,
        initial: Peak,
        script: RequestScript,
        sizes: Sequence[int],
    ) -> None:
        """Make room for a script's requests and ``initial``, the memory held as the step began."""
        import torch

        self.unfit = 0
        """number of workspaces that did not fit"""
        self.passed_over = 0
        """bytes of the largest request that only a block freed by a wait can serve; 0 if there is
        none"""
        self._torch = torch
        self._device = device
        self._run = run
        self._initial = initial
        self._script = script
        self._sizes = sizes
        self._base = current(device)
        self._plugs = Plugs(range(device, device + 1))
        self._served = ServedRequests(device)
        self._streamed: dict[int, int] = {}
        """block sizes in bytes of live requests that another stream uses"""
        self._waiting: dict[int, int] = {}
        """block sizes in bytes of such requests that the program has dropped: PyTorch no longer
        counts them as allocated"""
        self._uncounted: set[int] = set()
        """live requests that do not count in a peak"""
        self._streams: dict[int, int] = {}
        """for each stream of the run: handle of the replay's stream"""
        self._pools: dict[Pool, Any] = {}
        """for each pool of the run: the replay's pool"""
        self._peaks: dict[str, Peak] = {}
        """peaks so far by part"""
        self._open: list[str] = []
        """parts whose window is open"""
        held = self._base.reserved - initial.reserved
        run.device.make_room([held] * run.meter.count)
        limit = None if run.limit is None else run.limit + held
        self._limit = run.info.usable_memory + held if limit is None else limit
        """bytes that the allocator may reserve"""
        set_cap(device, limit, held)

    def end(self) -> None:
        """Release what the replay allocated, and restore the device's size and cap."""
        self._served.free_all()
        self._plugs.release()
        self._pools.clear()
        VIEW.empty_cache()
        for stream in self._streams.values():
            self._torch.cuda.cudart().cudaStreamDestroy(stream)
        self._run.device.make_room([peak.reserved for peak in self._run.meter.isolation.foreign])
        self._run.meter.room.cap(self._run.limit)

    def serve(self, steps: Sequence[Step], windows: dict[str, list[Span]]) -> dict[str, Peak]:
        """Serve the requests in these steps; return the peak in each part's windows.

        Raises:
            NoRangeError: a request is refused.
        """
        timeline: list[tuple[float, int, Any]] = [(step[0], 1, step) for step in steps]
        for part, spans in windows.items():
            for span in spans:
                timeline += [(span.start, 0, part), (span.end, 2, part)]
        timeline.sort(key=lambda entry: entry[:2])
        self._peaks = dict.fromkeys(windows, Peak(0, 0))
        keeps_late = {number for _, action, number in steps if action == "free late"}
        VIEW.reset_peaks(self._device)
        for _, kind, subject in timeline:
            if kind == 1:
                _, action, number = subject
                self._step(action, number, keeps_late)
                continue
            self._fold()
            if kind == 0:
                self._open.append(subject)
            else:
                self._open.remove(subject)
        return self._peaks

    def _fold(self) -> None:
        """Raise the peaks of the open parts to the peak since the last call."""
        peak = minus(peak_in(VIEW.stats(self._device)), self._base)
        not_allocated = self._plugs.sizes[0] + sum(self._waiting.values())
        allocated = max(0, peak.allocated - not_allocated) + self._initial.allocated
        reserved = peak.reserved + self._initial.reserved
        for part in set(self._open):
            old_peaks = self._peaks[part]
            self._peaks[part] = Peak(
                max(old_peaks.allocated, allocated), max(old_peaks.reserved, reserved)
            )
        VIEW.reset_peaks(self._device)

    def _step(self, action: str, number: int, keeps_late: Collection[int]) -> None:
        if action == "allocate":
            self._serve_request(number, is_late=number in keeps_late)
        elif action == "free" and number in self._streamed:
            self._fold()
            self._waiting[number] = self._streamed.pop(number)
        elif action == "free" and number in self._served.living:
            self._give(number)
        elif action == "free late" and number in self._waiting:
            self._end_waiting([number])
        elif action == "end pool":
            self._pools.pop(self._script.pools[number], None)
        elif action in {"release", "settle"}:
            self._end_waiting([*self._waiting])
            if action == "release":
                VIEW.empty_cache()
            else:
                self._plugs.release()
                VIEW.empty_cache()
                self._plugs.fill()

    def _serve_request(self, number: int, *, is_late: bool) -> None:
        size, request = self._sizes[number], self._script.requests[number]
        if not size:
            return
        if request.block is not None and not request.block.counted:
            if not self._uncounted:
                self._fold()
            self._uncounted.add(number)
        if self._take(number, size, request, is_late=is_late):
            return
        if request.block is None or request.block.use != "planned":
            raise NoRangeError(UNFIT)
        self.unfit += 1  # PyTorch continues with another plan, of the usual size
        if request.size and not self._take(number, request.size, request, is_late=is_late):
            raise NoRangeError(UNFIT)

    def _take(self, number: int, size: int, request: Request, *, is_late: bool) -> bool:
        """Allocate a request with this size; return whether it fitted.

        The allocator waits for other streams before it fails. Then it reserves a new segment,
        without trying the blocks that the wait has freed (pytorch#189504): if such a block could
        serve this request, its size counts in ``passed_over``.
        """
        old_bytes = current(self._device).allocated if is_late else 0
        if not self._try(number, size, request):
            waiting = sum(self._waiting.values())
            self._end_waiting([*self._waiting])
            if waiting:
                VIEW.empty_cache()
            reserved = current(self._device).reserved
            if not waiting or not self._try(number, size, request):
                return False
            grown = current(self._device).reserved > reserved
            if not grown and reserved + segment_of(size) > self._limit:
                self.passed_over = max(self.passed_over, size)
            old_bytes -= waiting
        if is_late:
            self._streamed[number] = current(self._device).allocated - old_bytes
        return True

    def _try(self, number: int, size: int, request: Request) -> bool:
        if request.stream not in self._streams:  # torch.cuda.Stream() may reuse the run's
            handle = ctypes.c_uint64(0)
            with self._torch.cuda.device(self._device):
                self._torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))
            self._streams[request.stream] = handle.value
        stream = self._streams[request.stream]
        if request.pool == SHARED:
            return self._served.allocate(number, size, stream)
        if request.pool not in self._pools:
            with self._torch.cuda.device(self._device):
                self._pools[request.pool] = self._torch.cuda.MemPool()
        try:
            with self._torch.cuda.use_mem_pool(self._pools[request.pool], self._device):
                return self._served.allocate(number, size, stream)
        except RuntimeError as error:  # torch 2.7 with expandable segments
            raise NoRangeError(NO_POOLS) from error

    def _end_waiting(self, numbers: Sequence[int]) -> None:
        """Free blocks that other streams use, as the allocator does after waiting for them."""
        if not numbers:
            return
        self._fold()
        for number in numbers:
            del self._waiting[number]
            self._give(number)
        VIEW.reset_peaks(self._device)

    def _give(self, number: int) -> None:
        self._served.free(number)
        if number in self._uncounted:
            self._uncounted.remove(number)
            if not self._uncounted:  # forget their peak; their memory stays reserved
                VIEW.reset_peaks(self._device)
