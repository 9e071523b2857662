"""The terminal's account of updated baselines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import PEAKS
from pytest_gpumem.report.terminal.session_text import _difference
from pytest_gpumem.report.text import (
    encodable,
    printable,
    wrapped,
)
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.baselines.store import EntryUpdate, UpdateSummary
    from pytest_gpumem.measurement import BaselineEntry


MOST_UPDATES = 20
"""entries that a summary of updates lists, of each group"""


def update_summary(
    summary: UpdateSummary, *, width: int = 80, ascii_only: bool = False, brief: bool = False
) -> str:
    """Return what became of the baselines, changes first, with their differences.

    ``brief`` leaves it at the numbers, and the errors.
    """
    groups = {
        name: getattr(summary, name) for name in ("created", "changed", "unchanged", "removed")
    }
    parts = [f"{len(entries)} {name}" for name, entries in groups.items() if entries]
    if summary.errors:
        number = len(summary.errors)
        parts.append("1 error" if number == 1 else f"{number} errors")
    lines = [f"gpumem: baselines: {', '.join(parts) or 'nothing to write'}"]
    lines += [wrapped("error    ", str(error), width) for error in summary.errors]
    for name in () if brief else ("changed", "created", "removed"):
        lines += _update_lines(name, groups[name])
    return encodable("\n".join(lines), ascii_only=ascii_only)


def _update_lines(name: str, entries: Sequence[EntryUpdate]) -> Iterator[str]:
    for entry in entries[:MOST_UPDATES]:
        test = f"{entry.module}::{entry.test}" + (f" ({entry.part})" if entry.part else "")
        yield f"{name:<8} {printable(test)} on {entry.device_key}"
        if entry.new is not None:
            yield from (f"             {line}" for line in _moves(entry.old, entry.new))
    if len(entries) > MOST_UPDATES:
        yield f"{name:<8} and {len(entries) - MOST_UPDATES} more"


def _moves(old: BaselineEntry | None, new: BaselineEntry) -> Iterator[str]:
    """Yield what an entry has, beside what it had where that can be compared."""
    before = old.peaks if old is not None and len(old.peaks) == len(new.peaks) else ()
    for device, peak in enumerate(new.peaks):
        where = f", device {device}" if len(new.peaks) > 1 else ""
        if not before:
            allocated, reserved = format_size(peak.allocated), format_size(peak.reserved)
            yield f"{allocated} allocated, {reserved} reserved{where}"
        for name in PEAKS if before else ():
            yield f"{name}{where}: {_move(getattr(before[device], name), getattr(peak, name))}"
    if old is not None and old.batch_size != new.batch_size:
        yield f"batch size: {old.batch_size} -> {new.batch_size}"
    if old is not None and (old.world_size, old.rank) != (new.world_size, new.rank):
        yield f"rank: {old.rank} of {old.world_size} -> {new.rank} of {new.world_size}"


def _move(old: int, new: int) -> str:
    if old == new:
        return f"{format_size(old)}, as before"
    return f"{format_size(old)} -> {format_size(new)} ({_difference(new - old)})"
