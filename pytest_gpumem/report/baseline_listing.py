"""Baselines as text: a list of all, or each with the breakdown of its peak."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import category_rows, provenance_text, site_rows
from pytest_gpumem.report.parts.tables import named_table, rows_table
from pytest_gpumem.report.text import aligned_table, mib, printable, shortened, size, wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.baselines.paths import Key
    from pytest_gpumem.measurement import BaselineEntry

_TITLES: Final = ("test", "allocated", "reserved", "pinned", "batch", "rank", "devices")


def listing(entries: Mapping[Key, BaselineEntry], width: int = 80) -> str:
    """Return a table of baselines, by file and device, and their provenance."""
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in sorted(entries):
        groups.setdefault((key.module, key.device), []).append(key)
    rows: list[tuple[str, ...]] = []
    for module, device in sorted(groups):
        on = f" on {device}"
        rows.append((f"{shortened(printable(module), max(width - len(on), 1))}{on}",))
        for key in groups[module, device]:
            entry = entries[key]
            below = bool(key.part) and key._replace(part="") in entries  # its whole test
            rows.append(
                (
                    f"    ({printable(key.part)})" if below else f"  {printable(key.name)}",
                    mib(entry.peak_allocated),
                    mib(entry.peak_reserved),
                    mib(entry.peak_pinned or None),
                    "" if entry.batch_size is None else str(entry.batch_size),
                    "" if entry.world_size is None else f"{entry.rank} of {entry.world_size}",
                    str(len(entry.peaks)) if len(entry.peaks) > 1 else "",
                )
            )
    number = len({key.nodeid for key in entries})
    title = f"Baselines of {number} test{'' if number == 1 else 's'}: peak memory in MiB"
    counter = Counter(entry.provenance for entry in entries.values())
    lines = []
    for provenance, times in counter.items():
        entries_text = f" ({times})" if len(counter) > 1 else ""
        lines.append(wrapped("made with: ", provenance_text(provenance) + entries_text, width))
    return "\n\n".join([title, named_table(_TITLES, rows, width), "\n".join(lines)])


def details(entries: Mapping[Key, BaselineEntry], width: int = 80) -> str:
    """Return all figures of baselines, each with its breakdown."""
    texts = []
    for key in sorted(entries):
        entry = entries[key]
        several = len(entry.peaks) > 1
        part = f" ({key.part})" if key.part else ""
        rows = [["", "peak allocated", "peak reserved"][not several :]]
        for index, peak in enumerate(entry.peaks):
            cells = [f"device {index}", size(peak.allocated), size(peak.reserved)]
            rows.append(cells[not several :])
        facts = []
        if entry.peak_pinned:
            facts.append(f"peak pinned {size(entry.peak_pinned)}")
        if entry.batch_size is not None:
            facts.append(f"batch size {entry.batch_size}")
        if entry.slope is not None:
            sizes = ", ".join(map(str, entry.slope.sizes))
            grows = f"{size(entry.slope.per_sample)} a sample and {size(entry.slope.fixed)} fixed"
            facts.append(wrapped("", f"{grows}, over batch sizes {sizes}", width))
        if entry.world_size is not None:
            facts.append(f"rank {entry.rank} of {entry.world_size}")
        facts.append(wrapped("made with: ", provenance_text(entry.provenance), width))
        if not entry.breakdowns:
            facts.append("no breakdown: --gpumem-update-baselines adds one")
        blocks = [
            wrapped("", f"{key.nodeid}{part} on {key.device}", width),
            "\n".join(facts),
            aligned_table(rows, ["left", "right", "right"][-len(rows[0]) :]),
        ]
        for index, breakdown in enumerate(entry.breakdowns):
            where = f", device {index}" if several else ""
            blocks += [
                rows_table(f"at the peak{where}", category_rows(breakdown), width, None),
                rows_table(f"allocated by{where}", site_rows(breakdown), width, None),
            ]
        texts.append("\n\n".join(filter(None, blocks)))
    return "\n\n\n".join(texts)
