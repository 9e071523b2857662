"""What is judged: a measurement, its marker, and the baseline that was found.

Everything here is pure. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.breakdowns import provenance_text, toolchain_text
from pytest_gpumem.judge.verdict import DECLINED, MISSING, PEAKS, Comparison, Lead
from pytest_gpumem.measurement import Peak
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.verdict import FigureName, Lookup, PeakName, Policy
    from pytest_gpumem.measurement import BaselineEntry, Measurement, OutOfMemory, Slope
    from pytest_gpumem.relations import Bound, Relation
    from pytest_gpumem.sizes import Tolerance
    from pytest_gpumem.spec import MemorySpec


MIN_STEPS: Final = 4
"""fewest steps that show growth: two in the last half, and two before"""


class Limit(NamedTuple):
    """One declared limit on one figure."""

    name: str
    value: object
    peak: FigureName
    nbytes: int
    relation: Relation | None = None
    """the relation that makes the limit depend on another part; None if there is none"""

    @property
    def strict(self) -> bool:
        """Whether a figure equal to the limit fails; ``nbytes`` is the largest allowed figure."""
        return self.relation is not None and self.relation.name == "less_than"

    def __str__(self) -> str:
        if self.relation is not None:
            return f"{self.relation} ({format_size(self.nbytes)})"
        return f"{self.name}={self.value!r} ({format_size(self.nbytes)})"


class StepShape(NamedTuple):
    """The settings that must be equal for two runs of a test to be comparable."""

    devices: int
    rank: str
    """"0 of 8", or "none" """
    batch_sizes: str
    """the marker's ``batch_sizes``: "8, 16"; "one" if it has none"""
    batch_size: int | None
    """None if not declared; it is then comparable with any batch size"""

    @classmethod
    def of_entry(cls, entry: BaselineEntry) -> StepShape:
        """Return the settings that a baseline was measured with."""
        rank = _rank_text(entry.rank, entry.world_size)
        return cls(len(entry.peaks), rank, _sizes_text(entry.slope), entry.batch_size)

    def mismatch(self, new: StepShape) -> tuple[str, object, object] | None:
        """Return the first setting that differs, with both values; None if all are equal."""
        for name, old_value, new_value in zip(self._fields, self, new, strict=True):
            optional = name == "batch_size" and None in {old_value, new_value}
            if old_value != new_value and not optional:
                return name.replace("_", " "), old_value, new_value
        return None


def _rank_text(rank: int | None, world_size: int | None) -> str:
    return "none" if world_size is None else f"{rank} of {world_size}"


def _sizes_text(slope: Slope | None) -> str:
    return ", ".join(map(str, slope.sizes)) if slope else "one"


@dataclass(frozen=True)
class Judged:
    """The input of one judgment."""

    measurement: Measurement
    spec: MemorySpec
    lookup: Lookup
    policy: Policy
    nodeid: str
    card_bytes: int | None
    relations: Sequence[Bound] = ()
    """limits that depend on other parts"""

    @cached_property
    def entry(self) -> BaselineEntry | None:
        """The baseline, if it may be compared with the measurement; else None."""
        usable = self.spec.baseline and self.lookup.error is None and not self.mismatch
        return self.lookup.entry if usable else None

    @cached_property
    def mismatch(self) -> str:
        """The setting that changed since the baseline: "batch size changed from 32 to 64".

        "" if none changed.
        """
        if self.lookup.entry is None:
            return ""
        rank = _rank_text(self.spec.rank, self.spec.world_size)
        sizes = _sizes_text(self.measurement.slope)
        shape = StepShape(len(self.measurement.peaks), rank, sizes, self.spec.batch_size)
        old_value, new_value = self.lookup.entry.largest, self.measurement.largest
        if (old_value is None) != (new_value is None):
            return f"largest value changed from {old_value or 'none'} to {new_value or 'none'}"
        mismatch = StepShape.of_entry(self.lookup.entry).mismatch(shape)
        if mismatch is None:
            return ""
        name, old, new = mismatch
        return f"{name} changed from {old} to {new}"

    @property
    def uncompared(self) -> str:
        """Why the measurement is not compared with a baseline; "" if it is."""
        if self.entry is not None:
            refused = self.toolchain and self.policy.provenance == "fail"
            return f"made with another toolchain ({self.toolchain})" if refused else ""
        if not self.spec.baseline:
            return DECLINED
        if self.lookup.error is not None:
            return "unreadable"
        if self.mismatch:
            return f"not compared: its {self.mismatch}"
        if self.lookup.other_devices:
            return f"recorded on {' and '.join(self.lookup.other_devices)} only"
        return MISSING

    @cached_property
    def toolchain(self) -> str:
        """The baseline's versions that differ from this measurement's; "" if none do.

        Also "" when comparing with another device's baseline: versions may differ there, and the
        tolerance is wider.
        """
        if self.entry is None or self.policy.against:
            return ""
        return provenance_text(self.entry.provenance, self.measurement.provenance)

    def most(self, row: Comparison) -> int:
        """Return the upper end of a figure's range; the figure itself if no range is judged."""
        spanned = self.measurement.range
        if spanned is None or not spanned.judged or row.peak not in PEAKS:
            return row.measured
        return max(row.measured, int(getattr(spanned.most[row.device], row.peak)))

    def at_least(self, bound: Bound) -> Bound:
        """Return a bound; if it is a lower limit, with the lower end of the figure's range."""
        spanned, figure = self.measurement.range, bound.relation.figure
        if spanned is None or not spanned.judged or not bound.relation.is_lower:
            return bound
        least = [getattr(peak, figure) for peak in spanned.least if figure in PEAKS]
        return bound._replace(measured=min(bound.measured, max(least, default=bound.measured)))

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """The declared limits on figures; the allocator also enforces ``max_gib`` and ``card``."""
        spec = self.spec
        declared: tuple[tuple[str, FigureName, int | None], ...] = (
            ("max_gib", "reserved", spec.bytes_of("max_gib")),
            ("card", "reserved", self.card_bytes),
            ("max_allocated_gib", "allocated", spec.bytes_of("max_allocated_gib")),
            ("max_reserved_gib", "reserved", spec.bytes_of("max_reserved_gib")),
            ("max_mib_per_sample", "per sample", spec.bytes_of("max_mib_per_sample")),
            ("max_fixed_gib", "fixed", spec.bytes_of("max_fixed_gib")),
            ("max_pinned_gib", "pinned", spec.bytes_of("max_pinned_gib")),
            ("max_host_gib", "host", spec.bytes_of("max_host_gib")),
        )
        limits = [
            Limit(name, getattr(spec, name), peak, nbytes)
            for name, peak, nbytes in declared
            if nbytes is not None
        ]
        limits += [
            Limit(bound.relation.name, bound.relation.part, peak, bound.nbytes, bound.relation)
            for bound in self.relations
            for peak in PEAKS
            if bound.relation.is_limit and bound.relation.figure == peak
        ]
        return tuple(limits)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """All figures: peaks of every device, host memory if it has a limit, and the slope."""
        peaks = enumerate(self.measurement.peaks)
        rows = [row for device, peak in peaks for row in self.compare(device, peak)]
        host, max_host = self.measurement.host, self.spec.bytes_of("max_host_gib")
        if host is not None and max_host is not None:
            rows.append(Comparison(0, "host", host, budget=max_host))
        measured = self.measurement.slope
        if measured is not None:
            old = self.entry.slope if self.entry else None
            tolerance = self.policy.tolerance_of("allocated", self.spec.tolerance)
            # The peak at the largest batch size may differ by the absolute tolerance. Divided by
            # that batch size, this is the tolerance per sample.
            per_sample = replace(tolerance, absolute=tolerance.absolute // measured.sizes[-1])
            old_sizes = (old.per_sample, old.fixed) if old else (None, None)
            rows += [
                self._compared(0, "per sample", measured.per_sample, old_sizes[0], per_sample),
                self._compared(0, "fixed", measured.fixed, old_sizes[1], tolerance),
            ]
        return tuple(rows)

    def compare(self, device: int, measured: Peak) -> tuple[Comparison, ...]:
        """Compare both peaks of one device with baseline and budget, and pinned memory if any.

        A baseline's 0 bytes of pinned memory count as unknown: older versions did not measure it.
        """
        baseline = None if self.entry is None else self.entry.peaks[device]
        old_pinned = baseline.pinned if baseline is not None else 0
        if self.measurement.pinned_count != "counted":
            old_pinned = 0
        limited = device == 0 and self.spec.bytes_of("max_pinned_gib") is not None
        rows: list[tuple[PeakName, int | None]] = [
            (peak, None if baseline is None else getattr(baseline, peak)) for peak in PEAKS
        ]
        if measured.pinned or old_pinned or limited:
            rows.append(("pinned", old_pinned or None))
        return tuple(
            self._compared(
                device,
                peak,
                getattr(measured, peak),
                old,
                self.policy.tolerance_of(peak, self.spec.tolerance),
            )
            for peak, old in rows
        )

    @property
    def unrecorded(self) -> Comparison | None:
        """The peak of pinned memory, if the baseline has none to compare it with; else None."""
        if self.entry is None or self.measurement.pinned_count != "counted":
            return None
        rows = (row for row in self.comparisons if row.peak == "pinned" and row.measured)
        return next((row for row in rows if row.baseline is None), None)

    def _compared(
        self,
        device: int,
        name: FigureName,
        measured: int,
        baseline: int | None,
        tolerance: Tolerance,
    ) -> Comparison:
        # A slope's fixed part may be negative: take the tolerance of its absolute value.
        allowance = None if baseline is None else tolerance.allowance(abs(baseline))
        limits = (limit.nbytes for limit in self.limits if limit.peak == name)
        return Comparison(device, name, measured, baseline, allowance, min(limits, default=None))

    @cached_property
    def toolchain_lead(self) -> Lead | None:
        """The versions that differ from the baseline's; None if none of them affects allocation."""
        if self.entry is None or self.policy.against:
            return None
        old, new = self.entry.provenance, self.measurement.provenance
        # Another driver changes nothing that PyTorch allocates: it is listed only together with
        # other versions that differ.
        if replace(old, driver=new.driver) == new:
            return None
        versions = toolchain_text(old, new)
        return Lead("toolchain", versions, place=versions)

    @cached_property
    def highest(self) -> str:
        """The highest peaks of all devices, as text, after what a search or a server found."""
        measurement = self.measurement
        sizes = both_sizes(Peak(measurement.peak_allocated, measurement.peak_reserved))
        if measurement.peak_pinned:
            sizes += f", {format_size(measurement.peak_pinned)} pinned"
        if measurement.cache_tokens is not None:
            return f"{measurement.cache_tokens:,} tokens in the KV cache, with {sizes}"
        return sizes if measurement.largest is None else f"{measurement.largest} fits, with {sizes}"

    @property
    def fullest(self) -> int | None:
        """The device that reserved most; None for a single device, or if all peaks are equal."""
        peaks = self.measurement.peaks
        if len(set(peaks)) < 2:  # noqa: PLR2004 - they differ
            return None
        return max(
            range(len(peaks)), key=lambda index: (peaks[index].reserved, peaks[index].allocated)
        )

    def on_device(self, device: int) -> str:
        """Return " on device 1" for a test with several devices, else ""."""
        return f" on device {device}" if len(self.measurement.peaks) > 1 else ""


def both_sizes(sizes: Peak | OutOfMemory) -> str:
    """Return allocated and reserved bytes as text."""
    return f"{format_size(sizes.allocated)} allocated, {format_size(sizes.reserved)} reserved"


class StepGrowth(NamedTuple):
    """Memory that still grows when the last step ends, in bytes."""

    initial: int
    """bytes after the first half of the steps"""
    final: int
    """bytes after the last step"""
    rises: tuple[int, ...]
    """the change in each step of the last half"""


def last_half(steps: int) -> int:
    """Return the index of the last step before the last half."""
    return steps - steps // 2 - 1


def growth(levels: Sequence[int]) -> StepGrowth | None:
    """Return the growth of memory in the last half of the steps; None if it has stopped.

    Memory still grows if it rose in both quarters of that half, each time by more than the largest
    fall within the half. So a cache may fill in the first half, and may fill once later; and steps
    of different sizes are not growth. A leak in every k-th step is found from 4 k steps on.

    ``levels`` has the bytes after each step.
    """
    if len(levels) < MIN_STEPS:
        return None
    half = levels[last_half(len(levels)) :]
    # A step's lasting memory is the lowest level from that step on.
    lows = [*accumulate(reversed(half), min)][::-1]
    fall = max(level - low for level, low in zip(half, lows, strict=True))
    middle = len(half) // 2
    if min(lows[middle] - lows[0], lows[-1] - lows[middle]) <= fall:
        return None
    return StepGrowth(half[0], half[-1], tuple(late - early for early, late in pairwise(half)))
