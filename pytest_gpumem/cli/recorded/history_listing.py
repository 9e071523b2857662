"""Render the history of baselines for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import provenance_text
from pytest_gpumem.cli.recorded.changes import ChangeKind, count_changes
from pytest_gpumem.report.text import aligned_table, mib, printable, wrapped
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from pytest_gpumem.baselines.paths import Key
    from pytest_gpumem.cli.recorded.changes import EntryChange
    from pytest_gpumem.cli.recorded.commits import BaselineHistory

MAX_MOVES: Final = 5
"""maximum number of tests that the overview lists per commit"""
_TITLES: Final = ("commit", "date", "allocated", "reserved", "change", "%")


def overview(history: BaselineHistory, width: int = 80) -> str:
    """Render each commit with the tests whose figures it changed, the newest first."""
    blocks = []
    for step in history.steps:
        counter = count_changes(step.changes)
        counts = ", ".join(f"{number} {kind}" for kind, number in counter.items())
        commit = step.commit
        author = f"({commit.author})" if commit.author else ""
        words = " ".join(filter(None, (commit.short, commit.date, commit.subject, author)))
        lines = [wrapped("", f"{words}: {counts or 'unreadable'}", width)]
        for change in step.changes[:MAX_MOVES]:
            words = f"{change.key.nodeid}{_part(change.key)} on {change.key.device}: "
            lines.append(_indented(words + move_words(change), width))
        hidden = len(step.changes) - MAX_MOVES
        if hidden > 0:
            lines.append(f"  and {hidden} more")
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, *_wrapped_remarks(history, width)])


def of_tests(history: BaselineHistory, width: int = 80) -> str:
    """Render the figures of each test by commit, the newest first, and why they changed."""
    blocks = []
    for key in history.keys:
        rows: list[tuple[str, ...]] = [_TITLES]
        lines = []
        for commit, change in history.of(key):
            rows.append((commit.short, commit.date, *cells_of(change)))
            lines.append(wrapped("", f"{commit.short} {commit.subject}".strip(), width))
            lines.append(_indented(move_words(change), width))
        title = f"{key.nodeid}{_part(key)} on {key.device}: baseline in MiB"
        table = aligned_table(rows, ["left", "left", *["right"] * (len(_TITLES) - 2)])
        blocks += [wrapped("", title, width), table, "\n".join(lines)]
    return "\n\n".join([*blocks, *_wrapped_remarks(history, width)])


def move_words(change: EntryChange) -> str:
    """Describe a change: "100.00 -> 110.00 MiB (+10.0%), activations +10.00 MiB"."""
    words = []
    if change.kind in {ChangeKind.APPEARED, ChangeKind.VANISHED}:
        entry = change.new or change.old
        size = "" if entry is None else f" with {mib(entry.peak_allocated)} MiB"
        words.append(f"{change.kind}{size}")
    elif change.mismatch:
        words.append(f"cannot be compared: {change.mismatch}")
    for row in change.rows:
        device = f", device {row.device}" if change.new and len(change.new.peaks) > 1 else ""
        share = f" ({100 * (row.difference or 0) / row.baseline:+.1f}%)" if row.baseline else ""
        words.append(f"{row.peak}{device} {mib(row.baseline)} -> {mib(row.measured)} MiB{share}")
    if change.cause:
        words.append(change.cause)
    if change.old and change.new and change.old.provenance != change.new.provenance:
        old, new = change.old.provenance, change.new.provenance
        words.append(f"{provenance_text(old, new)} -> {provenance_text(new, old)}")
    return "; ".join(words)


def cells_of(change: EntryChange) -> tuple[str, ...]:
    """Return the cells of a commit's row, for the fullest device."""
    entry = change.new
    if entry is None:
        return ("gone", "", "", "")
    cells = mib(entry.peak_allocated), mib(entry.peak_reserved)
    if change.old is None or change.mismatch:
        return (*cells, "", "")
    old_allocated = change.old.peak_allocated
    difference = entry.peak_allocated - old_allocated
    share = f"{100 * difference / old_allocated:+.1f}" if old_allocated and difference else ""
    return (*cells, f"{difference / MIB:+.2f}" if difference else "0", share)


def _part(key: Key) -> str:
    return f" ({key.part})" if key.part else ""


def _indented(sentence: str, width: int) -> str:
    first, *further = wrapped("", sentence, width - 4).splitlines() or [""]
    return "\n".join([f"  {first}", *(f"    {line}" for line in further)])


def _wrapped_remarks(history: BaselineHistory, width: int) -> list[str]:
    notes = [wrapped("note: ", printable(remark), width) for remark in history.remarks]
    return ["\n".join(notes)] if notes else []
