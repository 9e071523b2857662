"""One marked test while it runs: its device, its meter, its parts; nothing of pytest."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.cards import CARDS, find_card
from pytest_gpumem.devices.lone_rank import joined
from pytest_gpumem.measurement import OutOfMemory, Peak
from pytest_gpumem.meter.meter import Meter
from pytest_gpumem.meter.out_of_memory import WATCH, find_out_of_memory, site_of
from pytest_gpumem.meter.peaks import minus, plus
from pytest_gpumem.spec import MemorySpec, spec_from_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.attribution.recording import Span
    from pytest_gpumem.devices.base import Device
    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.measurement import DeviceInfo, Measurement
    from pytest_gpumem.meter.peaks import Tally
    from pytest_gpumem.testrun.marked_item import MarkedItem

BOUNDLESS: Final = 1 << 39
"""bytes more than its card has that a virtual GPU gets to say how much a step needs"""


def _no_progress(_line: str) -> None:
    """Show nothing."""


def canonical_card(name: str) -> str:
    """Return a card's name as the table has it.

    Raises:
        SpecError: nobody knows it.
    """
    return find_card(name).name


@dataclass
class Retained:
    """The memory of an instance of a fixture of wider scope than a test; one Peak a device."""

    name: str
    held: tuple[Peak, ...] = ()
    """bytes that it holds since its set-up"""
    peaks: tuple[Peak, ...] = ()
    """the peaks of its set-up, above the memory held when that began"""

    @property
    def holds_memory(self) -> bool:
        """Whether it holds any."""
        return any(peak.allocated for peak in self.held)


class Inputs(NamedTuple):
    """The values that the fixture ``gpu_memory`` gives a test, and that a trial changes."""

    batch_size: int | None
    variant: Mapping[str, object] = MappingProxyType({})


@dataclass
class Part:
    """A named part of a test."""

    spec: MemorySpec
    tally: Tally


@dataclass
class Run:
    """One marked test's run on its device."""

    spec: MemorySpec
    device: Device
    info: DeviceInfo
    meter: Meter
    root: Path
    inputs: Inputs
    progress: Callable[[str], None] = _no_progress
    """shows a line to the user who waits for the test"""
    parts: dict[str, Part] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    owned: list[Retained] = field(default_factory=list)
    """fixtures of wider scope that this test uses"""
    excused_blocks: set[tuple[int, int]] = field(default_factory=set)
    """device and address of blocks that are no leak, where leaks are asked for"""
    _inputs_read: set[str] = field(default_factory=set)
    _stack: ExitStack = field(default_factory=ExitStack)
    _uncapped: bool = False
    """whether limits are lifted"""
    _failed_part: tuple[BaseException, str] | None = None
    """the error that a part ended with, and the part's name"""

    @classmethod
    @contextmanager
    def open(
        cls,
        spec: MemorySpec,
        device: Device,
        root: Path,
        *,
        record: bool = False,
        progress: Callable[[str], None] = _no_progress,
    ) -> Iterator[Run]:
        """Take the device; it is let go of by ``close``, or if the block ends with an error.

        Args:
            spec: the test's declaration.
            device: where it runs.
            root: the project's folder, for the names of files.
            record: whether the run is recorded, so that its peaks can be explained.
            progress: shows a line to the user who waits.

        Raises:
            DeviceError: the device cannot be what the test asks for.
        """
        card = CARDS[spec.card] if spec.card else None
        with ExitStack() as stack:
            stack.callback(device.close)
            info = device.open(card, spec.devices)
            stack.enter_context(device.exclusive())
            if spec.world_size is not None:
                stack.enter_context(joined(spec.rank or 0, spec.world_size, device.kind))
            meter = Meter(device, info, spec.devices, record=record, steady=spec.steady)
            stack.callback(meter.stop)
            run = cls(spec, device, info, meter, root, Inputs(spec.batch_size), progress)
            yield run
            run._stack = stack.pop_all()

    def start(self, owned: Iterable[Retained]) -> None:
        """Settle, cap the device, begin to count.

        Args:
            owned: the live fixtures of wider scope that the test uses, in the order in which they
                were set up.
        """
        self.owned = list(owned)
        self.meter.start(self.owned_peaks())
        self.meter.cap(self.limit)
        if self.spec.max_leak_mib is not None:
            self.excused_blocks = set(self.meter.blocks())
        before = [Peak(0, 0)] * self.spec.devices
        for fixture in self.owned:
            tops = zip(before, self._padded(fixture.peaks), strict=True)
            self.meter.consider([plus(base, top) for base, top in tops])
            held = zip(before, self._padded(fixture.held), strict=True)
            before = [plus(base, more) for base, more in held]

    def adopt(self, used: Iterable[Retained]) -> None:
        """Count the live fixtures that the test used besides those that it was known to use.

        They were there all the time, as what others hold.
        """
        late = [fixture for fixture in used if fixture not in self.owned]
        if not late:
            return
        before = self.owned_peaks()
        self.owned.extend(late)
        more = [minus(*pair) for pair in zip(self.owned_peaks(), before, strict=True)]
        self.meter.adopt(more)
        for part in self.parts.values():
            part.tally.add(more)

    def _padded(self, peaks: Sequence[Peak]) -> list[Peak]:
        """Return one Peak for each of this test's devices, whatever test made the fixture."""
        return [*peaks, *[Peak(0, 0)] * self.spec.devices][: self.spec.devices]

    def close(self) -> None:
        """Let go of the device."""
        self._stack.close()

    def read_batch_size(self) -> int | None:
        """Return the test's batch size, and note that it has asked: another one may matter."""
        self._inputs_read.add("batch_size")
        return self.inputs.batch_size

    def read_variant(self) -> Mapping[str, object]:
        """Return the options of the variant that is tried, and note that the test has asked."""
        self._inputs_read.add("variant")
        return self.inputs.variant

    def has_read(self, name: str) -> bool:
        """Whether the test has asked for its "batch_size" or its "variant"."""
        return name in self._inputs_read

    def warm_up(self, item: MarkedItem) -> None:
        """Run the test's function as often as it declares, without counting its memory."""
        for _ in range(self.spec.warmup):
            item.runtest()
            self.begin_again(record=False)

    @property
    def card(self) -> Card | None:
        """The card that the test declares."""
        return CARDS[self.spec.card] if self.spec.card else None

    @property
    def limit(self) -> int | None:
        """Bytes that the step may reserve: the tightest of ``max_gib`` and the card's memory."""
        if self._uncapped:
            return None
        limits = [self.spec.max_bytes, self.card.usable_memory if self.card else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def owned_peaks(self) -> list[Peak]:
        """Return what the test's fixtures of wider scope hold, one Peak a device."""
        total = [Peak(0, 0)] * self.spec.devices
        for fixture in self.owned:
            held = self._padded(fixture.held)
            total = [plus(one, other) for one, other in zip(total, held, strict=True)]
        return total

    def held_besides(self, alive: Sequence[Retained]) -> list[int]:
        """Return the bytes held on each device besides what some fixtures hold."""
        held = [peak.allocated for peak in self.meter.counted()]
        for fixture in alive:
            peaks = self._padded(fixture.held)
            held = [all_ - peak.allocated for all_, peak in zip(held, peaks, strict=True)]
        return held

    @contextmanager
    def fixture(self, name: str) -> Iterator[Retained]:
        """Note what the set-up of a fixture of wider scope retains, and its peak.

        Its memory counts for every test that uses it, whichever ran first. So that the first one
        has the same figures as the others, the device is settled before and after.
        """
        self.meter.resettle()
        before = self.meter.counted()
        leaks = self.spec.max_leak_mib is not None
        blocks = set(self.meter.blocks()) if leaks else set()
        retained = Retained(name)
        with self.meter.part() as tally:
            yield retained
        self.meter.resettle()
        self.excused_blocks |= set(self.meter.blocks()) - blocks if leaks else set()
        after = self.meter.counted()
        retained.held = tuple(minus(*pair) for pair in zip(after, before, strict=True))
        retained.peaks = tuple(minus(*pair) for pair in zip(tally.peaks, before, strict=True))
        self.owned.append(retained)

    @contextmanager
    def part(self, name: str, declared: dict[str, object]) -> Iterator[PartFigures]:
        """Measure a named part; the same name again counts to the same part.

        Raises:
            SpecError: the name or the declaration is no good.
        """
        spec = spec_from_call(name, declared, self.spec)
        limits = () if self._uncapped else (self.limit, spec.max_bytes)
        before = self.meter.cap(min((it for it in limits if it is not None), default=None))
        figures = PartFigures()
        try:
            with self.meter.part() as tally:
                yield figures
        except BaseException as error:
            if (
                self._failed_part is None or self._failed_part[0] is not error
            ):  # else an inner part has it
                self._failed_part = error, name
            raise
        finally:
            self.meter.cap(before)
            known = self.parts.setdefault(name, Part(spec, tally))
            known.spec = spec
            if known.tally is not tally:
                known.tally.raise_to(tally.peaks)
                known.tally.windows += tally.windows
            figures.peaks = tuple(tally.peaks)

    def measurement(self, out_of_memory: OutOfMemory | None = None) -> Measurement:
        """Return the whole test's measurement so far."""
        return self.meter.result(
            out_of_memory=out_of_memory, notes=[*self.notes, *self.device.notes(self.root)]
        )

    def part_measurements(self) -> dict[str, tuple[MemorySpec, Measurement]]:
        """Return each part's spec and measurement, in the order in which they first ran."""
        return {
            name: (part.spec, self.meter.result(tally=part.tally))
            for name, part in self.parts.items()
        }

    def out_of_memory(self, error: BaseException) -> OutOfMemory:
        """Return the record of an out-of-memory error that just happened."""
        refusal = WATCH.last(error)
        first = self.meter.devices[0]
        device = min(max(refusal.device - first, 0), self.spec.devices - 1)
        if refusal.held is None:
            held = self.meter.counted()[device]
        else:
            held = minus(refusal.held, self.meter.foreign[device])
        return OutOfMemory(
            requested=refusal.requested,
            allocated=held.allocated,
            reserved=held.reserved,
            site=site_of(error.__traceback__, self.root),
            device_index=device,
        )

    def short_measurement(
        self, error: BaseException, record: OutOfMemory
    ) -> tuple[str, MemorySpec, Measurement]:
        """Return what ran out of memory: a part if it was at a limit of its own, else the test.

        Args:
            error: PyTorch's error.
            record: what it says.

        Returns:
            the part's name ("" is the test), its spec and its measurement.
        """
        if self._failed_part is not None and find_out_of_memory(self._failed_part[0]) is error:
            name = self._failed_part[1]
            part = self.parts[name]
            tightest = part.spec.max_bytes
            if tightest is not None and (self.limit is None or tightest <= self.limit):
                result = self.meter.result(tally=part.tally, out_of_memory=record, notes=self.notes)
                return name, part.spec, result
        return "", self.spec, self.measurement(record)

    def peaks_of(self, part: str) -> tuple[Peak, ...]:
        """Return the peaks so far, of the test or of a part; none of a part that did not run."""
        if not part:
            return self.meter.peaks()
        return tuple(self.parts[part].tally.peaks) if part in self.parts else ()

    def windows(self, part: str) -> list[Span]:
        """Return when the test was measured, or a part of it."""
        return self.meter.windows(self.parts[part].tally if part else None)

    def begin_again(self, *, record: bool) -> None:
        """Begin to count anew, and to record."""
        self.parts.clear()
        self.meter.restart(record=record)

    def lift_limits(self) -> None:
        """Lift every limit, to see how much a step needs."""
        self._uncapped = True
        others = self.meter.foreign
        self.device.make_room([other.reserved + BOUNDLESS for other in others])
        self.meter.cap(None)

    def restore_limits(self) -> None:
        """Have every limit hold again, where they were lifted."""
        if self._uncapped:
            self._uncapped = False
            self.device.make_room([other.reserved for other in self.meter.foreign])
            self.meter.cap(self.limit)


@dataclass
class PartFigures:
    """What ``with gpu_memory.measure(...) as figures`` gives: complete once the block has ended."""

    peaks: tuple[Peak, ...] = ()
    """one a device, in bytes"""

    @property
    def peak_allocated(self) -> int:
        """Peak bytes in live tensors, of the fullest device."""
        return max((peak.allocated for peak in self.peaks), default=0)

    @property
    def peak_reserved(self) -> int:
        """Peak bytes held by the caching allocator, of the fullest device."""
        return max((peak.reserved for peak in self.peaks), default=0)
