"""What differs between two breakdowns, by category and by site, and between two provenances."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from pytest_gpumem.measurement import CATEGORIES, Provenance, Site
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pytest_gpumem.measurement import Breakdown

CACHED: Final = "cached"
"""the row of what was reserved but not allocated"""

PROVENANCE_NAMES: Final = {"cuda": "CUDA", "cudnn": "cuDNN", "allocator": "allocator settings"}
"""a provenance's fields that reports call otherwise"""


@dataclass(frozen=True)
class Row:
    """One line of a comparison, in bytes."""

    name: str
    now: int
    before: int | None = None
    """None where there is nothing to compare with"""
    site: Site | None = None
    """of a row of sites: as it is now, else as it was"""
    blocks: int = 0
    """of a row of sites: how many now"""

    @property
    def difference(self) -> int | None:
        """Bytes above what it was; negative below."""
        return None if self.before is None else self.now - self.before


Key = tuple[str, str, str, str]
"""what a site is known by: file, function, code and category"""


def category_rows(now: Breakdown, before: Breakdown | None = None) -> list[Row]:
    """Return a row for each category that has anything, and for what was cached.

    The largest growth first; without a baseline in the order of ``CATEGORIES``.
    """
    rows = []
    for name in CATEGORIES:
        bytes_now = now.categories.get(name, 0)
        bytes_before = None if before is None else before.categories.get(name, 0)
        if bytes_now or bytes_before:
            rows.append(Row(name, bytes_now, bytes_before))
    rows = _by_growth(rows) if before is not None else rows
    return [*rows, Row(CACHED, now.cached, None if before is None else before.cached)]


def site_rows(now: Breakdown, before: Breakdown | None = None) -> list[Row]:
    """Return a row for each site, the largest growth first, without a baseline the largest first.

    Sites are the same by file, function, code and category: lines move. The only line of a function
    that is new for a category is the only one that is gone: it was edited. What only one of the two
    has counts as zero in the other; but a baseline keeps its largest sites only, and of what is
    smaller than all of these it does not say what it was: such rows come last.
    """
    if before is None:
        return [_site_row(site, None) for site in now.sites]
    old, new = _keyed(before.sites), _keyed(now.sites)
    kept = [site.nbytes for site in before.sites]
    complete = sum(kept) == sum(before.categories.values())
    least = 0 if complete else min(kept, default=0)
    known = {key for key, site in new.items() if complete or site.nbytes > least > 0}
    old = _renamed(old, new.keys(), known)
    compared, unknown = [], []
    for key, site in new.items():
        if key in old or key in known:
            compared.append(_site_row(site, old[key].nbytes if key in old else 0))
        else:
            unknown.append(_site_row(site, None))
    gone = [site for key, site in old.items() if key not in new]
    compared += [Row(site_name(site), 0, site.nbytes, site) for site in gone]
    return [*_by_growth(compared), *_by_growth(unknown)]


def lead(now: Breakdown, before: Breakdown) -> str:
    """Return what grew most and where; "" where no category grew.

    "activations +512.00 MiB, of which blocks.py:88 (Attention.forward) +512.00 MiB in 12 blocks"
    """
    grown = [row for row in category_rows(now, before)[:-1] if (row.difference or 0) > 0]
    if not grown:
        return ""
    top = grown[0]
    text = f"{top.name} {_signed(top.difference)}"
    for row in site_rows(now, before):
        if row.site and row.site.category == top.name and row.site.path and row.difference:
            if row.difference > 0:
                text += f", of which {row.name} {_signed(row.difference)} in {_blocks(row.blocks)}"
            break
    return text


def site_name(site: Site) -> str:
    """Return a site as reports name it: "blocks.py:88 (Attention.forward)"."""
    if not site.path:
        return "no line of Python"
    return f"{site.path}:{site.line} ({site.function})" if site.function else _place(site)


def _place(site: Site) -> str:
    return f"{site.path}:{site.line}"


def _site_row(site: Site, before: int | None) -> Row:
    return Row(site_name(site), site.nbytes, before, site, site.blocks)


def _keyed(sites: Iterable[Site]) -> dict[Key, Site]:
    """Return sites by what they are known by; two lines of the same code become one."""
    found: dict[Key, Site] = {}
    for site in sites:
        key = site.path, site.function, site.code, site.category
        if key in found:
            other = found[key]
            site = Site(  # noqa: PLW2901 - the sum of both
                other.path,
                other.line,
                other.function,
                other.code,
                other.module,
                other.category,
                other.nbytes + site.nbytes,
                other.blocks + site.blocks,
            )
        found[key] = site
    return found


def _renamed(old: dict[Key, Site], new: Collection[Key], known: Collection[Key]) -> dict[Key, Site]:
    """Return the old sites, those of lines that were edited by the keys that they have now.

    Args:
        old: sites by their keys.
        new: the keys that there are now.
        known: those of them that the old ones would have, had they been there.
    """
    gone = _by_function(old.keys() - set(new))
    come = _by_function(set(known) - old.keys())
    edited = {
        keys[0]: come[place][0]
        for place, keys in gone.items()
        if len(keys) == len(come.get(place, ())) == 1
    }
    return {edited.get(key, key): site for key, site in old.items()}


def _by_function(keys: Iterable[Key]) -> dict[tuple[str, str, str], list[Key]]:
    """Return sites' keys by file, function and category, where the function is known."""
    found: dict[tuple[str, str, str], list[Key]] = {}
    for key in keys:
        path, function, _, category = key
        if function:
            found.setdefault((path, function, category), []).append(key)
    return found


def _by_growth(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-(row.difference or 0), -row.now))


def _signed(nbytes: int | None) -> str:
    return format_size(nbytes or 0, signed=True)


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"


def provenance_text(provenance: Provenance, other: Provenance | None = None) -> str:
    """Return what a measurement was made with, in words; only what differs from ``other``."""
    if provenance == other:  # nearly always
        return ""
    pairs = ((it.name, getattr(provenance, it.name)) for it in fields(Provenance))
    differing = [(name, value) for name, value in pairs if value != getattr(other, name, None)]
    return ", ".join(
        f"{PROVENANCE_NAMES.get(name, name)} {value or 'none'}" for name, value in differing
    )
