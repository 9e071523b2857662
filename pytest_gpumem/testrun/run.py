"""One marked test while it runs: its device, its meter, its parts; independent of pytest."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.benchmark_mode import TIMED, TIMED_PLANS
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.children import CHILDREN
from pytest_gpumem.devices.servers import WATCH as SERVER
from pytest_gpumem.errors import SpecError, is_own_error
from pytest_gpumem.measurement import Measurement, OutOfMemory, Peak
from pytest_gpumem.meter.host_memory import require_pinned_stats
from pytest_gpumem.meter.meter import Meter
from pytest_gpumem.meter.out_of_memory import WATCH, find_out_of_memory, site_of
from pytest_gpumem.meter.peaks import reported
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.recording import Recorded
from pytest_gpumem.relations import Relation, read_order, read_relations
from pytest_gpumem.sizes import shown
from pytest_gpumem.spec import MemorySpec, spec_from_call
from pytest_gpumem.testrun.wide_fixture import WideFixtures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_gpumem.devices.base import Device, Values
    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.fit.search import Largest
    from pytest_gpumem.measurement import Breakdown, DeviceInfo
    from pytest_gpumem.meter.peaks import Held, Tally
    from pytest_gpumem.notes import Note
    from pytest_gpumem.recording.recording import Recording, Span
    from pytest_gpumem.testrun.marked_item import MarkedItem

    BreakdownOf = Callable[[Recorded], Breakdown | None]

__tracebackhide__ = is_own_error

BOUNDLESS: Final = 1 << 39
"""bytes added to a virtual GPU's memory to find how much a step needs"""


def _no_progress(_line: str) -> None:
    """Drop a line of progress."""


class Inputs(NamedTuple):
    """Inputs that a test reads from the fixture ``gpu_memory``, and that a trial replaces."""

    batch_size: int | None
    variant: Mapping[str, object] = MappingProxyType({})


@dataclass
class Part:
    """A named part of a test."""

    spec: MemorySpec
    tally: Tally
    relations: tuple[Relation, ...] = ()
    """its limits that depend on other parts"""

    def figure(self, name: str) -> int:
        """Return the figure that a relation names, in bytes on the fullest device."""
        if name == "active":
            return most(self.tally.highest.all, "active")
        held = self.tally.ends[1] if name == "held" else self.tally.highest.all
        return most(held, "reserved" if name == "reserved" else "allocated")


@dataclass
class Run:
    """One marked test's run on its device."""

    spec: MemorySpec
    device: Device
    info: DeviceInfo
    meter: Meter
    root: Path
    inputs: Inputs
    fixtures: WideFixtures
    progress: Callable[[str], None] = _no_progress
    """shows a line to the waiting user"""
    breakdown: BreakdownOf | None = None
    """explains the first device's peak in a recorded run; None if explanations are disabled"""
    parts: dict[str, Part] = field(default_factory=dict)
    excused_blocks: set[tuple[int, int]] = field(default_factory=set)
    """with ``max_leak_mib``: (device, address) of blocks older than the run, which are no leak"""
    searches: dict[str, Largest] = field(default_factory=dict)
    """results of searches with a baseline, by the baseline's name"""
    _inputs_read: set[str] = field(default_factory=set)
    _checked: set[str] = field(default_factory=set)
    """the parts whose limits are known to have figures; "" is the test"""
    _stack: ExitStack = field(default_factory=ExitStack)
    _uncapped: bool = False
    _failed_part: tuple[BaseException, str] | None = None
    """the error that ended a part, and the part's name; None if no part has failed"""

    @classmethod
    @contextmanager
    def open(  # noqa: PLR0913 - a test's surroundings, by name
        cls,
        spec: MemorySpec,
        device: Device,
        root: Path,
        *,
        record: bool = False,
        values: Values = "off",
        progress: Callable[[str], None] = _no_progress,
        of_children: str = "",
        breakdown: BreakdownOf | None = None,
    ) -> Iterator[Run]:
        """Open the device and yield the run; ``close`` or an error in the block closes the device.

        The test's child processes compute ``values``; the class ``of_children`` explains their
        peaks (``devices/children.py``).

        Raises:
            DeviceError: the device does not match what the test declares.
        """
        card = CARDS[spec.card] if spec.card else None
        with ExitStack() as stack:
            stack.callback(device.close)
            info = device.open(card, spec.devices)
            stack.enter_context(CHILDREN.watching(values, of_children))
            stack.callback(setattr, SERVER, "part", SERVER.part)
            if spec.world_size is not None:
                stack.enter_context(device.join_alone(spec.rank or 0, spec.world_size))
            meter = Meter(device, info, spec.devices, record=record, steady=spec.steady)
            stack.callback(meter.stop)
            fixtures = WideFixtures(meter, (info.key, spec.devices))
            inputs = Inputs(spec.batch_size)
            run = cls(spec, device, info, meter, root, inputs, fixtures, progress, breakdown)
            SERVER.part = partial(run.part, declared={})
            yield run
            run._stack = stack.pop_all()

    def start(self) -> None:
        """Release unused memory, start counting, and cap the memory that the test may reserve."""
        self.meter.start()
        self._require_figures("", self.spec)
        self.meter.room.cap(self.limit)
        if self.spec.max_leak_mib is not None:
            self.excused_blocks = set(self.meter.isolation.blocks())

    def await_kernels(self) -> None:
        """Synchronize the test's devices, if they are real.

        Raises:
            RuntimeError: PyTorch's report of a kernel's error. It is the test's error, although the
            test's last line may have ended before the kernel did.
        """
        __tracebackhide__ = True
        backend = VIEW.backend
        if not self.info.is_predicted and "torch" in sys.modules and backend.is_initialized():
            for number in self.meter.devices:
                backend.synchronize(number)

    def close(self) -> None:
        """Close the device."""
        self._stack.close()

    def read_batch_size(self) -> int | None:
        """Return the test's batch size, and record that the test depends on it."""
        self._inputs_read.add("batch_size")
        return self.inputs.batch_size

    def read_variant(self) -> Mapping[str, object]:
        """Return the current variant's options, and record that the test depends on them."""
        self._inputs_read.add("variant")
        return self.inputs.variant

    def has_read(self, name: str) -> bool:
        """Return whether the test has read its "batch_size" or its "variant"."""
        return name in self._inputs_read

    def warm_up(self, item: MarkedItem) -> None:
        """Run the test's function ``warmup`` times without counting its memory."""
        for _ in range(self.spec.warmup):
            item.runtest()
            self.begin_again(record=False)

    @property
    def is_unused(self) -> bool:
        """Whether the test ran no probes and used no memory, not even outside of PyTorch."""
        return self.meter.is_unused

    @property
    def card(self) -> Card | None:
        """The card that the test declares; None if it declares none."""
        return CARDS[self.spec.card] if self.spec.card else None

    @property
    def limit(self) -> int | None:
        """Bytes that the step may reserve: the smaller of ``max_gib`` and the card's memory.

        None if the test declares neither, or while its limits are lifted.
        """
        if self._uncapped:
            return None
        card_bytes = self.card.usable_memory if self.card else None
        return _tightest(self.spec.bytes_of("max_gib"), card_bytes)

    def part(self, name: str, declared: dict[str, object]) -> AbstractContextManager[PartFigures]:
        """Measure a named part; its peaks are the highest of all blocks with this name."""
        call = f"gpu_memory.measure({shown(name)}, "
        relations, limits_declared = read_relations(declared, self.parts, call)
        spec = spec_from_call(name, limits_declared, self.spec)
        earlier = self.parts.get(name)
        if earlier is not None and (earlier.spec, earlier.relations) != (spec, relations):
            raise SpecError(
                f"gpu_memory.measure({shown(name)})",
                "an earlier block with this name declares other limits",
                "declare the same in each of them, or give this block another name",
            )
        self._require_figures(name, spec)
        return self._part(name, spec, relations)

    def _require_figures(self, part: str, spec: MemorySpec) -> None:
        """Refuse limits on figures that this PyTorch, device or system does not report.

        Only the first run is checked: another one may have other settings of the allocator.

        Raises:
            DeviceError: there is such a limit, which would always hold.
        """
        if part in self._checked:
            return
        self._checked.add(part)
        if spec.max_pinned_gib is not None:
            require_pinned_stats(f"max_pinned_gib={spec.max_pinned_gib!r}")
        if spec.max_host_gib is not None:
            self.meter.host.require(f"max_host_gib={spec.max_host_gib!r}")

    @contextmanager
    def _part(
        self, name: str, spec: MemorySpec, relations: tuple[Relation, ...]
    ) -> Iterator[PartFigures]:
        cap = None if self._uncapped else _tightest(self.limit, spec.bytes_of("max_gib"))
        figures = PartFigures(name)
        try:
            with self.meter.room.capped(cap), self.meter.part() as tally:
                yield figures
        except BaseException as error:
            # An error propagates through the innermost part first: that part's limit was exceeded.
            if self._failed_part is None or self._failed_part[0] is not error:
                self._failed_part = error, name
            raise
        finally:
            part = self.parts.setdefault(name, Part(spec, tally, relations))
            if part.tally is not tally:
                part.tally.raise_to(tally.highest)
                part.tally.ends = tally.ends
                part.tally.windows += tally.windows
                part.tally.notes = tally.notes
            figures.peaks = tally.peaks
            figures.peak_active = most(tally.highest.all, "active")
            figures.held_before, figures.held = (most(end, "allocated") for end in tally.ends)

    def measurement(
        self, notes: Iterable[Note] = (), out_of_memory: OutOfMemory | None = None
    ) -> Measurement:
        """Return the whole test's measurement so far, with ``notes`` before the device's notes."""
        notes = [*notes, *self.device.notes(self.root)]
        if not self.info.is_predicted and TIMED_PLANS.was_on and not self.spec.warmup:
            notes.append(TIMED)
        return self.meter.result(out_of_memory=out_of_memory, notes=notes)

    def part_measurements(self) -> dict[str, tuple[MemorySpec, Measurement]]:
        """Return each part's spec and measurement, in the order in which the parts first ended."""
        return {
            name: (part.spec, self.meter.result(tally=part.tally))
            for name, part in self.parts.items()
        }

    def order(self, chain: object, figure: object) -> None:
        """Require an order of the parts by a figure; ``chain`` states the order: "a < b"."""
        for name, relation in read_order(chain, figure, self.parts):
            self.parts[name].relations += (relation,)

    def out_of_memory(self, error: BaseException) -> OutOfMemory:
        """Describe an out-of-memory error that has just occurred."""
        refusal = WATCH.last(error)
        first = self.meter.devices[0]
        device = min(max(refusal.device - first, 0), self.spec.devices - 1)
        # Without an observer use the peaks so far: Python has freed the failed line's temporaries.
        known = self.meter.counted() if WATCH.observes else self.meter.peaks()
        held = refusal.held or known[device]
        site = site_of(error.__traceback__, self.root)
        return OutOfMemory(
            requested=refusal.requested,
            allocated=held.allocated,
            reserved=held.reserved,
            site=str(site),
            device_index=device,
            path=site.path,
            line=site.line,
        )

    def short_measurement(
        self, error: BaseException, record: OutOfMemory, notes: Sequence[Note]
    ) -> tuple[str, MemorySpec, Measurement]:
        """Return the part that ran out of memory if its own limit was the cause, else the test.

        Returns:
            the part's name ("" is the test), its spec and its measurement.
        """
        if self._failed_part is not None and find_out_of_memory(self._failed_part[0]) is error:
            name = self._failed_part[1]
            part = self.parts[name]
            tightest = part.spec.bytes_of("max_gib")
            if tightest is not None and (self.limit is None or tightest <= self.limit):
                result = self.meter.result(tally=part.tally, out_of_memory=record, notes=notes)
                return name, part.spec, result
        return "", self.spec, self.measurement(notes, record)

    def peaks_of(self, part: str) -> tuple[Peak, ...]:
        """Return the peaks so far of the test ("") or of a part; empty if the part did not run."""
        if not part:
            return self.meter.peaks()
        return self.parts[part].tally.peaks if part in self.parts else ()

    def limit_of(self, part: str) -> int | None:
        """Return a part's own limit of reserved bytes; None if the part has none or did not run."""
        return self.parts[part].spec.bytes_of("max_gib") if part in self.parts else None

    @property
    def held_before(self) -> list[Held]:
        """Memory per device of the used live fixtures of wider scope that earlier tests set up."""
        return self.fixtures.held(before_run=True)

    def windows(self, part: str) -> list[Span]:
        """Return the time spans in which the test (""), or a part of it, was measured."""
        return self.meter.windows(self.parts[part].tally if part else None)

    def recorded(self, parts: Iterable[str]) -> Recorded:
        """End the recording, if one is running; return the data that explains the parts' peaks.

        The part "" is the whole test.
        """
        windows = {part: self.windows(part) for part in parts if not part or part in self.parts}
        peaks = {part: self.peaks_of(part) for part in windows}
        foreign = reported(self.meter.isolation.kept_foreign)
        return Recorded(self.meter.recording.stop(), self.meter.devices, foreign, windows, peaks)

    def begin_again(
        self, *, record: bool, at_moment: Callable[[Recording], None] | None = None
    ) -> None:
        """Drop the parts, and count anew from the memory held now.

        ``record`` starts a new recording, which calls ``at_moment`` at each moment: at the
        start and the end of a module's call, a backward pass or an optimizer's step.
        """
        self.parts.clear()
        self.device.values.renew()
        CHILDREN.forget_ended()
        reused = [fixture.known for fixture in self.fixtures.used]
        self.meter.restart(record=record, at_moment=at_moment, reused=reused)

    def lift_limits(self) -> None:
        """Lift every limit, to find how much memory a step needs."""
        self._uncapped = True
        self.meter.room.enlarge(BOUNDLESS)
        self.meter.room.cap(None)

    def restore_limits(self) -> None:
        """Restore the limits if they were lifted."""
        if self._uncapped:
            self._uncapped = False
            self.meter.room.enlarge(0)
            self.meter.room.cap(self.limit)


def _tightest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass
class PartFigures:
    """The figures of a part: ``with gpu_memory.measure(...) as figures``, once the block ends."""

    part: str = ""
    """the name passed to ``gpu_memory.measure``"""
    peaks: tuple[Peak, ...] = ()
    """peaks in bytes, one Peak per device"""

    peak_active: int = 0
    """peak bytes of active blocks, including freed ones that wait for a stream"""
    held_before: int = 0
    """bytes in live tensors at the block's start, on the device with most"""
    held: int = 0
    """bytes in live tensors at the block's end, on the device with most"""

    @property
    def peak_allocated(self) -> int:
        """Peak bytes in live tensors, of the fullest device."""
        return most(self.peaks, "allocated")

    @property
    def peak_reserved(self) -> int:
        """Peak bytes held by the caching allocator, of the fullest device."""
        return most(self.peaks, "reserved")


def most(peaks: Sequence[Peak | Held], figure: str) -> int:
    """Return a figure of the fullest device; 0 without devices."""
    return max((getattr(peak, figure) for peak in peaks), default=0)
