"""Compare a peak's breakdown with a baseline's, and list its largest lines with their keepers.

A keeper is an object that keeps memory of a source line alive at the peak. All functions are pure.
Sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.measurement import CATEGORIES, Provenance, Site
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.measurement import Attribution, Breakdown, Keeper

MAX_HELD: Final = 3
"""maximum number of source lines to name for a peak over its limit"""
MIN_KEPT: Final = 8
"""a keeper is named only if it keeps at least 1/MIN_KEPT of its line's bytes; explain/causes.py
applies the same share to growths"""
CACHED: Final = "cached"
"""name of the row for memory that was reserved but not allocated"""

PROVENANCE_NAMES: Final = {"cuda": "CUDA", "cudnn": "cuDNN", "allocator": "allocator settings"}
"""by field of a provenance: its name in reports, if that differs"""


@dataclass(frozen=True)
class BreakdownRow:
    """One category or one site of a breakdown and of the baseline's, in bytes."""

    name: str
    nbytes: int
    baseline: int | None = None
    """bytes in the baseline; None without a baseline, or if it stores too few sites to know them"""
    site: Site | None = None
    """the measured site, else the baseline's; None for a category"""
    blocks: int = 0
    """number of the site's blocks"""
    baseline_blocks: int | None = None
    """number of the site's blocks in the baseline; None if unknown, or for a category"""
    old_code: str = ""
    """the line's code in the baseline, if the line was edited since; else "" """

    @property
    def difference(self) -> int | None:
        """Bytes above the baseline, negative below it; None if the baseline's bytes are unknown."""
        return None if self.baseline is None else self.nbytes - self.baseline


SiteKey = tuple[str, str, str, str]
"""(file, function, code, category), which identify a site even if its line number changed"""


def category_rows(current: Breakdown, baseline: Breakdown | None = None) -> list[BreakdownRow]:
    """Return a row for each category that is not empty, and one for cached memory.

    The largest growth is first; without a baseline, rows are in the order of ``CATEGORIES``.
    """
    rows = []
    for name in CATEGORIES:
        nbytes = current.categories.get(name, 0)
        baseline_bytes = None if baseline is None else baseline.categories.get(name, 0)
        if nbytes or baseline_bytes:
            rows.append(BreakdownRow(name, nbytes, baseline_bytes))
    rows = _by_growth(rows) if baseline is not None else rows
    cached = BreakdownRow(CACHED, current.cached, None if baseline is None else baseline.cached)
    return [*rows, cached]


def site_rows(current: Breakdown, baseline: Breakdown | None = None) -> list[BreakdownRow]:
    """Return a row for each site, sorted by growth, or by size without a baseline.

    Sites are matched by file, function, code and category, as line numbers change. If a function
    has one new site of a category and lacks one of the baseline's, the line was edited, and the two
    are one site. A site that is missing from one breakdown counts as zero there. But a baseline
    stores only its largest sites. If a site is smaller than all of these, its baseline is zero only
    if the stored sites make up its whole category. Otherwise its baseline is unknown, and its row
    comes last.
    """
    if baseline is None:
        return [
            BreakdownRow(site_name(site), site.nbytes, None, site, site.blocks)
            for site in current.sites
        ]
    old, new = _keyed(baseline.sites), _keyed(current.sites)
    old_sizes = [site.nbytes for site in baseline.sites]
    complete = sum(old_sizes) == sum(baseline.categories.values())
    smallest = 0 if complete else min(old_sizes, default=0)
    # The baseline would contain sites of this size: their absence means zero bytes.
    comparable = {key for key, site in new.items() if complete or site.nbytes > smallest > 0}
    beside: Counter[str] = Counter(baseline.categories)
    for site in baseline.sites:
        beside[site.category] -= site.nbytes
    gone_places = _by_function(old.keys() - new.keys())
    added_places = _by_function(comparable - old.keys())
    edited = {
        keys[0]: added_places[place][0]
        for place, keys in gone_places.items()
        if len(keys) == len(added_places.get(place, ())) == 1
    }
    old = {edited.get(key, key): site for key, site in old.items()}
    compared, uncompared = [], []
    for key, site in new.items():
        if key in old or key in comparable:
            before = old.get(key)  # None: the baseline had no such site
            old_code = before.code if before and before.code != site.code else ""
            nbytes, blocks = (before.nbytes, before.blocks) if before else (0, 0)
            row = BreakdownRow(
                site_name(site), site.nbytes, nbytes, site, site.blocks, blocks, old_code
            )
            compared.append(row)
        elif beside[site.category] <= 0:
            compared.append(BreakdownRow(site_name(site), site.nbytes, 0, site, site.blocks, 0))
        else:
            uncompared.append(BreakdownRow(site_name(site), site.nbytes, None, site, site.blocks))
    gone = [site for key, site in old.items() if key not in new]
    compared += [
        BreakdownRow(site_name(site), 0, site.nbytes, site, 0, site.blocks) for site in gone
    ]
    return [*_by_growth(compared), *_by_growth(uncompared)]


def site_name(site: Site) -> str:
    """Return a site's name in reports: "blocks.py:88 (Attention.forward)"."""
    if not site.path:
        return "no line of Python"
    place = f"{site.path}:{site.line}"
    return f"{place} ({site.function})" if site.function else place


def blocks_text(number: int) -> str:
    """Return "1 block", "2 blocks"."""
    return "1 block" if number == 1 else f"{number} blocks"


def _keyed(sites: Iterable[Site]) -> dict[SiteKey, Site]:
    """Return sites by key, merging the sites of lines with the same code."""
    by_key: dict[SiteKey, Site] = {}
    for site in sites:
        key = site.path, site.function, site.code, site.category
        first = by_key.get(key)
        if first is not None:
            nbytes, blocks = first.nbytes + site.nbytes, first.blocks + site.blocks
            site = replace(first, nbytes=nbytes, blocks=blocks)  # noqa: PLW2901 - one site of the key
        by_key[key] = site
    return by_key


def _by_function(keys: Iterable[SiteKey]) -> dict[tuple[str, str, str], list[SiteKey]]:
    groups: dict[tuple[str, str, str], list[SiteKey]] = {}
    for key in keys:
        path, function, _, category = key
        if function:
            groups.setdefault((path, function, category), []).append(key)
    return groups


def _by_growth(rows: Iterable[BreakdownRow]) -> list[BreakdownRow]:
    return sorted(rows, key=lambda row: (-(row.difference or 0), -row.nbytes))


def provenance_text(provenance: Provenance, reference: Provenance | None = None) -> str:
    """Return a provenance as text; with a reference, only the fields that differ from it."""
    if provenance == reference:  # the usual case
        return ""
    values = ((field.name, getattr(provenance, field.name)) for field in fields(Provenance))
    return ", ".join(
        f"{PROVENANCE_NAMES.get(name, name)} {value or 'none'}"
        for name, value in values
        if value != getattr(reference, name, None)
    )


def toolchain_text(old: Provenance, new: Provenance) -> str:
    """Return the versions that differ: "torch 2.14.0 -> 2.15.0, CUDA 13.0 -> 13.2"."""
    return ", ".join(
        f"{PROVENANCE_NAMES.get(name, name)} "
        f"{getattr(old, name) or 'none'} -> {getattr(new, name) or 'none'}"
        for name in (field.name for field in fields(Provenance))
        if getattr(old, name) != getattr(new, name)
    )


@dataclass(frozen=True, slots=True)
class HeldLine:
    """A source line that holds a large part of a peak."""

    site: Site
    reasons: tuple[str, ...]
    """clauses that describe the keepers of its blocks"""
    keepers: tuple[Keeper, ...] = ()
    """the keepers, one per clause"""


def largest_lines(attribution: Attribution) -> list[HeldLine]:
    """Return at most MAX_HELD source lines, those with most bytes of a peak and at least 1 MiB."""
    sites = sorted(attribution.breakdown.sites, key=lambda site: -site.nbytes)[:MAX_HELD]
    lines = []
    for site in sites:
        if site.nbytes >= MIB:
            keepers = keepers_of(site, attribution.keepers, site.nbytes)
            reasons = tuple(keeper_reason(keeper, site.nbytes) for keeper in keepers)
            lines.append(HeldLine(site, reasons, keepers))
    return lines


def keepers_of(site: Site, keepers: Iterable[Keeper], nbytes: int) -> tuple[Keeper, ...]:
    """Return the keepers that hold at least 1/MIN_KEPT of a source line's bytes."""
    place = site.path, site.line, site.category
    return tuple(
        keeper
        for keeper in keepers
        if (keeper.path, keeper.line, keeper.category) == place
        and keeper.nbytes * MIN_KEPT >= nbytes
    )


def keeper_reason(keeper: Keeper, nbytes: int) -> str:
    """Describe a keeper, with its bytes if they are less than 90 % of the line's."""
    part = f"{format_size(keeper.nbytes)} " if keeper.nbytes * 10 < nbytes * 9 else ""
    *first, last = map(str, keeper.steps or [""])
    steps = f", of steps {', '.join(first)} and {last}" if first else f", of step {last}"
    return f"{part}kept by {keeper.text}{steps if keeper.steps else ''}"
