"""One case to be judged: a measurement, what is declared of it, and the baseline that was found.

Everything here is pure. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.judge.breakdown_diff import lead, provenance_text
from pytest_gpumem.judge.verdict import DECLINED, MISSING, PEAKS, Comparison
from pytest_gpumem.measurement import Peak
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.judge.verdict import FigureName, Lookup, Policy
    from pytest_gpumem.measurement import BaselineEntry, Measurement, OutOfMemory
    from pytest_gpumem.sizes import Tolerance
    from pytest_gpumem.spec import MemorySpec


class Limit(NamedTuple):
    """One declared limit on one peak."""

    name: str
    value: object
    peak: FigureName
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name}={self.value!r} ({format_size(self.nbytes)})"


@dataclass(frozen=True)
class Case:
    """All that one judgement looks at."""

    measurement: Measurement
    spec: MemorySpec
    lookup: Lookup
    policy: Policy
    nodeid: str
    card_bytes: int | None

    @cached_property
    def entry(self) -> BaselineEntry | None:
        """The baseline, where it may be compared with the measurement."""
        usable = self.spec.baseline and self.lookup.error is None and not self.mismatch
        return self.lookup.entry if usable else None

    @cached_property
    def mismatch(self) -> str:
        """Why the baseline that was found is of another step than this one; "" where it is not."""
        entry, spec = self.lookup.entry, self.spec
        if entry is None:
            return ""
        before, now = len(entry.peaks), len(self.measurement.peaks)
        if before != now:
            return f"the baseline is of devices={before}, this is devices={now}"
        if (entry.world_size, entry.rank) != (spec.world_size, spec.rank):
            ranks = [f"world_size={it.world_size}, rank={it.rank}" for it in (entry, spec)]
            return f"the baseline is of {ranks[0]}; this is {ranks[1]}"
        slopes = [it.slope.sizes if it.slope else None for it in (entry, self.measurement)]
        if slopes[0] != slopes[1]:
            lists = [f"batch_sizes={list(it)}" if it else "one batch size" for it in slopes]
            return f"the baseline is of {lists[0]}, this is of {lists[1]}"
        sizes = (entry.batch_size, spec.batch_size)
        same = None in sizes or sizes[0] == sizes[1]
        return "" if same else f"the baseline is of batch_size={sizes[0]}, this is {sizes[1]}"

    @property
    def uncompared(self) -> str:
        """Why there is nothing to compare the measurement with; "" where there is."""
        if self.entry is not None:
            refused = self.toolchain and self.policy.provenance == "fail"
            return f"made with another toolchain ({self.toolchain})" if refused else ""
        if not self.spec.baseline:
            return DECLINED
        if self.lookup.error is not None:
            return "unreadable"
        if self.mismatch:
            return f"of another step ({self.mismatch})"
        if self.lookup.others:
            return f"only of {' and '.join(self.lookup.others)}"
        return MISSING

    @cached_property
    def toolchain(self) -> str:
        """What the baseline was made with that this measurement was not; "" where nothing was.

        Another device's differs anyhow, and has its own tolerance.
        """
        if self.entry is None or self.policy.against:
            return ""
        return provenance_text(self.entry.provenance, self.measurement.provenance)

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """Every declared limit; those of ``max_gib`` and ``card`` the allocator enforces."""
        spec = self.spec
        found: tuple[tuple[str, FigureName, int | None], ...] = (
            ("max_gib", "reserved", spec.max_bytes),
            ("card", "reserved", self.card_bytes),
            ("max_allocated_gib", "allocated", spec.max_allocated_bytes),
            ("max_reserved_gib", "reserved", spec.max_reserved_bytes),
            ("max_mib_per_sample", "per sample", spec.max_sample_bytes),
            ("max_fixed_gib", "fixed", spec.max_fixed_bytes),
        )
        return tuple(Limit(n, getattr(spec, n), peak, b) for n, peak, b in found if b is not None)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Both peaks of every device, and how they grow where that is known."""
        peaks = enumerate(self.measurement.peaks)
        rows = [row for device, peak in peaks for row in self.compare(device, peak)]
        return (*rows, *self._slope())

    def compare(self, device: int, measured: Peak) -> tuple[Comparison, ...]:
        """Both peaks of one device beside their baseline and budget."""
        baseline = None if self.entry is None else self.entry.peaks[device]
        rows = []
        for peak in PEAKS:
            tolerance = self.policy.tolerance_of(peak, self.spec.tolerance)
            before = None if baseline is None else getattr(baseline, peak)
            now = getattr(measured, peak)
            rows.append(self._row(device, peak, now, before, tolerance))
        return tuple(rows)

    def _slope(self) -> Iterator[Comparison]:
        """Yield what a sample takes, and what is there without any.

        What they may be off is what the peak at the largest batch size may be.
        """
        now = self.measurement.slope
        if now is None:
            return
        before = self.entry.slope if self.entry else None
        whole = self.policy.tolerance_of("allocated", self.spec.tolerance)
        sample = replace(whole, absolute=whole.absolute // now.sizes[-1])
        sizes = (before.per_sample, before.fixed) if before else (None, None)
        yield self._row(0, "per sample", now.per_sample, sizes[0], sample)
        yield self._row(0, "fixed", now.fixed, sizes[1], whole)

    def _row(
        self, device: int, name: FigureName, now: int, before: int | None, tolerance: Tolerance
    ) -> Comparison:
        allowance = None if before is None else tolerance.allowance(abs(before))
        budget = min((lim.nbytes for lim in self.limits if lim.peak == name), default=None)
        return Comparison(device, name, now, before, allowance, budget)

    def cause(self, row: Comparison) -> str:
        """What grew most, and at which line, where a breakdown of both is known."""
        before = self.entry.breakdowns if self.entry else ()
        now = self.measurement.attributions
        if row.excess <= 0 or row.peak != "allocated" or min(len(before), len(now)) <= row.device:
            return ""
        return lead(now[row.device].breakdown, before[row.device])

    @cached_property
    def highest(self) -> str:
        """What the fullest device held."""
        return held_text(Peak(self.measurement.peak_allocated, self.measurement.peak_reserved))

    @property
    def fullest(self) -> int | None:
        """Which device reserved most; None where there is one, or they are alike."""
        peaks = self.measurement.peaks
        if len(set(peaks)) < 2:  # noqa: PLR2004 - they differ
            return None
        return max(range(len(peaks)), key=lambda it: (peaks[it].reserved, peaks[it].allocated))

    def on_device(self, device: int) -> str:
        """Which device, where there are several."""
        return f" on device {device}" if len(self.measurement.peaks) > 1 else ""


def held_text(at: Peak | OutOfMemory) -> str:
    """Return both figures in words."""
    return f"{format_size(at.allocated)} allocated, {format_size(at.reserved)} reserved"
