"""The protocol of one measurement: settle, reset, run, read; on a real or a virtual GPU alike."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.attribution.optimizer_watch import OptimizerWatch
from pytest_gpumem.attribution.recorder import Recorder, history
from pytest_gpumem.attribution.recording import Span, beginning, now
from pytest_gpumem.devices.memory_cap import kept_fractions, set_cap
from pytest_gpumem.devices.memory_use import shared
from pytest_gpumem.measurement import DeviceInfo, Measurement, Peak
from pytest_gpumem.meter.allocator import (
    alloc_retries,
    collect_all,
    held_now,
    most_held,
    own_garbage_only,
    require_native_allocator,
    reset_peaks,
    segments_held,
    settle,
    watched_resets,
)
from pytest_gpumem.meter.isolation import Holdings
from pytest_gpumem.meter.out_of_memory import WATCH
from pytest_gpumem.meter.peaks import Apart, Tally, outside
from pytest_gpumem.meter.provenance import provenance
from pytest_gpumem.meter.step_watch import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim import Optimizer

    from pytest_gpumem.attribution.recording import Recording
    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.devices.memory_use import UseWatch
    from pytest_gpumem.measurement import OutOfMemory

LATEST_S: Final = 0.3
"""seconds that a step may take to let go of its memory once an error has ended it"""


class Meter:
    """Measures one step on ``count`` devices, from the first that its device has, which is open.

    What others hold is not counted: a figure is what the allocator says, less that.

    The allocator's peak statistics are global. Whoever needs figures of their own (a part of a
    test, a fixture's set-up) *folds*: the peaks so far go into every open tally, and are reset.
    """

    def __init__(
        self,
        device: Device,
        info: DeviceInfo,
        count: int,
        *,
        record: bool = False,
        steady: bool = False,
    ) -> None:
        """Measure; ``record`` records it, ``steady`` notes what each step leaves allocated."""
        self.device = device
        self.info = info
        self.count = count
        self.devices = range(device.first, device.first + count)
        """their numbers in this process"""
        self._holdings = Holdings(self.devices)
        self.steps = Steps(lambda: [peak.allocated for peak in self.counted()])
        self._steady = steady
        self._optimizers = OptimizerWatch(self._before_step, self._after_step)
        self._stepping = False
        """whether an optimizer's step is under way; an error may have ended it"""
        self._stack = ExitStack()
        self._whole = Tally(self._holdings.others)
        self._open = [self._whole]
        self._limit: int | None = None
        self._retries = 0
        self._use: UseWatch
        self._recorder = Recorder() if record else None
        self._began = 0.0
        self._apart: list[Span] = []
        """when what happened was not the step's"""

    def start(self, owned: Sequence[Peak] | None = None, *, count_held: bool = False) -> None:
        """Settle, and begin to count.

        Args:
            owned: what of the memory held now belongs to the step (a module's fixtures that it
                uses), one Peak a device.
            count_held: all that is held now belongs to it.

        Raises:
            DeviceError: PyTorch's allocator is not the one whose figures these are.
        """
        require_native_allocator()
        self._holdings.plugs.release()
        settle(self.devices)
        found = self._holdings.separate(owned, count_held=count_held)
        self.device.make_room([other.reserved for other in self.others])
        self._retries = alloc_retries(found)
        self._stack.callback(self._holdings.plugs.release)
        self._stack.enter_context(kept_fractions(self.devices))
        self._stack.enter_context(own_garbage_only())
        self._stack.enter_context(watched_resets(self.note))
        self._optimizers.start()
        self._stack.callback(self._optimizers.stop)
        if self._recorder is not None:
            self._record(self._recorder)
        self._use = self.device.watch(self.devices)
        self._stack.callback(self._use.stop)
        self._begin(found)

    def _record(self, recorder: Recorder) -> None:
        recorder.start(self._holdings.plugs.blocks)
        self._stack.callback(recorder.abandon)

    def _begin(self, found: Sequence[dict[str, Any]]) -> None:
        """Begin to count; ``found`` is what the allocators' statistics are now."""
        held = [held_now(it) for it in found]
        WATCH.start()
        self.steps.forget()
        self._use.start([it.reserved for it in held])
        self._began = beginning()
        reset_peaks(self.devices)
        self._stepping = False
        self._whole.begin(self._holdings.own(held))
        self._open = [self._whole]

    def stop(self) -> None:
        """End it: lift the cap and let go of all that was done to the process."""
        self._stack.close()

    # -- reading --

    def counted(self) -> list[Peak]:
        """Return what belongs to the step now, one Peak a device."""
        return self._holdings.own_now()

    @property
    def others(self) -> tuple[Peak, ...]:
        """What others hold and is not counted, one Peak a device."""
        return tuple(self._holdings.others)

    def note(self) -> None:
        """Take the peaks so far into every open tally."""
        self._note(self._holdings.stats())

    def _note(self, found: Sequence[dict[str, Any]]) -> None:
        peaks = self._holdings.own([most_held(it) for it in found])
        for tally in self._open:
            tally.raise_to(peaks, stepping=self._stepping)
        self._use.look()

    def blocks(self) -> dict[tuple[int, int], int]:
        """Return device, address and bytes of each live block, others' included."""
        return self._holdings.blocks()

    def _before_step(self) -> None:
        self._stepping = False  # up to now, at least
        self.fold()
        self._stepping = True

    def _after_step(self, optimizer: Optimizer) -> None:
        self.fold()
        self._stepping = False
        if self._steady:
            self.steps.stepped(optimizer)

    def fold(self) -> None:
        """Take them, and reset them: what comes is for a tally of its own."""
        self.note()
        reset_peaks(self.devices)

    def peaks(self) -> tuple[Peak, ...]:
        """Return the whole step's peaks so far, one a device."""
        self.note()
        return tuple(self._whole.peaks)

    def passes(self) -> tuple[Peak, ...]:
        """Return the same without optimizers' steps."""
        self.note()
        return tuple(self._whole.passes)

    # -- what has figures of its own --

    @contextmanager
    def part(self) -> Iterator[Tally]:
        """Tally what happens inside, beside the whole step."""
        self.fold()
        tally = Tally(self.counted())
        self._open.append(tally)
        began = beginning()
        try:
            yield tally
        finally:
            self.note()
            self._open.remove(tally)
            tally.windows.append(Span(began, now()))

    @contextmanager
    def apart(self, *, record: bool = False, script: bool = False) -> Iterator[Apart]:
        """Tally what happens inside, and let it count for nothing else.

        It begins on a settled device, and leaves one. What is held already counts for it.

        Args:
            record: keep a recording of it.
            script: keep the allocator's events.
        """
        self.resettle()
        open_before, refusals = self._open, WATCH.count
        retries = alloc_retries(self._holdings.stats())
        before = self.counted()
        tally = Apart(before)
        self._open, self._stepping = [tally], False
        began = beginning()
        try:
            with self._optimizers.apart(), self._recorded(tally, record=record, script=script):
                yield tally
                self.note()
                tally.windows = [Span(began, now())]
        finally:
            refused = WATCH.count > refusals
            WATCH.forget(refusals)
            self._retries += alloc_retries(self._holdings.stats()) - retries
            self.resettle()
            if refused:
                self.await_release(sum(held.allocated for held in before))
            self._open = open_before
            self._apart.append(Span(began, now()))

    @contextmanager
    def _recorded(self, tally: Apart, *, record: bool, script: bool) -> Iterator[None]:
        recorder = self._recorder
        if recorder is not None:
            began = beginning()
            yield
            if record or script:
                tally.recording = recorder.so_far()
                tally.events = [
                    [it for it in events if it["time_us"] >= began]
                    for events in self._mine(tally.recording.events)
                ]
        elif record:
            recorder = Recorder()
            recorder.start(self._holdings.plugs.blocks)
            try:
                yield
            finally:
                tally.recording = recorder.stop()
        elif script:
            with history() as events:
                yield
            tally.events = list(self._mine(events))
        else:
            yield

    def _mine(self, events: Sequence[Any]) -> Sequence[Any]:
        """Return what is of this step's devices, of what there is one of each device of."""
        return events[self.devices.start : self.devices.stop]

    def resettle(self) -> None:
        """Settle in the midst of a step: its live memory stays counted, its cache goes."""
        self.fold()
        with self._recorder.ours() if self._recorder else nullcontext():
            self._holdings.plugs.release()
            settle(self.devices)
            self._holdings.plugs.fill()
        reset_peaks(self.devices)

    def release(self) -> None:
        """Let go of all that nobody refers to any more, also of what was made before the step."""
        collect_all()
        self.resettle()

    def await_release(self, allocated: int) -> None:
        """Wait for what a step held that an error ended, and settle.

        Autograd's threads let go of theirs a little later than the error is caught.

        Args:
            allocated: bytes that will be held on all devices together, if nothing is kept.
        """
        end = time.monotonic() + LATEST_S
        while sum(held.allocated for held in self.counted()) > allocated:
            if time.monotonic() > end:  # it is kept
                return
            time.sleep(LATEST_S / 100)
            self.resettle()

    def adopt(self, peaks: Sequence[Peak]) -> None:
        """Count, as from the beginning, what was taken for others': one Peak a device."""
        self.fold()
        self._holdings.adopt(peaks)
        for tally in self._open:
            tally.add(peaks)

    def consider(self, peaks: Sequence[Peak]) -> None:
        """Count peaks that the step's set-up had when somebody else ran it."""
        self._whole.raise_to(peaks)

    def restart(self, *, record: bool = False) -> None:
        """Begin anew with what is held now: after a warm-up, or to run the step once more.

        ``record`` begins a recording.
        """
        collect_all()
        self.resettle()
        self._optimizers.forget()
        if record:
            if self._recorder is not None:
                self._recorder.abandon()
            self._recorder = Recorder()  # an error may have left the other in the midst of a step
            self._record(self._recorder)
        self._begin(self._holdings.stats())

    @property
    def records(self) -> bool:
        """Whether a recording is under way."""
        return self._recorder is not None

    def recording(self) -> Recording | None:
        """End the recording and return it; None where there is none."""
        recorder, self._recorder = self._recorder, None
        return recorder.stop() if recorder else None

    def windows(self, tally: Tally | None = None) -> list[Span]:
        """Return when the whole step was measured, or a part's tally."""
        spans = tally.windows if tally else [Span(self._began, now())]
        return list(outside(spans, self._apart))

    # -- the cap --

    @property
    def capacity(self) -> int:
        """Bytes that the step may reserve on a device: the cap, or what the device has to give."""
        import torch

        if self._limit is not None:
            return self._limit
        free = [torch.cuda.mem_get_info(device)[0] for device in self.devices]
        return min(one + held.reserved for one, held in zip(free, self.counted(), strict=True))

    def cap(self, limit: int | None) -> int | None:
        """Cap what the step may reserve, on each device, in bytes; return the cap before."""
        before, self._limit = self._limit, limit
        for device, other in zip(self.devices, self.others, strict=True):
            room = None if limit is None else limit + other.reserved
            set_cap(device, room, self.device.cap_total(device))
        return before

    # -- the result --

    def result(
        self,
        *,
        tally: Tally | None = None,
        out_of_memory: OutOfMemory | None = None,
        notes: Sequence[str] = (),
    ) -> Measurement:
        """Return the measurement of the whole step, or of a part's tally."""
        found = self._holdings.stats()
        self._note(found)
        segments = segments_held(found)
        whole = tally is None
        held = [held_now(it) for it in found]
        use = self._use.result([it.reserved for it in held]) if whole else ()
        retained = self._holdings.own(held)
        if whole and any(peak.allocated for peak in retained):
            gc.collect()
            retained = self.counted()
        said = [*notes, *shared(use, self.info.name)]
        ended = whole and out_of_memory is None
        if ended:
            said.extend(self._optimizers.notes())
        if ended and WATCH.count:
            said.append(f"the step caught {WATCH.count} out-of-memory error(s) itself")
        return Measurement(
            device=self.info,
            provenance=provenance(self.device),
            peaks=tuple((tally or self._whole).peaks),
            held=self.others,
            retained=tuple(retained),
            alloc_retries=alloc_retries(found) - self._retries,
            segments=segments,
            out_of_memory=out_of_memory,
            notes=tuple(said),
            device_use=use,
            steps=self.steps.by_device() if ended and self._steady else (),
        )
