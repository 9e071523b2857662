"""A run's requests served once more by PyTorch's allocator, with workspaces of other sizes.

The allocator itself is the model: it rounds, splits, and gives segments back as it does in a run.
Nothing of the step runs again. The requests are those of the run's recording. A workspace is among
them where the run asked for one; where none was asked for (its usual size is zero), its request
comes at the moment of the library's question or call.

What a plan changes in the requests: with ``torch.backends.cudnn.benchmark`` PyTorch allocates the
largest workspace to time plans, then that of the fastest: at the lower end both are those of the
smallest plan. Where the largest workspace of a convolution finds no room, PyTorch takes the next
plan, with the usual one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pytest_gpumem.allocator_view import VIEW
from pytest_gpumem.devices.memory_cap import set_cap
from pytest_gpumem.measurement import Peak
from pytest_gpumem.meter.allocator import current, peak_in
from pytest_gpumem.meter.isolation import Plugs
from pytest_gpumem.meter.out_of_memory import is_out_of_memory
from pytest_gpumem.meter.peaks import minus, plus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.attribution.recording import Recording, Span
    from pytest_gpumem.devices.base import Workspace
    from pytest_gpumem.testrun.run import Run

End = Literal["least", "usual", "most"]
"""an end of the ranges, or the sizes that the run had"""

MAX_REQUESTS: Final = 200_000
"""requests and frees of a device that are still served once more: each takes some microseconds"""
TOO_MANY: Final = "the range is unknown: the run has too many allocations"
UNFIT: Final = "the step does not fit with the largest workspaces"
UNITS: Final = (1, 4, 8, 16)
"""bytes of an element, where a library is asked for a number of elements"""
CLOCKS: Final = 2
"""microseconds by which the allocator's clock and the system's may differ"""


class NoRangeError(Exception):
    """The ends of a run's peaks cannot be told; the message says why."""


class _Sizes(NamedTuple):
    """Bytes of a workspace."""

    least: int
    usual: int
    most: int
    replaceable: bool = False
    """PyTorch goes on with the usual one where the most finds no room"""


@dataclass
class _Request:
    """A request of a script."""

    size: int
    stream: int
    sizes: _Sizes | None = None
    """of a workspace"""


@dataclass
class _Script:
    """What one device's allocator was asked for, in its order."""

    requests: list[_Request] = field(default_factory=list)
    steps: list[tuple[float, str, int]] = field(default_factory=list)
    """each with its time, what is done, and the number of a request: "take", "give"; "release" the
    cache, "settle" as the measurement does it"""


class WorkspaceReplay:
    """Tells the peaks of one run with other sizes of workspaces."""

    def __init__(self, run: Run, recording: Recording, parts: Sequence[str]) -> None:
        """Read a recording, and check that its requests lead to the peaks that were measured.

        Raises:
            NoRangeError: they do not, or are too many.
        """
        workspaces = run.device.workspaces.used()
        if recording.overflowed or workspaces is None:
            raise NoRangeError(TOO_MANY)
        # Those of an earlier run, which this one took the place of, have no requests here.
        workspaces = [note for note in workspaces if note.time >= recording.began]
        self._run = run
        self._windows = {part: run.windows(part) for part in parts}
        self._scripts = []
        for device in run.meter.devices:
            reader = _Reader(recording, device, retried=run.meter.alloc_retries > 0)
            # A workspace is on the device with its address; without one it is on the first.
            mine = [note for note in workspaces if reader.has(note, run.meter.devices.start)]
            self._scripts.append(reader.script(mine))
        self._measured = {part: run.peaks_of(part) for part in parts}
        self._initial = [_held_before(run, index) for index in range(run.spec.devices)]
        peaks, _ = self.peaks("usual")
        if peaks != self._measured:
            raise NoRangeError(
                "the range is unknown: the run's requests, replayed, do not give its peaks"
            )

    def peaks(self, end: End) -> tuple[dict[str, tuple[Peak, ...]], int]:
        """Return the peaks of the test and its parts with this end of all ranges, one a device.

        Returns:
            also how many of the largest workspaces found no room, and had a smaller one's place.

        Raises:
            NoRangeError: the test does not fit with them.
        """
        run, unfit = self._run, 0
        columns: dict[str, list[Peak]] = {part: [] for part in self._windows}
        with run.meter.apart(), VIEW.hidden(run.meter.devices):
            for index, device in enumerate(run.meter.devices):
                stage = _Stage(run, device, self._initial[index])
                try:
                    peaks = stage.serve(self._scripts[index], self._windows, end)
                finally:
                    stage.end()
                unfit += stage.unfit
                for part, peak in peaks.items():
                    limit = run.parts[part].spec.max_bytes if part in run.parts else None
                    if limit is not None and peak.reserved > limit:
                        raise NoRangeError(UNFIT)
                    columns[part].append(peak)
        return {part: tuple(column) for part, column in columns.items()}, unfit


def _held_before(run: Run, index: int) -> Peak:
    """Return the memory of live fixtures of wider scope that other tests set up."""
    held = Peak(0, 0)
    for fixture in run.owned:
        if fixture.before_run and len(fixture.held) > index:
            held = plus(held, fixture.held[index])
    return held


class _Reader:
    """Reads one device's script from a recording."""

    def __init__(self, recording: Recording, device: int, *, retried: bool) -> None:
        self._events = recording.events[device] if device < len(recording.events) else []
        self._ours: Sequence[Span] = recording.ours
        self._retried = retried
        if len(self._events) > MAX_REQUESTS:
            raise NoRangeError(TOO_MANY)
        self._by_address: dict[int, list[tuple[float, int]]] = {}
        """by address: when it was given, and to which request"""
        self._device = device
        self._addresses = {event.get("addr") for event in self._events}

    def has(self, note: Workspace, first: int) -> bool:
        """Return whether a workspace is this device's."""
        if not note.address:
            return self._device == first
        return note.address in self._addresses

    def script(self, notes: Sequence[Workspace]) -> _Script:
        """Return the script, with the sizes that workspaces may have."""
        script = self._plain()
        return _with_workspaces(script, self._by_address, notes) if notes else script

    def _plain(self) -> _Script:
        script = _Script()
        living: dict[int, int] = {}
        spans = list(self._ours)
        for at, event in enumerate(self._events):
            time = event["time_us"]
            while spans and spans[0].end < time:
                script.steps.append((spans.pop(0).end, "settle", 0))
            is_ours = bool(spans) and spans[0].start <= time
            self._read(script, living, at, is_ours=is_ours)
        script.steps += [(span.end, "settle", 0) for span in spans]
        return script

    def _read(self, script: _Script, living: dict[int, int], at: int, *, is_ours: bool) -> None:
        """Put an event into a script; ``living`` has the requests by their addresses."""
        event = self._events[at]
        time, action, address = event["time_us"], event["action"], event.get("addr", 0)
        if action == "free_completed":
            if address in living:  # else a block of before, or a plug
                script.steps.append((time, "give", living.pop(address)))
        elif is_ours:
            return
        elif action == "alloc":
            living[address] = number = len(script.requests)
            script.requests.append(_Request(event["size"], event["stream"]))
            script.steps.append((time, "take", number))
            self._by_address.setdefault(address, []).append((time, number))
        elif action in {"segment_free", "segment_unmap"}:
            if not self._is_retry(at) and script.steps[-1:] != [(time, "release", 0)]:
                script.steps.append((time, "release", 0))
        elif action == "oom":
            raise NoRangeError("the range is unknown: the step caught an out-of-memory error")

    def _is_retry(self, at: int) -> bool:
        """Return whether the allocator emptied its cache for the request that comes next."""
        if not self._retried:
            return False
        following = (event["action"] for event in self._events[at:])
        frees = {"segment_free", "segment_unmap"}
        return next((action for action in following if action not in frees), "") in {
            "segment_alloc",
            "segment_map",
        }


def _with_workspaces(
    script: _Script, by_address: dict[int, list[tuple[float, int]]], notes: Sequence[Workspace]
) -> _Script:
    """Return a script with the sizes of its workspaces, and with those that were not asked for."""
    takes = [(time, number) for time, action, number in script.steps if action == "take"]
    times = [time for time, _ in takes]
    used: set[int] = set()
    added: list[tuple[float, int, _Request, str]] = []
    ends: list[float] = []
    for note in notes:
        if note.use == "end":
            ends.append(note.time)
        elif note.address:
            given = by_address.get(note.address, [])
            at = bisect_right(given, (note.time + CLOCKS, len(script.requests))) - 1
            if at >= 0:
                script.requests[given[at][1]].sizes = _Sizes(
                    note.least, note.usual, note.most, replaceable=note.use == "planned"
                )
        elif note.usual:
            number = _following(script, takes, times, note, used)
            used.add(number)
            unit = script.requests[number].size // note.usual
            script.requests[number].sizes = _Sizes(
                unit * note.least, unit * note.usual, unit * note.most
            )
        else:
            last = bisect_right(times, note.time + CLOCKS) - 1
            stream = script.requests[takes[last][1]].stream if last >= 0 else 0
            sizes = _Sizes(note.least, note.usual, note.most, note.use == "planned")
            tied = takes[last][1] if note.use == "kept" and last >= 0 else -1
            added.append((note.time, tied, _Request(0, stream, sizes), note.use))
    return _merged(script, added, ends)


def _following(
    script: _Script,
    takes: Sequence[tuple[float, int]],
    times: Sequence[float],
    note: Workspace,
    used: set[int],
) -> int:
    """Return the number of the request that a question for a workspace led to."""
    at = bisect_right(times, note.time - CLOCKS)
    sizes = {unit * note.usual for unit in UNITS}
    for _, number in takes[at : at + 64]:
        if number not in used and script.requests[number].size in sizes:
            return number
    raise NoRangeError("the range is unknown: a workspace was not found among the run's requests")


def _merged(
    script: _Script, added: Sequence[tuple[float, int, _Request, str]], ends: Sequence[float]
) -> _Script:
    """Return a script with requests at their times, each given back as its use has it."""
    merged = _Script(script.requests)
    waiting = list(added)
    passing: list[int] = []
    held: list[tuple[int, float]] = []
    tied: dict[int, list[int]] = {}
    for step in script.steps:
        time, action, number = step
        while waiting and waiting[0][0] < time:
            asked, block, request, use = waiting.pop(0)
            merged.steps.append((asked, "take", len(merged.requests)))
            if use == "kept" and block >= 0:
                tied.setdefault(block, []).append(len(merged.requests))
            elif use == "held":
                after = bisect_right(ends, asked)
                held.append((len(merged.requests), ends[after] if after < len(ends) else asked))
            else:
                passing.append(len(merged.requests))
                if use in {"in use", "planned"}:  # the call has ended before the next one
                    merged.requests.append(request)
                    merged.steps.append((asked, "give", passing.pop()))
                    continue
            merged.requests.append(request)
        merged.steps += [(time, "give", passed) for passed in passing]
        passing.clear()
        for entry in [entry for entry in held if entry[1] < time]:
            merged.steps.append((time, "give", entry[0]))
            held.remove(entry)
        merged.steps.append(step)
        if action == "give":
            merged.steps += [(time, "give", block) for block in tied.pop(number, ())]
    return merged


class _Stage:
    """One device while a script is served: settled, with all rooms filled."""

    def __init__(self, run: Run, device: int, initial: Peak) -> None:
        import torch

        self.unfit = 0
        """how many workspaces found no room"""
        self._torch = torch
        self._device = device
        self._run = run
        self._initial = initial
        """what the step held at first: it stays as it is"""
        self._base = current(device)
        self._plugs = Plugs(range(device, device + 1))
        self._living: dict[int, int] = {}
        """the addresses of requests that were met"""
        run.device.make_room([self._base.reserved - initial.reserved] * run.spec.devices)
        self._cap(run.limit)

    def _cap(self, limit: int | None) -> None:
        held = self._base.reserved - self._initial.reserved
        total = self._run.device.cap_total(self._device)
        set_cap(self._device, None if limit is None else limit + held, total, held)

    def end(self) -> None:
        """Give all back."""
        for number in list(self._living):
            self._give(number)
        self._plugs.release()
        VIEW.empty_cache()
        self._run.device.make_room([peak.reserved for peak in self._run.meter.foreign])
        self._run.meter.cap(self._run.limit)

    def serve(
        self,
        script: _Script,
        windows: dict[str, list[Span]],
        end: End,
    ) -> dict[str, Peak]:
        """Serve a script; return the peak in each part's windows.

        Raises:
            NoRangeError: a request is refused.
        """
        bounds: list[tuple[float, int, str]] = []
        for part, spans in windows.items():
            for span in spans:
                bounds += [(span.start, 0, part), (span.end, 2, part)]
        steps = [(time, 1, at) for at, (time, _, _) in enumerate(script.steps)]
        peaks = dict.fromkeys(windows, Peak(0, 0))
        open_parts: list[str] = []
        timeline: list[tuple[float, int, Any]] = sorted([*bounds, *steps], key=lambda it: it[:2])
        VIEW.reset_peaks(self._device)
        for _, kind, subject in timeline:
            if kind == 1:
                action, number = script.steps[subject][1:]
                self._step(script, action, number, end)
                continue
            self._fold(peaks, open_parts)
            if kind == 0:
                open_parts.append(subject)
            else:
                open_parts.remove(subject)
        return peaks

    def _fold(self, peaks: dict[str, Peak], open_parts: Sequence[str]) -> None:
        """Put the peak since the last time into those of the open parts."""
        peak = minus(peak_in(VIEW.stats(self._device)), self._base)
        peak = plus(minus(peak, Peak(self._plugs.sizes[0], 0)), self._initial)
        for part in set(open_parts):
            before = peaks[part]
            peaks[part] = Peak(
                max(before.allocated, peak.allocated), max(before.reserved, peak.reserved)
            )
        VIEW.reset_peaks(self._device)

    def _step(self, script: _Script, action: str, number: int, end: End) -> None:
        if action == "take":
            self._serve(script.requests[number], number, end)
        elif action == "give":
            if number in self._living:
                self._give(number)
        elif action == "release":
            VIEW.empty_cache()
        elif action == "settle":
            self._plugs.release()
            VIEW.empty_cache()
            self._plugs.fill()

    def _serve(self, request: _Request, number: int, end: End) -> None:
        sizes = request.sizes
        size = request.size
        if sizes is not None and end != "usual":
            size = sizes.least if end == "least" else sizes.most
        if not size or self._take(number, size, request.stream):
            return
        if sizes is None or not sizes.replaceable:
            raise NoRangeError(UNFIT)
        self.unfit += 1
        if request.size and not self._take(number, request.size, request.stream):
            raise NoRangeError(UNFIT)

    def _take(self, number: int, size: int, stream: int) -> bool:
        try:
            self._living[number] = self._torch.cuda.caching_allocator_alloc(
                size, self._device, stream
            )
        except RuntimeError as error:
            if is_out_of_memory(error):
                return False
            raise
        return True

    def _give(self, number: int) -> None:
        self._torch.cuda.caching_allocator_delete(self._living.pop(number))
