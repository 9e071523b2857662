"""Baselines as text: a list of all, and one with where its peak comes from."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from pytest_gpumem.judge.breakdown_diff import category_rows, provenance_text, site_rows
from pytest_gpumem.report.terminal.session_text import rows_table
from pytest_gpumem.report.terminal.summary_table import named_table
from pytest_gpumem.report.text import drawn, printable, shortened, size, wrapped
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pytest_gpumem.baselines.key import Key
    from pytest_gpumem.measurement import BaselineEntry

_TITLES: Final = ("test", "allocated", "reserved", "batch", "rank", "devices")


def listing(entries: Mapping[Key, BaselineEntry], width: int = 80) -> str:
    """Return a table of baselines, by file and device, and what they were made with."""
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in sorted(entries):
        groups.setdefault((key.module, key.device), []).append(key)
    rows: list[tuple[str, ...]] = []
    for module, device in sorted(groups):
        on = f" on {device}"
        rows.append((f"{shortened(printable(module), max(width - len(on), 1))}{on}",))
        keys = groups[module, device]
        rows += [(_name(key, entries.keys()), *_cells(entries[key])) for key in keys]
    number = len({key.nodeid for key in entries})
    title = f"Baselines of {number} test{'' if number == 1 else 's'}: peak memory in MiB"
    made = Counter(entry.provenance for entry in entries.values())
    lines = [
        wrapped("made with: ", provenance_text(it) + (f" ({n})" if len(made) > 1 else ""), width)
        for it, n in made.items()
    ]
    return "\n\n".join([title, named_table(_TITLES, rows, width), "\n".join(lines)])


def _name(key: Key, shown: Collection[Key]) -> str:
    """Return a row's name: of a part below its test the part alone."""
    if key.part and key._replace(part="") in shown:
        return f"    ({printable(key.part)})"
    return f"  {printable(key.name)}"


def _cells(entry: BaselineEntry) -> tuple[str, ...]:
    return (
        f"{max(peak.allocated for peak in entry.peaks) / MIB:.2f}",
        f"{max(peak.reserved for peak in entry.peaks) / MIB:.2f}",
        "" if entry.batch_size is None else str(entry.batch_size),
        "" if entry.world_size is None else f"{entry.rank} of {entry.world_size}",
        str(len(entry.peaks)) if len(entry.peaks) > 1 else "",
    )


def details(entries: Mapping[Key, BaselineEntry], width: int = 80) -> str:
    """Return all that is known of baselines, each with its breakdown."""
    return "\n\n\n".join(
        "\n\n".join(filter(None, _blocks(key, entries[key], width))) for key in sorted(entries)
    )


def _blocks(key: Key, entry: BaselineEntry, width: int) -> Iterator[str]:
    part = f" ({key.part})" if key.part else ""
    yield wrapped("", f"{key.nodeid}{part} on {key.device}", width)
    yield "\n".join(_facts(entry, width))
    several = len(entry.peaks) > 1
    rows = [
        [f"device {index}" if several else "", size(peak.allocated), size(peak.reserved)]
        for index, peak in enumerate(entry.peaks)
    ]
    rows = [["", "peak allocated", "peak reserved"], *rows]
    kept = rows if several else [row[1:] for row in rows]
    yield drawn(kept, [*(["left"] if several else []), "right", "right"])
    for index, breakdown in enumerate(entry.breakdowns):
        where = f", device {index}" if several else ""
        yield rows_table(f"at the peak{where}", category_rows(breakdown), width, None)
        yield rows_table(f"allocated by{where}", site_rows(breakdown), width, None)


def _facts(entry: BaselineEntry, width: int) -> Iterator[str]:
    if entry.batch_size is not None:
        yield f"batch size {entry.batch_size}"
    if entry.slope is not None:
        sizes = ", ".join(map(str, entry.slope.sizes))
        grows = f"{size(entry.slope.per_sample)} a sample and {size(entry.slope.fixed)} fixed"
        yield wrapped("", f"{grows}, over batch sizes {sizes}", width)
    if entry.world_size is not None:
        yield f"rank {entry.rank} of {entry.world_size}"
    yield wrapped("made with: ", provenance_text(entry.provenance), width)
    if not entry.breakdowns:
        yield "no breakdown: --gpumem-update-baselines adds one"
