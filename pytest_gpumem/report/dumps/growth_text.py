"""``gpumem diff``'s output: the growth from one snapshot to another, by source line."""

from __future__ import annotations

import json
import linecache
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_gpumem.report.markdown_syntax import code, pipe_table, prose
from pytest_gpumem.report.parts.tables import named_table
from pytest_gpumem.report.text import mib, printable, signed_size, size, wrapped
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.attribution.dumps.growth import DeviceGrowth, LineGrowth
    from pytest_gpumem.attribution.dumps.held import Place

FORMAT: Final = 1
"""The JSON's format. 1: the first (pytest-gpumem 0.2.0)."""
MAX_LINES: Final = 15
"""source lines of a table, unless all are asked for"""
_TITLES: Final = ("line", "before", "now", "change", "blocks")


@dataclass(frozen=True)
class DumpChanges:
    """All changes between two snapshots."""

    old_name: str
    new_name: str
    devices: tuple[DeviceGrowth, ...]
    every_line: bool = False
    """whether every line is listed, also one that did not change"""


def growth_table(changes: DumpChanges, width: int = 80) -> str:
    """Return the changes for a terminal: the largest growth first."""
    blocks = [wrapped("", f"gpumem: {changes.old_name} -> {changes.new_name}", width)]
    for growth in changes.devices:
        lines, hidden = _listed(changes, growth)
        block = [wrapped("", _device_words(growth), width)]
        if lines:
            rows = [(_place_words(line.place), *_cells(line)) for line in lines]
            block.append(named_table(_TITLES, rows, width))
            if lines[0].difference > 0:
                source = linecache.getline(lines[0].place.path, lines[0].place.line).strip()
                where = _place_words(lines[0].place)
                if source:
                    block.append(wrapped("", f"most growth: {where}: {source}", width))
        block += hidden
        blocks.append("\n\n".join(block))
    return "\n\n".join(blocks)


def growth_markdown(changes: DumpChanges) -> str:
    """Return the changes as GitHub's Markdown."""
    blocks = [f"{code(changes.old_name)} → {code(changes.new_name)}"]
    for growth in changes.devices:
        lines, hidden = _listed(changes, growth)
        blocks.append(prose(_device_words(growth)))
        rows = [(code(_place_words(line.place)), *_cells(line)) for line in lines]
        titles = ("", "before", "now", "change", "blocks")
        blocks += [pipe_table(titles, rows), *map(prose, hidden)]
    return "\n\n".join(filter(None, blocks))


def growth_json(changes: DumpChanges) -> str:
    """Return the changes as JSON: exact bytes, every line."""
    document = {
        "format": FORMAT,
        "before": changes.old_name,
        "after": changes.new_name,
        "devices": [
            {
                "device": growth.device,
                "at_peak": [growth.old.at_peak, growth.new.at_peak],
                "allocated": [growth.old.allocated, growth.new.allocated],
                "reserved": [growth.old.reserved, growth.new.reserved],
                "lines": [
                    {
                        **line.place._asdict(),
                        "bytes": [line.old, line.new],
                        "blocks": [line.old_blocks, line.new_blocks],
                    }
                    for line in growth.lines
                ],
            }
            for growth in changes.devices
        ],
    }
    return json.dumps(document, indent=1)


def _listed(changes: DumpChanges, growth: DeviceGrowth) -> tuple[Sequence[LineGrowth], list[str]]:
    if changes.every_line:
        return growth.lines, []
    moved = [line for line in growth.lines if line.difference]
    # The largest moves, whichever way they went, in the order of growth.
    shown = sorted(moved, key=lambda line: -abs(line.difference))[:MAX_LINES]
    lines = [line for line in moved if line in shown]
    same = len(growth.lines) - len(moved)
    parts = [
        f"{len(moved) - len(lines)} more lines moved" if len(moved) > len(lines) else "",
        f"{same} {'line' if same == 1 else 'lines'} did not change" if same else "",
    ]
    sentence = ", ".join(filter(None, parts))
    return lines, [f"{sentence} (--all lists them)"] if sentence else []


def _device_words(growth: DeviceGrowth) -> str:
    """Return a device's figures: "device 0, at the end: allocated 1.00 -> 2.00 MiB (+1.00 MiB)"."""
    old, new = growth.old, growth.new
    moments = {
        "at the peak of the history" if held.at_peak else "at the end" for held in (old, new)
    }
    when = moments.pop() if len(moments) == 1 else "at the peak of the history, or at the end"
    share = f", {100 * growth.difference / old.allocated:+.1f}%" if old.allocated else ""
    return (
        f"device {growth.device}, {when}: allocated {mib(old.allocated)} -> {mib(new.allocated)} "
        f"MiB ({format_size(growth.difference, signed=True)}{share}); reserved at the end "
        f"{mib(old.reserved)} -> {mib(new.reserved)} MiB"
    )


def _cells(line: LineGrowth) -> tuple[str, str, str, str]:
    blocks = (
        str(line.new_blocks)
        if line.old_blocks == line.new_blocks
        else f"{line.old_blocks} -> {line.new_blocks}"
    )
    return size(line.old), size(line.new), signed_size(line.difference), blocks


def _place_words(place: Place) -> str:
    if not place.path:
        return "no line of Python"
    phase = f", {place.phase}" if place.phase else ""
    return printable(f"{place.path}:{place.line} ({place.function}{phase})")


RENDERERS: Final[dict[str, Callable[[DumpChanges], str]]] = {
    "table": growth_table,
    "markdown": growth_markdown,
    "json": growth_json,
}
