"""The table at the end of a session: both peaks of every test, and what there is to note."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.judge.breakdown_diff import provenance_text
from pytest_gpumem.judge.result import hints_of
from pytest_gpumem.judge.toolchain_change import tests_text
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.text import columns, drawn, encodable, printable, shortened, wrapped
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import FigureName
    from pytest_gpumem.measurement import Measurement

FEW_ROWS = 25
"""results that are all listed without being asked for; of more, those that are not within"""
LEAST_NAME = 12
"""columns that a test's name keeps, however narrow the terminal"""
MOST_NOTES = 10
"""notes below the table"""

_TITLES = ("test", "allocated", "reserved", "change", "budget", "verdict")
_DETAIL_TITLES = ("test", "held before", "retained", "segments", "retries", "device", "outside")


def summary_table(
    results: Sequence[Result], verbosity: int = 0, width: int = 80, *, ascii_only: bool = False
) -> str:
    """Return the table for the end of the session; "" where there is nothing to show.

    Args:
        results: of every test, in the order to show them in.
        verbosity: below 0 nothing, 0 every test or, of more than ``FEW_ROWS``, those that are not
            within, 1 every test and hints, 2 also what was held before and after, and what it was
            measured with.
        width: columns of the terminal; long test names lose their beginning to fit.
        ascii_only: use no other characters.
    """
    chosen = list(results)
    if verbosity == 0 and len(chosen) > FEW_ROWS:
        chosen = [it for it in chosen if it.verdict.kind is not Kind.WITHIN]
    if verbosity < 0 or not chosen:
        return ""
    groups = _grouped(chosen)
    title = _title(groups, len(chosen), len(results))
    blocks = [wrapped("", title, width), named_table(_TITLES, _rows(groups, _summary_row), width)]
    if verbosity > 1:
        blocks += [
            "Held by others and retained, in MiB",
            named_table(_DETAIL_TITLES, _rows(groups, _detail_row), width),
            "\n".join(_seen_by(chosen, width)),
        ]
        blocks.append("\n".join(_made_with(chosen, width)))
    passed = [it for it in chosen if not it.verdict.failed]  # a failure has a section of its own
    lines = list(_counted("note", (note for it in passed for note in it.verdict.notes), width))
    if verbosity > 0:
        lines += _counted("hint", (hint for it in passed for hint in hints_of(it)), width)
    blocks.append("\n".join(lines))
    return encodable("\n\n".join(filter(None, blocks)), ascii_only=ascii_only)


class _Group(NamedTuple):
    """The results of one file on one device."""

    module: str
    device_key: str
    results: list[Result]


def _grouped(results: Sequence[Result]) -> list[_Group]:
    """Return the results by file and device, in the order of their first."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.module, result.device_key), []).append(result)
    return [_Group(module, key, found) for (module, key), found in groups.items()]


def _title(groups: Sequence[_Group], shown: int, number: int) -> str:
    modules, keys = {it.module for it in groups}, {it.device_key for it in groups}
    parts = [
        "Peak memory in MiB",
        f" on {keys.pop()}" if len(keys) == 1 else "",
        f", {printable(modules.pop())}" if len(modules) == 1 else "",
        f" ({shown} of {number}, the others are within; -v lists them)" if shown < number else "",
    ]
    return "".join(parts)


def _rows(
    groups: Sequence[_Group], cells: Callable[[Result], tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return a row for each result; above each group its file and device, where they differ."""
    several_modules = len({it.module for it in groups}) > 1
    several_devices = len({it.device_key for it in groups}) > 1
    rows: list[tuple[str, ...]] = []
    for group in groups:
        heads = [
            printable(group.module) if several_modules else "",
            f"on {group.device_key}" if several_devices else "",
        ]
        head = " ".join(filter(None, heads))
        whole = ""
        if head:
            rows.append((head,))
        for result in group.results:
            inside = bool(result.part) and result.nodeid == whole
            whole = whole if result.part else result.nodeid
            name = f"({result.part})" if inside else result.name.removeprefix(f"{group.module}::")
            indent = "  " * (bool(head) + inside)
            rows.append((f"{indent}{printable(name)}", *cells(result)))
    return rows


def named_table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table without empty columns, with names cut until it fits the width.

    A row of one cell is the head of those below it: a line of its own, across all columns.
    """
    full = [row for row in rows if len(row) > 1]
    kept = [i for i in range(len(titles)) if any(row[i] for row in full)]
    lines = [[row[i] for i in kept] for row in (titles, *full)]
    others = list(zip(*lines, strict=True))[1:]
    room = max(width - sum(2 + max(map(columns, column)) for column in others), LEAST_NAME)
    lines = [[_cut(name, room), *cells] for name, *cells in lines]
    left = {"test", "verdict", "peak"}
    drawn_lines = iter(
        drawn(lines, ["left" if title in left else "right" for title in lines[0]]).splitlines()
    )
    text = [next(drawn_lines), next(drawn_lines)]
    text += [shortened(row[0], width) if len(row) == 1 else next(drawn_lines) for row in rows]
    return "\n".join(text)


def _cut(name: str, room: int) -> str:
    """Return a name cut at its beginning, its indent kept."""
    bare = name.lstrip(" ")
    indent = name[: len(name) - len(bare)]
    return indent + shortened(bare, max(room - len(indent), 1))


def _summary_row(result: Result) -> tuple[str, ...]:
    return (
        *(taken(result.measurement) if result.measurement else ("", "")),
        change(result),
        budget_use(result),
        f"{result.verdict.kind}{' (xfail)' if result.expected else ''}",
    )


def taken(measurement: Measurement) -> tuple[str, str]:
    """Return both peaks; of a step that ran out of memory what it needs, or ">" what it got."""
    oom, more = measurement.out_of_memory, ""
    allocated, reserved = measurement.peak_allocated, measurement.peak_reserved
    if oom and oom.needed:
        allocated, reserved = oom.needed.allocated, oom.needed.reserved
    elif oom:
        more = ">"
    return f"{more}{_mib(allocated)}", f"{more}{_mib(reserved)}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f}"


_MARKS: dict[FigureName, str] = {
    "allocated": "",
    "reserved": " res.",
    "per sample": " a sample",
    "fixed": " fixed",
}


def change(result: Result) -> str:
    """Return the lead's difference from its baseline, in MiB; "new" or "n/a" without one."""
    lead = result.lead
    if lead is None or lead.difference is None:
        return "new" if result.verdict.kind is Kind.NO_BASELINE else "n/a"
    text = f"{lead.difference / MIB:+.2f}" if lead.difference else "0"
    return f"{text}{_MARKS[lead.peak]}"


def budget_use(result: Result) -> str:
    """Return how much of its tightest budget a test used, never rounded across the limit."""
    budgeted = [(it.measured, it.budget) for it in result.verdict.comparisons if it.budget]
    if not budgeted:
        return ">100%" if result.verdict.kind is Kind.OUT_OF_MEMORY else ""
    measured, budget = max(budgeted, key=lambda pair: Fraction(*pair))
    percent = measured * 100 // budget if measured <= budget else -(-measured * 100 // budget)
    return f"{percent}%"


def _detail_row(result: Result) -> tuple[str, ...]:
    measurement = result.measurement
    if measurement is None:
        return ("",) * (len(_DETAIL_TITLES) - 1)
    held, retained = (
        " + ".join(_mib(peak.allocated) for peak in peaks)
        for peaks in (measurement.held, measurement.retained)
    )
    use = measurement.device_use
    device, outside = (
        " + ".join(_mib(getattr(it, name)) for it in use) for name in ("peak", "outside")
    )
    counts = (str(measurement.segments), str(measurement.alloc_retries))
    return (held, retained, *counts, device, outside)


def _seen_by(results: Sequence[Result], width: int) -> Iterator[str]:
    """Yield what the columns about the device are, and where their figures are from."""
    found = {
        f"{it.source}, every {it.every_ms} ms" if it.every_ms else it.source
        for result in results
        if result.measurement
        for it in result.measurement.device_use
    }
    for source in sorted(found):
        text = (
            "what nvidia-smi shows at most, and what came during the step besides PyTorch's "
            f"allocator ({source})"
        )
        yield wrapped("device, outside: ", text, width)


def _made_with(results: Sequence[Result], width: int) -> Iterator[str]:
    """Yield a line for each different provenance."""
    made = Counter(it.measurement.provenance for it in results if it.measurement)
    for provenance, number in made.items():
        tests = f" ({tests_text(number)})" if len(made) > 1 else ""
        yield wrapped("made with: ", f"{provenance_text(provenance)}{tests}", width)


def _counted(kind: str, sentences: Iterable[str], width: int) -> Iterator[str]:
    """Yield notes or hints, each once, with the number of tests that have it."""
    found = Counter(sentences)
    for text, number in found.most_common(MOST_NOTES):
        yield wrapped(f"{kind}: ", f"{text} ({tests_text(number)})", width)
    if len(found) > MOST_NOTES:
        yield f"{kind}: and {len(found) - MOST_NOTES} more kinds of {kind}s"
