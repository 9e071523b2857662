"""Describe updated baselines for the terminal."""

from __future__ import annotations

from posixpath import commonpath
from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import EVERY_PEAK
from pytest_gpumem.report.text import printable, signed_size, wrapped
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.baselines.store import UpdateSummary
    from pytest_gpumem.measurement import BaselineEntry

MAX_UPDATES = 20
"""entries to list per group"""


def update_summary(summary: UpdateSummary, *, width: int = 80, brief: bool = False) -> str:
    """Return an update as text: the counts, the errors, then each change with its figures.

    ``brief`` shows only the counts and errors.
    """
    groups = {
        name: getattr(summary, name) for name in ("created", "changed", "unchanged", "removed")
    }
    parts = [f"{len(entries)} {name}" for name, entries in groups.items() if entries]
    if summary.errors:
        number = len(summary.errors)
        parts.append("1 error" if number == 1 else f"{number} errors")
    lines = [", ".join(parts) or "nothing to write"]
    lines += [wrapped("error    ", str(error), width) for error in summary.errors]
    for group in () if brief else ("changed", "created", "removed"):
        entries = groups[group]
        for entry in entries[:MAX_UPDATES]:
            test = f"{entry.module}::{entry.test}".removesuffix("::")
            test += f" ({entry.part})" if entry.part else ""
            lines.append(f"{group:<8} {printable(test)} on {printable(entry.device_key)}")
            if entry.new is not None:
                lines += (f"             {line}" for line in _figure_lines(entry.old, entry.new))
        if len(entries) > MAX_UPDATES:
            lines.append(f"{group:<8} and {len(entries) - MAX_UPDATES} more")
    return "\n".join(lines)


def files_to_commit(files: Sequence[str]) -> str:
    """Return the next step, committing the written files; "" if there are none."""
    if len(files) <= 1:
        return f"commit {printable(files[0])}" if files else ""
    return f"commit the {len(files)} files that were written in {printable(commonpath(files))}"


def _figure_lines(old: BaselineEntry | None, new: BaselineEntry) -> Iterator[str]:
    """Yield an entry's figures, next to the old ones if they can be compared."""
    comparable = old is not None and len(old.peaks) == len(new.peaks)
    old_peaks = old.peaks if old is not None and comparable else ()
    for device, peak in enumerate(new.peaks):
        where = f", device {device}" if len(new.peaks) > 1 else ""
        if not comparable:
            allocated, reserved = format_size(peak.allocated), format_size(peak.reserved)
            pinned = f", {format_size(peak.pinned)} pinned" if peak.pinned else ""
            yield f"{allocated} allocated, {reserved} reserved{pinned}{where}"
            continue
        for name in EVERY_PEAK:
            old_size, new_size = getattr(old_peaks[device], name), getattr(peak, name)
            if name == "pinned" and not old_size and not new_size:
                continue
            change = f"{format_size(new_size)}, unchanged"
            if old_size != new_size:
                sizes = f"{format_size(old_size)} -> {format_size(new_size)}"
                change = f"{sizes} ({signed_size(new_size - old_size)})"
            yield f"{name}{where}: {change}"
    if old is not None and old.batch_size != new.batch_size:
        yield f"batch size: {old.batch_size} -> {new.batch_size}"
    if old is not None and (old.world_size, old.rank) != (new.world_size, new.rank):
        yield f"rank: {old.rank} of {old.world_size} -> {new.rank} of {new.world_size}"
