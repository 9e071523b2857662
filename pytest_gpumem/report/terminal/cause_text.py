"""The source lines of a failed test, an amount each: the same at every verbosity."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pytest_gpumem.judge.breakdown_diff import site_name
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.causes import code_words
from pytest_gpumem.report.text import columns, printable, wrapped
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.judge.result import Result

MOST_SITES: Final = 3
"""source lines of a failure"""
MOST_REASONS: Final = 2
"""clauses on one source line"""
HINTED: Final = {Kind.OUT_OF_MEMORY, Kind.OVER_BUDGET}
"""failures that every hint helps with; a change has a cause, and needs the hints that explain it"""
REASON_INDENT: Final = " " * 14
"""before a clause, which stands below its line's amount"""
_CUT: Final = " ..."
_AmountRow = tuple[str, str, Sequence[str], Sequence[str]]
"""bytes, category, the source line in words, ever fewer of them, and clauses that stand below"""
ACCEPT: Final = "or accept the figures of this run on another machine:"
"""the line above the command that does"""


class FailureLine(NamedTuple):
    """A line of a failure."""

    text: str
    style: Literal["headline", "command", ""] = ""


def cause_lines(
    result: Result, width: int, *, whole_code: bool = False, most_reasons: int = MOST_REASONS
) -> list[str]:
    """Return the source lines that grew, or that hold most where a limit was met.

    Args:
        result: of a failed test or part.
        width: columns of the terminal.
        whole_code: whether code is shown whole, however long: in a log, which has no columns.
        most_reasons: clauses on one source line.
    """
    cut_at = sys.maxsize if whole_code else width
    kind, measurement = result.verdict.kind, result.measurement
    if kind is Kind.REGRESSED or result.beside is not None:
        causes = result.verdict.causes
        lines = _amount_lines(
            [
                (
                    format_size(cause.nbytes, signed=True),
                    cause.category if cause.site else "",
                    code_words(cause.site) if cause.site else (cause.category,),
                    cause.reasons,
                )
                for cause in causes[:MOST_SITES]
            ],
            width,
            cut_at,
            most_reasons,
        )
        if len(causes) > MOST_SITES:
            growth = sum(cause.nbytes for cause in causes[MOST_SITES:])
            number = len(causes) - MOST_SITES
            places = "1 more line" if number == 1 else f"{number} more lines"
            lines.append(f"  {format_size(growth, signed=True)} at {places}")
        return lines
    if kind in HINTED:
        oom = measurement.out_of_memory if measurement else None
        request = [f"  asked for at {printable(oom.site)}"] if oom is not None and oom.site else []
        rows = [
            (format_size(site.nbytes), site.category, code_words(site), line.reasons)
            for line in result.held_lines
            for site in (line.site,)
        ]
        return [*request, *_amount_lines(rows, width, cut_at, most_reasons)]
    sites = measurement.stayed.sites if measurement and measurement.stayed else ()
    if len(sites) < 2:  # noqa: PLR2004 - the headline names the only one
        return []
    return [
        f"  {format_size(site.nbytes)}  {printable(site_name(site))}" for site in sites[:MOST_SITES]
    ]


def _without_steps(reason: str) -> str:
    return reason.partition(", of step")[0]


def _amount_lines(
    rows: Sequence[_AmountRow], width: int, cut_at: int, most_reasons: int
) -> list[str]:
    """Return a line for each source line, its code as far as it fits, and its reasons below it."""
    amount_width, category_width = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    lines = []
    told: set[str] = set()
    for amount, category, places, reasons in rows:
        head = f"  {amount:>{amount_width}}  {category:<{category_width}}  ".rstrip(" ") + "  "
        lines.append(_fitting(head, [printable(words) for words in places], cut_at))
        if reasons and told.issuperset(map(_without_steps, reasons)):
            lines.append(f"{REASON_INDENT}kept by the same")
            continue
        for reason in reasons[:most_reasons]:
            lines += wrapped(REASON_INDENT, reason, width).splitlines()
        told.update(map(_without_steps, reasons))
    return lines


def _fitting(head: str, places: Sequence[str], width: int) -> str:
    """Return a source line in the most words that fit; its code is cut, and never its file."""
    for words in places[:-1]:
        if columns(f"{head}{words}") <= width:
            return f"{head}{words}".rstrip()
    place = f"{head}{places[-1]}"
    with_code = f"{head}{places[max(len(places) - 2, 0)]}"
    cut = with_code[: width - len(_CUT)]
    longer = len(cut) > len(place) + len(": ")
    return f"{cut}{_CUT}" if longer and len(with_code) > len(cut) else place
