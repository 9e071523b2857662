"""The range of a test's peaks where a library's choice of a workspace is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.measurement import Peak, PeakRange
from pytest_gpumem.meter.out_of_memory import find_out_of_memory
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_gpumem.devices.base import RangeEnd
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run


def with_ranges(
    runner: Runner,
    item: MarkedItem,
    run: Run,
    measured: Mapping[str, tuple[MemorySpec, Measurement]],
) -> dict[str, tuple[MemorySpec, Measurement]]:
    """Return the measurements of a test that has passed, and of its parts, with their ranges.

    The test is run again with the least and the largest workspaces that are possible, unless the
    run took them. A test that may leak or searches for a size is not run again.
    """
    uncertain = run.device.uncertain_sizes()
    spec, results = run.spec, dict(measured)
    if spec.steady or spec.max_leak_mib is not None or spec.batch_sizes or run.searches:
        return results
    ends: dict[RangeEnd, dict[str, tuple[Peak, ...]]] = {}
    numbers: dict[RangeEnd, int] = {"least": uncertain.smaller, "most": uncertain.larger}
    for end in (end for end, number in numbers.items() if number):
        asked = sum(run.device.uncertain_sizes()[:2])
        with runner.again(item, record=False, sizes=end) as attempt:
            has_asked = sum(run.device.uncertain_sizes()[:2]) > asked
            # PyTorch may have kept the plans of the first run, and asked for no other.
            if attempt.passed and has_asked and not attempt.left:
                ends[end] = {part: run.peaks_of(part) for part in measured}
            elif attempt.error is not None and find_out_of_memory(attempt.error) is not None:
                whole_spec, whole = results[""]
                note = f"with the largest it does not fit: {uncertain.reason}"
                results[""] = whole_spec, replace(whole, notes=(*whole.notes, note))
    if not ends or len(ends) < sum(map(bool, numbers.values())):
        return results
    for part, (part_spec, measurement) in measured.items():
        peaks = [measurement.peaks, *(parts[part] for parts in ends.values())]
        if all(len(devices) == len(measurement.peaks) for devices in peaks):
            low, high = _each(peaks, min), _each(peaks, max)
            if uncertain.margin:
                low = tuple(Peak(peak.allocated, peak.allocated) for peak in low)
                cap = run.limit or run.info.total_memory
                full = run.device.uncertain_sizes().unfit > 0
                high = tuple(widened(peak, uncertain.margin, cap, full=full) for peak in high)
            spanned = PeakRange(low, high, uncertain.reason, uncertain.judged)
            results[part] = part_spec, _with_range(measurement, spanned)
    return results


def _each(
    runs: Iterable[tuple[Peak, ...]], choose: Callable[[Iterable[int]], int]
) -> tuple[Peak, ...]:
    """Return for each device the smallest or the largest figures of several runs."""
    return tuple(
        Peak(choose(peak.allocated for peak in peaks), choose(peak.reserved for peak in peaks))
        for peaks in zip(*runs, strict=True)
    )


def widened(peak: Peak, percent: int, cap: int, *, full: bool) -> Peak:
    """Return a largest peak with the memory that may be reserved beyond it.

    Args:
        peak: the largest of several runs'.
        percent: of the reserved bytes, that may be reserved besides.
        cap: bytes at which PyTorch's allocator empties its cache, and PyTorch takes a workspace
            that fits.
        full: whether the largest had no room: then a size between may have filled the memory.
    """
    if full:
        return Peak(max(peak.allocated, cap), max(peak.reserved, cap))
    reserved = min(cap, peak.reserved * (100 + percent) // 100)
    return Peak(peak.allocated, max(peak.reserved, reserved))


def _with_range(measurement: Measurement, spanned: PeakRange) -> Measurement:
    """Return a measurement with its range, and a note of it unless its ends are the same."""
    figures = []
    for name in ("allocated", "reserved"):
        low, high = (
            max(getattr(peak, name) for peak in peaks) for peaks in (spanned.least, spanned.most)
        )
        if low < high:
            figures.append(f"{name} {format_size(low)} to {format_size(high)}")
    notes = [*measurement.notes]
    if figures:
        judged = "; limits are held to the largest" if spanned.judged else ""
        if measurement.peaks == spanned.most:
            judged = "; the figures are the largest"
        notes.append(f"{', '.join(figures)}: {spanned.reason}{judged}")
    return replace(measurement, range=spanned, notes=tuple(notes))
