"""A failed test in at most fifteen lines: the cause, what to know, the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pytest_gpumem.attribution.optimizer_watch import FRESH
from pytest_gpumem.judge.breakdown_diff import site_name
from pytest_gpumem.judge.result import hints_of
from pytest_gpumem.judge.verdict import Comparison, Kind, beyond_tolerance
from pytest_gpumem.report.causes import growth_rows, largest_sites, place_words, shared_causes
from pytest_gpumem.report.text import encodable, printable, wrapped
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.judge.breakdown_diff import BreakdownRow
    from pytest_gpumem.judge.result import Result

MOST_LINES: Final = 15
"""lines of a failure; a remedy and its command are never cut"""
MOST_SITES: Final = 3
"""source lines of a failure"""
LONGEST_PLACE: Final = 2
"""lines that a source line takes with its code"""
HINTED: Final = {Kind.OUT_OF_MEMORY, Kind.OVER_BUDGET}
"""failures that a hint helps with: the others are changes, and have a cause"""


class Line(NamedTuple):
    """A line of a failure."""

    text: str
    style: Literal["headline", "command", ""] = ""


def brief_failures(
    results: Sequence[Result], *, width: int = 80, ascii_only: bool = False
) -> list[Line]:
    """Return the lines of one test's failures, its parts' first; none where nothing failed."""
    failed = sorted(
        (result for result in results if result.verdict.failed),
        key=lambda result: not result.part,
    )
    lines: list[Line] = []
    for index, result in enumerate(failed):
        # A command that accepts the whole test accepts its parts: it stands below the last.
        command = result.verdict.command
        repeated = any(command == later.verdict.command for later in failed[index + 1 :])
        lines += _brief_lines(result, width, next_step=not (command and repeated))
    return [line._replace(text=encodable(line.text, ascii_only=ascii_only)) for line in lines]


def _brief_lines(result: Result, width: int, *, next_step: bool) -> list[Line]:
    verdict = result.verdict
    part = f"part {result.part}: " if result.part else ""
    head = wrapped("", f"{part}{_headline(result)}", width).splitlines()
    ending = list(_next_lines(result, width)) if next_step else []
    middle = list(_cause_lines(result, width))
    notes = list(verdict.notes)
    hints = hints_of(result) if verdict.kind in HINTED else []
    if any(FRESH in hint for hint in hints):  # the hint says the same, with its bytes
        notes = [note for note in notes if not note.startswith(FRESH)]
    sentences = [("note: ", note) for note in notes] + [("hint: ", hint) for hint in hints]
    room = MOST_LINES - len(head) - len(middle) - len(ending) - 1
    hidden = 0
    for label, sentence in sentences:
        lines = wrapped(f"  {label}", sentence, width).splitlines()
        if len(lines) > room:
            hidden += 1
            continue
        middle += lines
        room -= len(lines)
    tables = bool(result.measurement and result.measurement.attributions)
    more = f"{hidden} more notes and hints" if hidden > 1 else "1 more note" * hidden
    more = " and ".join(filter(None, [more, "all figures" * tables]))
    if more:
        middle.append(f"  ({more} with -v)")
    command = f"    {printable(verdict.command)}"
    return [
        *(Line(line, "headline") for line in head),
        *(Line(line, "command" if line == command else "") for line in (*middle, *ending)),
    ]


def _headline(result: Result) -> str:
    """Return the verdict with its figures; the cause has lines of its own."""
    verdict = result.verdict
    far = beyond_tolerance(verdict.comparisons)
    if verdict.kind is not Kind.REGRESSED or not far or verdict.held_to:
        return verdict.headline
    row = far[0]
    several = len({row.device for row in verdict.comparisons}) > 1
    share = f" ({100 * (row.difference or 0) / row.baseline:+.1f}%)" if row.baseline else ""
    device = f" of device {row.device}" if several else ""
    return (
        f"{verdict.kind}: {row.title}{device} grew by {format_size(row.difference or 0)}{share}: "
        f"{_from_to(row)}, tolerance {format_size(row.allowance or 0)}"
    )


def _from_to(row: Comparison) -> str:
    """Return both figures with one unit: "2014.44 -> 2264.44 MiB"."""
    old, new = format_size(row.baseline or 0), format_size(row.measured)
    return f"{old.rpartition(' ')[0] if old[-3:] == new[-3:] else old} -> {new}"


def _cause_lines(result: Result, width: int) -> Iterator[str]:
    """Yield the source lines that grew, or that hold most where a limit was met."""
    if result.verdict.kind is Kind.REGRESSED:
        rows = growth_rows(result)
        shown = rows[:MOST_SITES]
        for row in shown:
            yield from _site_lines(row, format_size(row.difference or 0, signed=True), width)
        hidden = len(rows) - len(shown)
        if hidden:
            bytes_hidden = sum(row.difference or 0 for row in rows[MOST_SITES:])
            growth = format_size(bytes_hidden, signed=True)
            yield f"  {growth} at {hidden} more line{'s' * (hidden > 1)}"
    elif result.verdict.kind in HINTED:
        oom = result.measurement.out_of_memory if result.measurement else None
        if oom is not None and oom.site:
            yield from wrapped("  asked for at ", oom.site, width).splitlines()
        for row in largest_sites(result, MOST_SITES):
            if row.nbytes >= MIB:
                yield from _site_lines(row, format_size(row.nbytes), width)
    else:
        stayed = result.measurement.stayed if result.measurement else None
        sites = stayed.sites if stayed else ()
        if len(sites) > 1:  # the headline names the only one
            for site in sites[:MOST_SITES]:
                yield f"  {format_size(site.nbytes)}  {printable(site_name(site))}"


def _site_lines(row: BreakdownRow, amount: str, width: int) -> list[str]:
    """Return a source line with its bytes, its category and its code."""
    category = row.site.category if row.site else ""
    label = f"  {amount}  " + (f"{category}  " if category else "")
    lines = wrapped(label, place_words(row), width).splitlines()
    if len(lines) > LONGEST_PLACE:
        lines = [*lines[: LONGEST_PLACE - 1], f"{lines[LONGEST_PLACE - 1][: width - 4]} ..."]
    return lines


def _next_lines(result: Result, width: int) -> Iterator[str]:
    """Yield the step's circumstances, and what to do about the failure."""
    verdict = result.verdict
    circumstances = [
        "" if result.batch_size is None else f"batch size {result.batch_size}",
        f"rank {result.rank_label}" if result.rank_label else "",
        result.budget,
        f"on {result.device_key}",
    ]
    yield from wrapped("  step: ", ", ".join(filter(None, circumstances)), width).splitlines()
    if result.snapshot:
        yield f"  snapshot: {printable(result.snapshot)}"
    if verdict.command:
        yield from wrapped(
            "  next: ", verdict.remedy.removesuffix(verdict.command), width
        ).splitlines()
        yield f"    {printable(verdict.command)}"
    elif verdict.remedy:
        yield from wrapped("  next: ", verdict.remedy, width).splitlines()


def repeated_lines(results: Iterable[Result], *, width: int = 80) -> dict[str, list[Line]]:
    """Return the lines of tests whose cause an earlier test's failure has shown, by nodeid."""
    lines: dict[str, list[Line]] = {}
    for cause in shared_causes(results):
        first, *later = cause.results
        for result in later:
            sentence = f"{result.verdict.kind}: same cause as {first.nodeid}: {cause.row.name}"
            lines[result.nodeid] = [
                Line(line, "headline") for line in wrapped("", sentence, width).splitlines()
            ]
    return lines
