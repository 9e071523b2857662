"""Render changes of figures as text for a terminal, and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import provenance_text
from pytest_gpumem.cli.recorded.changes import ChangeKind, count_changes
from pytest_gpumem.report.markdown_syntax import code, pipe_table, prose
from pytest_gpumem.report.parts.tables import named_table
from pytest_gpumem.report.text import mib, printable, shortened, wrapped
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.cli.recorded.changes import Changes, EntryChange

MAX_CAUSES: Final = 10
"""maximum number of sentences on causes below a table"""
LISTED: Final = (
    ChangeKind.OUT_OF_MEMORY,
    ChangeKind.GREW,
    ChangeKind.SHRANK,
    ChangeKind.APPEARED,
    ChangeKind.VANISHED,
)
"""kinds with a table, in order"""


def table(changes: Changes, width: int = 80) -> str:
    """Render the comparison for a terminal, growth first."""
    head = f"gpumem: {changes.old_name} -> {changes.new_name}: {_counts(changes)}"
    blocks = [wrapped("", head, width)]
    if changes.across:
        blocks += [wrapped("", group.sentence, width) for group in changes.common_changes]
    titles = ("test", "peak", "before", "now", "change", "%")
    for kind in LISTED:
        moves = [move for move in changes.alone if move.kind is kind]
        if moves:
            title = f"{kind}, in MiB" if kind is not ChangeKind.OUT_OF_MEMORY else str(kind)
            groups: dict[tuple[str, str], list[EntryChange]] = {}
            for move in moves:
                groups.setdefault((move.key.module, move.key.device), []).append(move)
            rows: list[tuple[str, ...]] = []
            for (module, device), members in groups.items():
                on = f" on {device}"
                rows.append((f"{shortened(printable(module), max(width - len(on), 1))}{on}",))
                for move in members:
                    name = f"  {printable(move.key.name)}"
                    for cells in _peak_cells(move):
                        rows.append((name, *cells))
                        name = ""  # only the first of the test's rows shows the name
            blocks.append(f"{title}\n{named_table(titles, rows, width)}")
    notes = [wrapped("cause: ", cause, width) for cause in _causes(changes)]
    notes += [wrapped("note: ", note, width) for note in _notes(changes)]
    return "\n\n".join([*blocks, "\n".join(notes)] if notes else blocks)


def _counts(changes: Changes) -> str:
    counter = count_changes(changes.entries)
    return ", ".join(f"{number} {kind}" for kind, number in counter.items()) or "no figures"


def _peak_cells(move: EntryChange) -> list[tuple[str, ...]]:
    """Return a change's cells without its name: a row per peak that changed."""
    if not move.rows:
        highest = (mib(each.peak_allocated if each else None) for each in (move.old, move.new))
        return [("allocated", *highest, "", "")]
    several = move.new is not None and len(move.new.peaks) > 1
    rows: list[tuple[str, ...]] = []
    for row in move.rows:
        difference = row.difference or 0
        title = f"{row.peak}, device {row.device}" if several else row.peak
        share = f"{100 * difference / row.baseline:+.1f}" if row.baseline else ""
        sizes = mib(row.baseline), mib(row.measured), f"{difference / MIB:+.2f}"
        rows.append((title, *sizes, share))
    return rows


def _causes(changes: Changes) -> list[str]:
    """Return why tests grew: a sentence for each of ``MAX_CAUSES`` tests, then the number left."""
    causes = [f"{move.key.name}: {move.cause}" for move in changes.alone if move.cause]
    hidden = len(causes) - MAX_CAUSES
    return [*causes[:MAX_CAUSES], *([f"and {hidden} more tests"] if hidden > 0 else [])]


def _notes(changes: Changes) -> Iterator[str]:
    """Yield remarks, incomparable changes, and changes of the toolchain."""
    yield from changes.remarks
    for move in changes.alone:
        if move.kind is ChangeKind.INCOMPARABLE:
            yield f"{move.key.nodeid} on {move.key.device} cannot be compared: {move.mismatch}"
    if not changes.across:
        yield from (
            f"{common.sentence} (--across shows these as one change)"
            for common in changes.common_changes
        )
    grouped = {(group.old, group.new) for group in changes.common_changes}
    toolchains: dict[tuple[str, str], int] = {}
    for move in changes.entries:
        if not move.rows or move.old is None or move.new is None:
            continue
        old, new = move.old.provenance, move.new.provenance
        if old != new and (old, new) not in grouped:
            pair = provenance_text(old, new), provenance_text(new, old)
            toolchains[pair] = toolchains.get(pair, 0) + 1
    for (old_text, new_text), number in toolchains.items():
        yield f"made with {old_text} before, and with {new_text} now ({number} changed)"


def changes_markdown(changes: Changes) -> str:
    """Render the comparison as GitHub's Markdown, with names escaped."""
    blocks = [f"{code(changes.old_name)} → {code(changes.new_name)}: {_counts(changes)}"]
    if changes.across:
        blocks += [f"- {prose(group.sentence)}" for group in changes.common_changes]
    titles = ("test", "device", "peak", "before, MiB", "now, MiB", "change", "%")
    for kind in LISTED:
        rows = []
        for move in changes.alone:
            if move.kind is not kind:
                continue
            name = f"{move.key.nodeid} ({move.key.part})" if move.key.part else move.key.nodeid
            names = [code(name), move.key.device]
            for cells in _peak_cells(move):
                rows.append((*names, *cells))
                names = ["", ""]
        if rows:
            blocks.append(f"#### {str(kind).capitalize()}\n\n{pipe_table(titles, rows)}")
    notes = [f"- {prose(note)}" for note in (*_causes(changes), *_notes(changes))]
    return "\n\n".join([*blocks, "\n".join(notes)] if notes else blocks)
