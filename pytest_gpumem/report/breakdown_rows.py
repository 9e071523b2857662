"""What a section of the page shows of a device's peak: by category and by source line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.judge.breakdown_diff import Row, category_rows, site_rows
from pytest_gpumem.report import timeline_svg as timelines

if TYPE_CHECKING:
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Attribution, Breakdown, Category
    from pytest_gpumem.report.timeline_svg import Drawing


@dataclass(frozen=True)
class DeviceRows:
    """Where one device's peak comes from."""

    index: int
    compared: bool
    """whether there is a baseline's breakdown beside it"""
    categories: list[Row]
    total: Row
    """peak allocated"""
    cached: Row
    sites: list[Row]
    notes: tuple[str, ...] = ()
    drawing: Drawing | None = None
    legend: tuple[Category, ...] = ()
    undrawn: bool = False
    """there is a timeline, and it is not drawn"""

    def share(self, row: Row) -> float:
        """Return a row's part of the whole, in percent."""
        return 100 * row.now / max(self.total.now, 1)


def device_rows(result: Result, name: str, *, drawn: bool) -> list[DeviceRows]:
    """Return where each device's peak comes from; nothing where nobody looked.

    Args:
        result: of a test or a part.
        name: what the ids in its drawings begin with.
        drawn: draw the timelines.
    """
    found = result.measurement.attributions if result.measurement else ()
    before = dict(enumerate(result.breakdowns_before))
    return [
        _of_device(index, one, before.get(index), f"{name}-{index}", drawn=drawn)
        for index, one in enumerate(found)
    ]


def _of_device(
    index: int, found: Attribution, before: Breakdown | None, name: str, *, drawn: bool
) -> DeviceRows:
    now, timeline = found.breakdown, found.timeline
    *rows, cached = category_rows(now, before)
    there = timeline is not None and len(timeline.reserved) > 0
    return DeviceRows(
        index,
        before is not None,
        rows,
        Row(
            "peak allocated",
            sum(now.categories.values()),
            None if before is None else sum(before.categories.values()),
        ),
        replace(cached, name="cached besides"),
        site_rows(now, before),
        found.notes,
        timelines.draw(timeline, name) if timeline and there and drawn else None,
        tuple(timelines.shown(timeline)) if timeline else (),
        undrawn=there and not drawn,
    )
