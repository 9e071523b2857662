"""What a section of the page shows of a device's peak: by category and by source line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.records import CATEGORIES
from pytest_gpumem.report import timeline as timelines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.records import Attribution, Breakdown, Category, Site
    from pytest_gpumem.report.model import Result
    from pytest_gpumem.report.timeline import Drawing


class Row(NamedTuple):
    """A category's bytes, now and in the baseline."""

    name: str
    before: int | None
    """None where the baseline does not say"""
    now: int

    @property
    def difference(self) -> int | None:
        """Bytes above the baseline; negative below it."""
        return None if self.before is None else self.now - self.before


class SiteRow(NamedTuple):
    """A source line's bytes, now and in the baseline."""

    site: Site
    before: int | None
    """None where the baseline does not say: it keeps the largest ones alone"""
    now: int

    @property
    def difference(self) -> int | None:
        """Bytes above the baseline; negative below it."""
        return None if self.before is None else self.now - self.before


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
    sites: list[SiteRow]
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
    entry = result.baseline_entry
    # A baseline of another batch size, say, was found as well: it was not compared with.
    breakdowns = entry.breakdowns if entry and result.lead else ()
    before = dict(enumerate(breakdowns))
    return [
        _of_device(index, one, before.get(index), f"{name}-{index}", drawn=drawn)
        for index, one in enumerate(found)
    ]


def _of_device(
    index: int, found: Attribution, before: Breakdown | None, name: str, *, drawn: bool
) -> DeviceRows:
    now, timeline = found.breakdown, found.timeline
    rows = category_rows(now, before)
    there = timeline is not None and len(timeline.reserved) > 0
    return DeviceRows(
        index,
        before is not None,
        rows,
        Row(
            "peak allocated",
            None if before is None else sum(before.categories.values()),
            sum(now.categories.values()),
        ),
        Row("cached besides", None if before is None else before.cached, now.cached),
        site_rows(now, before),
        found.notes,
        timelines.draw(timeline, name) if timeline and there and drawn else None,
        tuple(timelines.shown(timeline)) if timeline else (),
        undrawn=there and not drawn,
    )


def category_rows(now: Breakdown, before: Breakdown | None) -> list[Row]:
    """Return the categories that either has, in their order."""
    old = {} if before is None else before.categories
    return [
        Row(name, None if before is None else old.get(name, 0), now.categories.get(name, 0))
        for name in CATEGORIES
        if now.categories.get(name) or old.get(name)
    ]


def site_rows(now: Breakdown, before: Breakdown | None) -> list[SiteRow]:
    """Return the source lines, those first that differ most, or that take most.

    A line is known again by its file, function, text and category: its number may have moved.
    """
    new, old = _by_line(now.sites), _by_line(before.sites if before else ())
    complete = before is not None and _bytes(old.values()) == sum(before.categories.values())
    rows = []
    for key in {**new, **old}:
        then = old[key].nbytes if key in old else 0 if complete else None
        rows.append(SiteRow(new.get(key) or old[key], then, new[key].nbytes if key in new else 0))
    rows.sort(key=lambda row: (-abs(row.difference or 0), -row.now))
    return rows


def _bytes(sites: Iterable[Site]) -> int:
    return sum(site.nbytes for site in sites)


def _by_line(sites: Iterable[Site]) -> dict[tuple[str, ...], Site]:
    found: dict[tuple[str, ...], Site] = {}
    for site in sites:
        key = (site.path, site.function, site.code, site.category)
        other = found.get(key)
        if other:
            nbytes, blocks = other.nbytes + site.nbytes, other.blocks + site.blocks
            site = replace(other, nbytes=nbytes, blocks=blocks)  # noqa: PLW2901 - of both
        found[key] = site
    return found
