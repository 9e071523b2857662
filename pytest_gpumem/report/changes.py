"""What became of figures, as text for a terminal, as markdown and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.baselines.changes import Kind, count
from pytest_gpumem.judge.breakdown_diff import provenance_text
from pytest_gpumem.report.markdown import code, prose
from pytest_gpumem.report.terminal.summary_table import named_table
from pytest_gpumem.report.text import printable, shortened, wrapped
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_gpumem.baselines.changes import Changes, Move
    from pytest_gpumem.judge.toolchain_change import Together
    from pytest_gpumem.measurement import BaselineEntry

FORMAT: Final = 1
"""The JSON's format. 1: the first (pytest-gpumem 0.1.0)."""
MOST_CAUSES: Final = 10
"""sentences on why something grew, below a table"""

_TITLES: Final = ("test", "peak", "before", "now", "change", "%")


def table(changes: Changes, width: int = 80) -> str:
    """Return the comparison for a terminal: what grew first."""
    blocks = [wrapped("", f"gpumem: {_headline(changes)}", width)]
    if changes.across:
        blocks += [wrapped("", it.sentence, width) for it in changes.together]
    for kind in (Kind.SHORT, Kind.GREW, Kind.SHRANK, Kind.APPEARED, Kind.VANISHED):
        moves = [it for it in changes.alone if it.kind is kind]
        if moves:
            title = f"{kind}, in MiB" if kind is not Kind.SHORT else str(kind)
            blocks += [f"{title}\n{named_table(_TITLES, _headed(moves, width), width)}"]
    notes = [wrapped("cause: ", text, width) for text in _causes(changes.alone)]
    notes += [wrapped("note: ", text, width) for text in _notes(changes)]
    return "\n\n".join([*blocks, "\n".join(notes)] if notes else blocks)


def _headline(changes: Changes) -> str:
    counted = ", ".join(f"{number} {kind}" for kind, number in count(changes.moves).items())
    return f"{changes.before} -> {changes.after}: {counted or 'no figures'}"


def _headed(moves: Sequence[Move], width: int) -> list[tuple[str, ...]]:
    """Return a row for each peak that moved, below the file and device of each group."""
    groups: dict[tuple[str, str], list[Move]] = {}
    for move in moves:
        groups.setdefault((move.key.module, move.key.device), []).append(move)
    rows: list[tuple[str, ...]] = []
    for (module, device), found in groups.items():
        on = f" on {device}"
        rows.append((f"{shortened(printable(module), max(width - len(on), 1))}{on}",))
        for move in found:
            cells = _cells(move)
            names = [f"  {printable(move.key.name)}", *[""] * (len(cells) - 1)]
            rows += [(name, *it) for name, it in zip(names, cells, strict=True)]
    return rows


def _cells(move: Move) -> list[tuple[str, ...]]:
    """Return the cells of a move, without its name: a row for each peak that moved."""
    if not move.rows:
        return [("allocated", _highest(move.old), _highest(move.new), "", "")]
    several = move.new is not None and len(move.new.peaks) > 1
    return [
        (
            f"{row.peak}, device {row.device}" if several else row.peak,
            _mib(row.baseline),
            _mib(row.measured),
            f"{(row.difference or 0) / MIB:+.2f}",
            f"{100 * (row.difference or 0) / row.baseline:+.1f}" if row.baseline else "",
        )
        for row in move.rows
    ]


def _highest(entry: BaselineEntry | None) -> str:
    return "" if entry is None else _mib(max(peak.allocated for peak in entry.peaks))


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.2f}"


def _causes(moves: Iterable[Move]) -> Iterator[str]:
    found = [f"{it.key.name}: {it.cause}" for it in moves if it.cause]
    yield from found[:MOST_CAUSES]
    if len(found) > MOST_CAUSES:
        yield f"and {len(found) - MOST_CAUSES} more tests"


def _notes(changes: Changes) -> Iterator[str]:
    yield from changes.remarks
    for move in changes.alone:
        if move.kind is Kind.INCOMPARABLE:
            yield f"{move.key.nodeid} on {move.key.device} cannot be compared: {move.mismatch}"
    if not changes.across:
        yield from (f"{it.sentence} (--across tells that as one)" for it in changes.together)
    yield from _changed_toolchains(changes)


def _changed_toolchains(changes: Changes) -> Iterator[str]:
    """Yield with what else than before figures were made, where no group of them says it."""
    told = {(it.before, it.after) for it in changes.together}
    seen: dict[tuple[str, str], int] = {}
    for move in changes.moves:
        if not move.rows or move.old is None or move.new is None:
            continue
        old, new = move.old.provenance, move.new.provenance
        if old != new and (old, new) not in told:
            texts = provenance_text(old, new), provenance_text(new, old)
            seen[texts] = seen.get(texts, 0) + 1
    for (was, now), number in seen.items():
        of = "1 that moved" if number == 1 else f"{number} that moved"
        yield f"made with {was} before, and with {now} now ({of})"


# -- markdown --


def markdown(changes: Changes) -> str:
    """Return the comparison as GitHub's markdown, which shows names as they are."""
    blocks = [f"{code(changes.before)} → {code(changes.after)}: {_counted(changes)}"]
    if changes.across:
        blocks += [f"- {prose(it.sentence)}" for it in changes.together]
    for kind in (Kind.SHORT, Kind.GREW, Kind.SHRANK, Kind.APPEARED, Kind.VANISHED):
        moves = [it for it in changes.alone if it.kind is kind]
        if moves:
            blocks.append(f"#### {str(kind).capitalize()}\n\n{_markdown_table(moves)}")
    notes = [f"- {prose(text)}" for text in (*_causes(changes.alone), *_notes(changes))]
    return "\n\n".join([*blocks, "\n".join(notes)] if notes else blocks)


def _counted(changes: Changes) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in count(changes.moves).items()) or "no figures"


def _markdown_table(moves: Sequence[Move]) -> str:
    titles = ("test", "device", "peak", "before, MiB", "now, MiB", "change", "%")
    lines = [f"| {' | '.join(titles)} |", "| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for move in moves:
        name = f"{move.key.nodeid} ({move.key.part})" if move.key.part else move.key.nodeid
        names = [code(name), move.key.device]
        for cells in _cells(move):
            lines.append(f"| {' | '.join([*names, *cells])} |")
            names = ["", ""]
    return "\n".join(lines)


# -- JSON --


def to_json(changes: Changes) -> str:
    """Return the comparison as JSON: exact bytes, all moves but those that stayed the same."""
    together = {
        (it.nodeid, it.part, it.device): number
        for number, one in enumerate(changes.together)
        for it in one.shifts
    }
    document = {
        "format": FORMAT,
        "before": changes.before,
        "after": changes.after,
        "counts": {str(kind): number for kind, number in count(changes.moves).items()},
        "moves": [
            _move(it, together.get((it.key.nodeid, it.key.part, it.key.device)))
            for it in changes.moves
            if it.kind is not Kind.SAME
        ],
        "together": [_together(it) for it in changes.together],
        "remarks": list(changes.remarks),
    }
    return json.dumps(document, indent=1)


def _move(move: Move, together: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kind": str(move.kind),
        "nodeid": move.key.nodeid,
        "part": move.key.part,
        "device": move.key.device,
        "before": _entry(move.old),
        "after": _entry(move.new),
        "cause": move.cause,
        "reason": move.mismatch,
    }
    return {**fields, "together": together}


def _entry(entry: BaselineEntry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        "peak_allocated": [peak.allocated for peak in entry.peaks],
        "peak_reserved": [peak.reserved for peak in entry.peaks],
        "batch_size": entry.batch_size,
        "world_size": entry.world_size,
        "rank": entry.rank,
        "slope": None if entry.slope is None else vars(entry.slope),
        "provenance": vars(entry.provenance),
    }


def _together(one: Together) -> dict[str, Any]:
    return {
        "sentence": one.sentence,
        "before": vars(one.before),
        "after": vars(one.after),
        "peak": one.shifts[0].peak,
        "least": one.amounts[0],
        "most": one.amounts[-1],
        "tests": one.tests,
        "others": one.others,
    }


RENDERERS: Final[dict[str, Callable[[Changes], str]]] = {
    "table": table,
    "markdown": markdown,
    "json": to_json,
}
