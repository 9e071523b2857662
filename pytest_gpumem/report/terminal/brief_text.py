"""A failed test in at most fifteen lines: the cause, notes, the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pytest_gpumem.attribution.hints import STILL_HELD
from pytest_gpumem.attribution.optimizer_watch import FRESH
from pytest_gpumem.attribution.snapshots import VIEWER
from pytest_gpumem.judge.breakdown_diff import site_name
from pytest_gpumem.judge.result import hints_of
from pytest_gpumem.judge.verdict import Kind, beyond_tolerance
from pytest_gpumem.report.causes import code_words, shared_causes
from pytest_gpumem.report.text import columns, encodable, printable, wrapped
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_gpumem.judge.result import Result

MOST_LINES: Final = 15
"""lines of a failure; a remedy and its command are never cut"""
MOST_SITES: Final = 3
"""source lines of a failure"""
MOST_REASONS: Final = 2
"""clauses on one source line"""
HINTED: Final = {Kind.OUT_OF_MEMORY, Kind.OVER_BUDGET}
"""failures that every hint helps with; a change has a cause, and needs the hints that explain it"""


REASON_INDENT: Final = " " * 14
"""before a clause, which stands below its line's amount"""
_AmountRow = tuple[str, str, Sequence[str], Sequence[str]]
"""bytes, category, the source line in words, ever fewer of them, and clauses that stand below"""


class FailureLine(NamedTuple):
    """A line of a failure."""

    text: str
    style: Literal["headline", "command", ""] = ""


def brief_failures(
    results: Sequence[Result], *, width: int = 80, ascii_only: bool = False
) -> list[FailureLine]:
    """Return the lines of one test's failures, its parts' first; none where nothing failed."""
    failed = sorted(
        (result for result in results if result.verdict.failed),
        key=lambda result: not result.part,
    )
    lines: list[FailureLine] = []
    for index, result in enumerate(failed):
        # A command that accepts the whole test accepts its parts: it stands below the last.
        command = result.verdict.command
        repeated = any(command == later.verdict.command for later in failed[index + 1 :])
        # So does the snapshot, which is of the whole test.
        last = index == len(failed) - 1
        shown = result if last else replace(result, snapshot="")
        lines += _brief_lines(shown, width, next_step=not (command and repeated))
    return [line._replace(text=encodable(line.text, ascii_only=ascii_only)) for line in lines]


def _brief_lines(result: Result, width: int, *, next_step: bool) -> list[FailureLine]:
    verdict = result.verdict
    part = f"part {result.part}: " if result.part else ""
    head = wrapped("", f"{part}{_headline(result)}", width).splitlines()
    causes = _cause_lines(result, width)
    ending = list(_next_lines(result, width)) if next_step else []
    hints = hints_of(result)
    if verdict.kind not in HINTED:
        hints = [hint for hint in hints if STILL_HELD in hint]
    notes = list(verdict.notes)
    if any(FRESH in hint for hint in hints):  # the hint says the same, with its bytes
        notes = [note for note in notes if not note.startswith(FRESH)]
    paragraphs = [wrapped("note: ", note, width).splitlines() for note in notes]
    paragraphs += [wrapped("hint: ", hint, width).splitlines() for hint in hints]
    # The first cause is always shown, and one line is left to say that more is known.
    reasons = takewhile(lambda line: line.startswith(REASON_INDENT), causes[1:])
    first = len(causes[:1]) + sum(1 for _ in reasons)
    room = MOST_LINES - len(head) - first - len(ending) - 1
    shown: list[str] = []
    for lines in paragraphs:
        if len(shown) + len(lines) <= room:
            shown += lines
    causes = causes[: first + max(0, room - len(shown))]
    hidden = len(paragraphs) - sum(lines[0] in shown for lines in paragraphs)
    left_out = []
    if hidden:
        left_out.append("1 more note" if hidden == 1 else f"{hidden} more notes and hints")
    if result.measurement and result.measurement.attributions:
        left_out.append("all figures")
    if left_out:
        shown.append(f"({' and '.join(left_out)} with -v)")
    command = f"    {printable(verdict.command)}"
    return [
        *(FailureLine(line, "headline") for line in head),
        *(
            FailureLine(line, "command" if line == command else "")
            for line in (*causes, *shown, *ending)
        ),
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
    old, new = format_size(row.baseline or 0), format_size(row.measured)
    if old[-3:] == new[-3:]:  # one unit is said once: "2014.44 -> 2264.44 MiB"
        old = old.rpartition(" ")[0]
    return (
        f"{verdict.kind}: {row.title}{device} grew by {format_size(row.difference or 0)}{share}: "
        f"{old} -> {new}, tolerance {format_size(row.allowance or 0)}"
    )


def _cause_lines(result: Result, width: int) -> list[str]:
    """Return the source lines that grew, or that hold most where a limit was met."""
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
        return [*request, *_amount_lines(rows, width)]
    sites = measurement.stayed.sites if measurement and measurement.stayed else ()
    if len(sites) < 2:  # noqa: PLR2004 - the headline names the only one
        return []
    return [
        f"  {format_size(site.nbytes)}  {printable(site_name(site))}" for site in sites[:MOST_SITES]
    ]


def _without_steps(reason: str) -> str:
    return reason.partition(", of step")[0]


def _amount_lines(rows: Sequence[_AmountRow], width: int) -> list[str]:
    """Return a line for each source line, its code as far as it fits, and its reasons below it."""
    amount_width, category_width = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    lines = []
    told: set[str] = set()
    for amount, category, places, reasons in rows:
        head = f"  {amount:>{amount_width}}  {category:<{category_width}}  ".rstrip(" ") + "  "
        line = next(
            (line for words in places if columns(line := f"{head}{printable(words)}") <= width),
            "",
        )
        lines.append(line.rstrip() or f"{head}{printable(places[-1])}"[: width - 4] + " ...")
        if reasons and told.issuperset(map(_without_steps, reasons)):
            lines.append(f"{REASON_INDENT}kept by the same")
            continue
        for reason in reasons[:MOST_REASONS]:
            lines += wrapped(REASON_INDENT, reason, width).splitlines()
        told.update(map(_without_steps, reasons))
    return lines


def _next_lines(result: Result, width: int) -> Iterator[str]:
    """Yield the step's circumstances, and the remedy."""
    verdict = result.verdict
    circumstances = [
        "" if result.batch_size is None else f"batch size {result.batch_size}",
        f"rank {result.rank_label}" if result.rank_label else "",
        result.budget,
        f"on {result.device_key}",
    ]
    yield from wrapped("step: ", ", ".join(filter(None, circumstances)), width).splitlines()
    if result.snapshot:
        yield f"snapshot: {printable(result.snapshot)} (open it at {VIEWER})"
    if verdict.command:
        yield from wrapped(
            "next: ", verdict.remedy.removesuffix(verdict.command), width
        ).splitlines()
        yield f"    {printable(verdict.command)}"
    elif verdict.remedy:
        yield from wrapped("next: ", verdict.remedy, width).splitlines()


def repeated_lines(results: Iterable[Result], *, width: int = 80) -> dict[str, list[FailureLine]]:
    """Return a line for each test that fails of the same cause as an earlier one, by nodeid."""
    lines: dict[str, list[FailureLine]] = {}
    for cause in shared_causes(results):
        first, *later = cause.results
        for result in later:
            sentence = f"{result.verdict.kind}: same cause as {first.nodeid}: {cause.place}"
            lines[result.nodeid] = [
                FailureLine(line, "headline") for line in wrapped("", sentence, width).splitlines()
            ]
    return lines
