"""Render the source lines of a failed test with their amounts, the same at every verbosity."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.breakdowns import site_name
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.parts.cause_sentences import code_words
from pytest_gpumem.report.text import columns, printable, wrapped
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Keeper

MAX_SITES: Final = 3
"""source lines per failure"""
MAX_REASONS: Final = 2
"""clauses per source line"""
HINTED: Final = {Kind.OUT_OF_MEMORY, Kind.OVER_BUDGET}
"""failures for which every hint helps; other kinds only show hints that explain the change"""
REASON_INDENT: Final = " " * 14
"""indent of the clauses below a source line"""
_CUT: Final = " ..."
BLAME: Final = "or find out which edit it was:"
ACCEPT: Final = "or accept the figures of this run on another machine:"
"""BLAME and ACCEPT are printed above the corresponding commands"""


class CauseLine(NamedTuple):
    """A line on the cause of a failure."""

    text: str
    below: bool = False
    """whether it is a clause of the source line above it"""


class _AmountRow(NamedTuple):
    """A source line with its bytes."""

    nbytes: str
    category: str
    places: Sequence[str]
    """texts of the source line, from long to short"""
    reasons: Sequence[str]
    """clauses shown below the row"""
    keepers: Sequence[Keeper]
    """keepers of its blocks, with a clause each among ``reasons``"""


def cause_table(
    result: Result, width: int, *, whole_code: bool = False, max_reasons: int = MAX_REASONS
) -> list[CauseLine]:
    """Return the source lines that grew or, over a limit, those with most memory.

    With ``whole_code`` code is not cut, as in a log, which has no width.
    """
    cut_at = sys.maxsize if whole_code else width
    kind, measurement = result.verdict.kind, result.measurement
    if kind is Kind.REGRESSED or result.beside is not None:
        causes = result.verdict.causes
        rows = []
        for cause in causes[:MAX_SITES]:
            size, category = format_size(cause.nbytes, signed=True), printable(cause.category)
            places = code_words(cause.site) if cause.site else (cause.category,)
            category = category if cause.site else ""
            rows.append(_AmountRow(size, category, places, cause.reasons, cause.keepers))
        lines = _amount_lines(rows, width, cut_at, max_reasons)
        if len(causes) > MAX_SITES:
            growth = sum(cause.nbytes for cause in causes[MAX_SITES:])
            number = len(causes) - MAX_SITES
            more = "1 more line" if number == 1 else f"{number} more lines"
            lines.append(CauseLine(f"  {format_size(growth, signed=True)} at {more}"))
        return lines
    if kind in HINTED:
        oom = measurement.out_of_memory if measurement else None
        at = f"  requested at {printable(oom.site)}" if oom is not None and oom.site else ""
        request = [CauseLine(at)] if at else []
        rows = []
        for line in result.held_lines:
            size, places = format_size(line.site.nbytes), code_words(line.site)
            rows.append(_AmountRow(size, line.site.category, places, line.reasons, line.keepers))
        return [*request, *_amount_lines(rows, width, cut_at, max_reasons)]
    sites = measurement.stayed.sites if measurement and measurement.stayed else ()
    if len(sites) < 2:  # noqa: PLR2004 - the headline names a single one
        return []
    return [
        CauseLine(f"  {format_size(site.nbytes)}  {printable(site_name(site))}")
        for site in sites[:MAX_SITES]
    ]


def _amount_lines(
    rows: Sequence[_AmountRow], width: int, cut_at: int, max_reasons: int
) -> list[CauseLine]:
    """Return a line per source line, with its code as far as it fits, and its reasons below."""
    amount_width = max((len(row.nbytes) for row in rows), default=0)
    category_width = max((len(row.category) for row in rows), default=0)
    lines = []
    named: set[str] = set()
    for row in rows:
        head = f"  {row.nbytes:>{amount_width}}  {row.category:<{category_width}}".rstrip(" ")
        place = _fitting(f"{head}  ", [printable(words) for words in row.places], cut_at)
        lines.append(CauseLine(place))
        names = {keeper.text for keeper in row.keepers}
        if names and len(row.reasons) == len(row.keepers) and names <= named:
            lines.append(CauseLine(f"{REASON_INDENT}kept by the same", below=True))
            continue
        for reason in row.reasons[:max_reasons]:
            clause = wrapped(REASON_INDENT, reason, width).splitlines()
            lines += [CauseLine(line, below=True) for line in clause]
        named |= names
    return lines


def _fitting(head: str, places: Sequence[str], width: int) -> str:
    """Return the longest text of a source line that fits; the code may be cut, never the file."""
    for words in places[:-1]:
        if columns(f"{head}{words}") <= width:
            return f"{head}{words}".rstrip()
    place = f"{head}{places[-1]}"
    with_code = f"{head}{places[max(len(places) - 2, 0)]}"
    cut = with_code[: width - len(_CUT)]
    longer = len(cut) > len(place) + len(": ")
    return f"{cut}{_CUT}" if longer and len(with_code) > len(cut) else place
