"""Compute the rows of a device's peak for the page and Markdown: by category and source line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.breakdowns import BreakdownRow, category_rows, site_rows

if TYPE_CHECKING:
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.notes import Note


@dataclass(frozen=True)
class DeviceRows:
    """The breakdown of one device's peak."""

    index: int
    compared: bool
    """whether it has a baseline's breakdown to compare with"""
    categories: list[BreakdownRow]
    total: BreakdownRow
    """peak allocated"""
    cached: BreakdownRow
    sites: list[BreakdownRow]
    notes: tuple[Note, ...] = ()

    def share(self, row: BreakdownRow) -> float:
        """Return a row's share of the peak, in percent."""
        return 100 * row.nbytes / max(self.total.nbytes, 1)


def device_rows(result: Result) -> list[DeviceRows]:
    """Return the breakdown of each device's peak; [] without attributions."""
    baselines = dict(enumerate(result.breakdowns_before))
    attributions = result.measurement.attributions if result.measurement else ()
    devices = []
    for index, attribution in enumerate(attributions):
        breakdown, baseline = attribution.breakdown, baselines.get(index)
        *categories, cached = category_rows(breakdown, baseline)
        total = BreakdownRow(
            "peak allocated",
            sum(breakdown.categories.values()),
            None if baseline is None else sum(baseline.categories.values()),
        )
        rows = DeviceRows(
            index,
            baseline is not None,
            categories,
            total,
            # Not part of peak allocated: the allocator reserved it in addition.
            replace(cached, name="cached in addition"),
            site_rows(breakdown, baseline),
            attribution.notes,
        )
        devices.append(rows)
    return devices
