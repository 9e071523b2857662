"""Measure one step: settle, reset the peaks, run, read; the same on a real and a virtual GPU.

To settle is to release unused memory: garbage, cuBLAS workspaces, and PyTorch's caches.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.autograd_threads import NODE_NUMBERS, await_autograd, awaited_passes
from pytest_gpumem.devices.memory_cap import kept_fractions
from pytest_gpumem.devices.torch_import import hide_from_compiler
from pytest_gpumem.measurement import DeviceInfo, Measurement
from pytest_gpumem.meter.allocator import (
    SWITCHED_OFF,
    collect_all,
    collect_garbage,
    is_switched_off,
    own_garbage_only,
    provenance,
    require_native_allocator,
    reset_peaks,
    settle,
    switch_on,
)
from pytest_gpumem.meter.compile_watch import COMPILER
from pytest_gpumem.meter.dropout_state import DROPOUT
from pytest_gpumem.meter.host_memory import LOOPS, PINNED_EARLY, HostWatch
from pytest_gpumem.meter.isolation import Isolation
from pytest_gpumem.meter.out_of_memory import WATCH
from pytest_gpumem.meter.peaks import (
    NOTHING,
    CompilerMemory,
    Tally,
    fullest,
    outside,
    reported,
)
from pytest_gpumem.meter.room import Room
from pytest_gpumem.meter.step_recording import StepRecording
from pytest_gpumem.meter.step_watch import GarbageWatch, Steps
from pytest_gpumem.notes import Note, NoteKind, notes_of
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.collector import Uncounted
from pytest_gpumem.recording.graphs import HOOKS
from pytest_gpumem.recording.optimizer_watch import OptimizerWatch
from pytest_gpumem.recording.recording import Span, beginning, now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim import Optimizer

    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.devices.memory_use import UseWatch
    from pytest_gpumem.measurement import DeviceUse, OutOfMemory, Peak, PinnedCount
    from pytest_gpumem.meter.peaks import Held, Highest
    from pytest_gpumem.meter.reading import Reading
    from pytest_gpumem.recording.recording import Known, Recording


ACTIVE: Final[list[Meter]] = []
"""stack of this process's meters: only the last one is counting; there are two if, for example, a
program under ``gpumem run`` runs pytest"""


class Meter:
    """Measures one step on ``count`` devices, starting at PyTorch's current device.

    Foreign memory is not counted: a figure is the allocator's, less the memory of earlier tests.

    The allocator's peak statistics are global. To get separate figures (for a part of a test, or a
    fixture's set-up), the meter *folds*: it raises every open tally to the peaks so far, and resets
    the peaks.
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
        """Create a meter.

        With ``record`` the meter records the step; with ``steady`` it notes the memory after each
        optimizer's step.
        """
        self.device = device
        self.info = info
        self.count = count
        first = VIEW.backend.current_device()
        self.devices = range(first, first + count)
        self.isolation = Isolation(self.devices)
        self.room = Room(device, self.isolation)
        self.recording = StepRecording(self.isolation.plugs)
        self._record = record
        # A weak reference avoids a cycle: the next meter's collection would find this meter as
        # garbage, and would have to run a second time.
        meter = weakref.proxy(self)
        self._garbage = GarbageWatch(partial(Meter.requested, meter))
        self.steps = Steps(partial(Meter.requested, meter), self._garbage)
        self._first: Reading
        """the reading when the step began"""
        self._steady = steady
        self._optimizers = OptimizerWatch(
            partial(Meter._before_step, meter),
            partial(Meter._after_step, meter),
            lambda: fullest(meter._whole.highest.all).allocated,
        )
        self._stepping = False
        """whether an optimizer's step is running; stays True if an error ended that step"""
        self._stack = ExitStack()
        self._whole = Tally(self.isolation.foreign)
        self._open = [self._whole]
        self._separate_retries = 0
        """the allocator's retries in runs that do not belong to the step"""
        self._left_off = False
        """whether the step disabled the caching allocator, so that the meter enabled it again"""
        self._use: UseWatch
        self._began = 0.0
        self._separate_spans: list[Span] = []
        """time spans of runs that do not belong to the step"""
        self._compiler = CompilerMemory()
        self.host = HostWatch()
        self._loops_before = 0
        """DataLoader's pinning threads that had already ended when the step began"""

    def start(self, *, count_held: bool = False) -> None:
        """Settle, and start counting; with ``count_held``, memory held now belongs to the step.

        Raises:
            DeviceError: PyTorch's allocator is not the native one, or its cache is switched off.
        """
        require_native_allocator()
        if ACTIVE:
            self.fold()
            self._stack.callback(ACTIVE[-1]._resume, ACTIVE[-1].counted(), self._whole)
        ACTIVE.append(self)
        self._stack.callback(ACTIVE.remove, self)
        LOOPS.watch()
        self.isolation.plugs.release()
        await_autograd()  # its threads may still free memory, which would count as foreign
        # Without count_held all held memory is foreign, even if only garbage holds it: collect only
        # if needed.
        needs_collection = None if count_held else self.isolation.has_new_blocks
        settle(self.devices, needs_collection=needs_collection)
        self.isolation.separate(count_held=count_held)
        self.room.enlarge()
        self._stack.callback(self.isolation.stop)
        self._stack.enter_context(kept_fractions(self.devices))
        self._stack.enter_context(own_garbage_only())
        self._stack.enter_context(awaited_passes())
        self._stack.enter_context(DROPOUT.renewed(self.isolation.is_foreign))
        NODE_NUMBERS.begin()
        HOOKS.install()
        hide_from_compiler()
        self._stack.callback(self._garbage.stop)
        self._stack.enter_context(VIEW.watched_resets(self.note))
        self._stack.enter_context(VIEW.emptying(self._empty_cache))
        self._stack.enter_context(COMPILER.watched(self._compiling))
        self._optimizers.start()
        self._stack.callback(self._optimizers.stop)
        self._use = self.device.watch(self.devices)
        self._stack.callback(self._use.stop)
        self._stack.callback(self.recording.abandon)
        if self._record:
            self.recording.start()
        self._stack.callback(switch_on)  # first at the end: plugs need the caching allocator
        self._begin()

    def _begin(self) -> None:
        """Start counting from the memory held now."""
        with Uncounted():
            self._first = self.isolation.read()
        WATCH.start(self.isolation.own_of)
        self._separate_retries = 0
        self.steps.forget()
        self._garbage.forget()
        self._garbage.start()
        self._use.start([peak.reserved for peak in self._first.held])
        self._loops_before = LOOPS.begun - LOOPS.alive
        self.host.start()
        self._began = beginning()
        with Uncounted():
            reset_peaks(self.devices)
        self._stepping = False
        self._compiler = CompilerMemory()
        self._whole.begin(self._first.own_held)
        self._open = [self._whole]

    def stop(self) -> None:
        """Lift the cap, and undo every change to the process."""
        self._stack.close()

    # -- reading --

    def counted(self) -> list[Held]:
        """Return the step's own memory now, one item per device."""
        return list(self.isolation.read().own_held)

    def requested(self) -> list[int]:
        """Return the requested bytes of the step's live tensors, one figure per device.

        Unlike allocated bytes, they do not depend on the allocator's free blocks.
        """
        reading = self.isolation.read()
        return [
            held.allocated - unrequested + before
            for held, unrequested, before in zip(
                reading.own_held, reading.unrequested, self._first.unrequested, strict=True
            )
        ]

    def _empty_cache(self, empty: Callable[[], object]) -> object:
        """Empty the cache for the test's code, and release the foreign memory that the test freed.

        ``empty`` is the real ``torch.cuda.empty_cache``, whose result is returned.
        """
        self.fold()
        with self.recording.own_work(settles=False):
            result, changed = self.isolation.empty_cache(empty)
        if changed:
            self._forget_peaks()
            self.room.follow_foreign()
        return result

    def note(self) -> None:
        """Raise every open tally to the peaks so far, unless a nested meter is counting."""
        if self not in ACTIVE[:-1]:
            with Uncounted():
                self._note()

    def _note(self) -> Reading:
        if self.isolation.see_lost():
            self.room.follow_foreign()
        reading = self.isolation.read()
        highest = reading.own_highest
        if self._stepping:
            highest = highest.in_optimizer_step()
        for tally in self._open:
            tally.raise_to(highest)
        self._use.look(
            [peak.reserved for peak in reading.held],
            [peak.reserved for peak in reading.highest],
        )
        return reading

    @property
    def alloc_retries(self) -> int:
        """How often the allocator emptied its cache in the step because the device was full."""
        return self._retries(self.isolation.read())

    def _retries(self, reading: Reading) -> int:
        return reading.retries - self._first.retries - self._separate_retries

    def _before_step(self) -> None:
        self._stepping = False  # no hook is called after an error in a step
        self.fold()
        self._stepping = True

    def _after_step(self, optimizer: Optimizer) -> None:
        self.fold()
        self._stepping = False
        if self._steady:
            self.steps.stepped(optimizer)

    def fold(self) -> None:
        """Raise every open tally to the peaks so far, and reset the allocators' peaks."""
        with Uncounted():
            (ACTIVE or [self])[-1].note()
            reset_peaks(self.devices)

    def _forget_peaks(self) -> None:
        """Reset the peaks of the allocators and of the devices together, as they are compared."""
        reset_peaks(self.devices)
        self._use.forget()

    def _resume(self, held: Sequence[Held], inner: Tally) -> None:
        """Resume after a nested meter: count its peaks on top of the memory held before it."""
        self._forget_peaks()
        for tally in self._open:
            tally.raise_to(inner.highest.on_top_of(held))

    def peaks(self) -> tuple[Peak, ...]:
        """Return the whole step's peaks so far, one per device."""
        self.note()
        return self._whole.peaks

    def passes(self) -> tuple[Peak, ...]:
        """Return the whole step's peaks outside of optimizer steps, one per device."""
        self.note()
        return reported(self._whole.highest.passes)

    # -- parts, and separate runs --

    @contextmanager
    def part(self) -> Iterator[Tally]:
        """Tally the memory of a block of code, in addition to the whole step."""
        self.fold()
        tally = Tally(self.counted())
        self._open.append(tally)
        began = beginning()
        try:
            yield tally
        finally:
            self.note()
            self._open.remove(tally)
            tally.ends = tally.start, self.counted()
            tally.notes = self.isolation.notes(tally.highest.all)
            tally.windows.append(Span(began, now()))

    @contextmanager
    def separately(self, *, record: bool = False) -> Iterator[Tally]:
        """Tally the memory of a block of code separately: it counts in no other tally.

        The device is settled before and after. Memory held before counts too.

        ``record`` stores a recording in the tally.
        """
        self.settle_again()
        open_tallies, refusals = self._open, WATCH.count
        before = self.isolation.read()
        held = before.own_held
        tally = Tally(held)
        self._open, self._stepping = [tally], False
        began = beginning()
        try:
            recording = self.recording.of_block(tally) if record else nullcontext()
            with self._optimizers.separately(), recording:
                yield tally
                self.note()
                tally.windows = [Span(began, now())]
        finally:
            refused = WATCH.count > refusals
            WATCH.forget(refusals)
            self._separate_retries += self.isolation.read().retries - before.retries
            self.settle_again()
            if refused:
                self.await_release(sum(peak.allocated for peak in held))
            self._open = open_tallies
            self._separate_spans.append(Span(began, now()))

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Exclude the memory that PyTorch's compiler uses temporarily from every tally."""
        self.fold()
        before, began = self.counted(), beginning()
        tally, open_tallies = Tally(before), self._open
        self._open = [tally]
        try:
            yield
        except BaseException:  # the error ends the step: count the compiler's memory as the step's
            for other in open_tallies:
                other.raise_to(tally.highest)
            raise
        else:
            self.fold()
            span = Span(began, now())
            self._compiler.add(span, tally.highest, before, self.counted())
        finally:
            self._open = open_tallies

    def settle_again(self) -> None:
        """Settle in the middle of a step: keep counting its live memory, release its cache."""
        self.fold()
        self._left_off |= is_switched_off()
        switch_on()  # plugs need the caching allocator
        if self.isolation.is_empty():
            return
        with self.recording.own_work():
            changed = self.isolation.settle()
        if changed:
            self.room.follow_foreign()
        self._forget_peaks()

    def release(self) -> None:
        """Free the memory of all garbage, including objects made before the step.

        Wait for autograd's threads first: the callback of the last backward pass may hold the last
        reference to a module.
        """
        self._use.release()
        await_autograd()
        collect_all()
        self.settle_again()

    def await_release(self, allocated: int) -> None:
        """Wait until a step that an error ended has freed its memory, and settle.

        Autograd's threads free memory after the error is caught, so wait for them, however long
        that takes. Memory that is still held afterwards is referenced.

        ``allocated`` is the number of bytes, over all devices, that stay allocated in any case.
        """
        if sum(peak.allocated for peak in self.counted()) > allocated:
            await_autograd()
            self.settle_again()

    def adopt(self, held: Sequence[Held], known: Known) -> None:
        """Count foreign memory, one item per device, as the step's own from now on."""
        if all(memory == NOTHING for memory in held):
            return
        self.fold()
        self.isolation.adopt(held, known.keys())
        self.room.follow_foreign()
        self.recording.reuse(known)

    def consider(self, highest: Highest) -> None:
        """Count the peaks of a set-up: the step uses a fixture that an earlier test set up."""
        for tally in self._open:
            tally.raise_to(highest)

    def restart(
        self,
        *,
        record: bool = False,
        at_moment: Callable[[Recording], None] | None = None,
        reused: Iterable[Known] = (),
    ) -> None:
        """Restart from the memory held now: after a warm-up, or to run the step again.

        ``record`` starts a recording, which calls ``at_moment`` at the start and the end of each
        module call, backward pass and optimizer step. ``reused`` are fixtures' blocks that count as
        the step's, although an earlier run allocated them.
        """
        collect_all()
        NODE_NUMBERS.begin()
        self.settle_again()
        self._optimizers.forget()
        if record:
            self.recording.start(at_moment)
        self._begin()
        for known in reused:
            self.recording.reuse(known)

    @property
    def is_unused(self) -> bool:
        """Whether the step had no separate runs and used no memory, not even outside of PyTorch."""
        if self._separate_spans or any(peak.reserved or peak.pinned for peak in self.peaks()):
            return False
        return not any(use.outside > 0 for use in self._device_use(self.isolation.read()))

    def windows(self, tally: Tally | None = None) -> list[Span]:
        """Return the time spans in which the whole step, or a part's tally, was measured."""
        spans = tally.windows if tally else [Span(self._began, now())]
        holes = sorted([*self._separate_spans, *self._compiler.spans], key=lambda span: span.start)
        return list(outside(spans, holes))

    def end_step(self) -> None:
        """Stop counting garbage: memory that becomes garbage from now on was in use in the step."""
        self._garbage.stop()

    # -- the result --

    def _device_use(self, reading: Reading) -> tuple[DeviceUse, ...]:
        """Return the memory in use on each device, also outside of PyTorch."""
        return self._use.result([peak.reserved for peak in reading.held])

    def result(
        self,
        *,
        tally: Tally | None = None,
        out_of_memory: OutOfMemory | None = None,
        notes: Sequence[Note] = (),
    ) -> Measurement:
        """Return the measurement of the whole step, or of a part's tally."""
        reading = self._note()
        whole = tally is None
        use = self._device_use(reading) if whole else ()
        retained = list(tally.ends[1] if tally else reading.own_held)
        if whole and any(peak.allocated for peak in retained):
            collect_garbage()
            retained = self.counted()
        own = [*notes, *(tally.notes if tally else ())]
        if whole:
            peaks = [peak.allocated for peak in self._whole.peaks]
            own += self._use.notes(use, self.info.name, max(peaks, default=0))
            if self._left_off or is_switched_off():
                own.append(SWITCHED_OFF)
            own += [*self.isolation.notes(self._whole.highest.all), *DROPOUT.notes]
            own += notes_of(NoteKind.GARBAGE, self._garbage.notes(peaks))
            own += notes_of(NoteKind.COMPILATION, self._compiler.notes(self._whole.highest))
        if out_of_memory is not None and not WATCH.observes:
            text = (
                f"{VIEW.backend.title} does not tell what was allocated when it refused the "
                "request: the figures are the highest until then"
            )
            own.append(Note(NoteKind.LIMIT, text))
            if len(self.devices) > 1 and not WATCH.names_device:
                text = f"{VIEW.backend.title} does not tell which device refused: it may be another"
                own.append(Note(NoteKind.LIMIT, text))
        ended = whole and out_of_memory is None
        if ended:
            own += notes_of(NoteKind.FRESH_OPTIMIZER, self._optimizers.notes())
            if self.device.values.has_guessed():
                own += notes_of(NoteKind.VALUES, self._optimizers.notes_on_gradients())
        if ended and WATCH.count:
            text = f"the step caught {WATCH.count} out-of-memory error(s) itself"
            own.append(Note(NoteKind.RUN, text))
        own_peaks = (tally or self._whole).peaks
        if any(peak.pinned for peak in own_peaks) and self.device.alternatives().pinned_early:
            own.append(PINNED_EARLY)
        pinned_count: PinnedCount = "by time" if LOOPS.begun > self._loops_before else "counted"
        return Measurement(
            device=self.info,
            provenance=provenance(self.info),
            peaks=own_peaks,
            held=reported(self.isolation.initial_foreign),
            retained=reported(retained),
            alloc_retries=self._retries(reading),
            segments=reading.segments,
            out_of_memory=out_of_memory,
            notes=tuple(own),
            began=reported(tally.start) if tally else (),
            garbage=self._garbage.most if whole else 0,
            device_use=use,
            steps=self.steps.by_device() if ended and self._steady else (),
            host=self.host.peak() if whole else None,
            pinned_count=pinned_count if VIEW.pinned_stats().owned else "uncounted",
        )
