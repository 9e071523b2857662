"""The report on the terminal: each function returns text without a newline at its end.

All of it fits 80 columns where names allow. Whatever comes from outside (test names, parts, source
lines, error texts) is shown with its control characters escaped.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
import unicodedata
from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_gpumem.report.model import count_kinds
from pytest_gpumem.sizes import MIB, format_size
from pytest_gpumem.verdict import PEAKS, UPDATE_OPTION, Kind, provenance_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.baseline import EntryUpdate, UpdateSummary
    from pytest_gpumem.records import BaselineEntry, DeviceInfo, Measurement, OutOfMemory
    from pytest_gpumem.report.model import Result
    from pytest_gpumem.verdict import Comparison

LEAST_NAME = 12
"""columns that a test's name keeps, however narrow the terminal"""
FEW = 3
"""tests or files that a command still names one by one"""
LONG = 120
"""characters that a command that names them has at most, where there is a shorter one"""
FIRST_COMBINING = "\u0300"
"""the first character that does not take one column"""
MOST_NOTES = 10
"""notes below the table"""
MOST_UPDATES = 20
"""entries that a summary of updates lists, of each group"""

_TITLES = ("test", "device", "allocated", "reserved", "change", "budget", "verdict")
_DETAIL_TITLES = ("test", "held before", "retained", "segments", "retries")


def header(device: DeviceInfo | None, *, driver: str = "", reason: str = "") -> str:
    """Return the lines for the head of the session.

    Args:
        device: what marked tests run on; None if there is nothing.
        driver: the NVIDIA driver's version, of a real GPU.
        reason: why there is no device.
    """
    if device is None:
        return f"gpumem: no device, marked tests are skipped: {printable(reason)}"
    major, minor = device.capability
    figures = f"{format_size(device.total_memory)}, capability {major}.{minor}"
    text = f"{printable(device.name)} ({figures}, {device.sm_count} SMs)"
    if device.kind == "virtual":
        predicted = "gpumem: memory is predicted, kernels do not run"
        return f"gpumem: virtual GPU {text}\n{predicted}"
    return f"gpumem: {text}" + (f", driver {printable(driver)}" if driver else "")


def failure(result: Result, *, width: int = 80, ascii_only: bool = False) -> str:
    """Return the section of one failed test: what is wrong, the figures, what to do about it."""
    verdict = result.verdict
    oom = result.measurement.out_of_memory if result.measurement else None
    blocks = [
        [_wrapped("", verdict.headline, width)],
        [tabulate(_shortage_rows(result, oom), tablefmt="plain", disable_numparse=True)]
        if oom
        else [],
        [_comparison_table(verdict.comparisons, "needed" if oom else "measured")],
        list(_advice(result, width)),
    ]
    text = "\n\n".join("\n".join(lines) for lines in blocks if any(lines))
    return _encodable(text, ascii_only=ascii_only)


def summary_table(
    results: Sequence[Result], verbosity: int = 0, width: int = 80, *, ascii_only: bool = False
) -> str:
    """Return the table for the end of the session; "" where there is nothing to show.

    Args:
        results: of every test, in the order to show them in.
        verbosity: below 0 nothing, 0 what is not simply within, 1 every test, 2 also what was held
            before and after, and what it was measured with.
        width: columns of the terminal; long test names lose their beginning to fit.
        ascii_only: use no other characters.
    """
    chosen = [it for it in results if verbosity > 0 or it.verdict.kind is not Kind.WITHIN]
    if verbosity < 0 or not chosen:
        return ""
    keys = {_device_key(it) for it in chosen}
    device = f"on {keys.pop()}, " if len(keys) == 1 else ""
    rows = [_summary_row(it, with_device=not device) for it in chosen]
    blocks = [f"Peak memory {device}in MiB", _named_table(_TITLES, rows, width)]
    if verbosity > 1:
        details = [_detail_row(it, it.measurement) for it in chosen if it.measurement]
        blocks += [
            "Held by others and retained, in MiB",
            _named_table(_DETAIL_TITLES, details, width),
        ]
        blocks.append("\n".join(_made_with(chosen, width)))
    blocks.append("\n".join(_grouped_notes(chosen, width)))
    return _encodable("\n\n".join(filter(None, blocks)), ascii_only=ascii_only)


def counts(results: Sequence[Result]) -> str:
    """Return one line that says how many results are of each kind; "" where there are none."""
    names = {Kind.NO_BASELINE: "without baseline"}
    parts = [f"{n} {names.get(kind, kind)}" for kind, n in count_kinds(results).items()]
    return f"gpumem: {', '.join(parts)}" if parts else ""


def next_command(results: Sequence[Result], *, updating: bool = False) -> str | None:
    """Return the command that records what has no baseline to be held to; None if nothing needs it.

    It never covers a test that regressed, for that is a decision of its own.
    """
    wanting = list(dict.fromkeys(it.nodeid for it in results if _wants_baseline(it)))
    if updating or not wanting:
        return None
    regressed = {it.nodeid for it in results if it.verdict.kind is Kind.REGRESSED}
    spared = regressed | {_file(nodeid) for nodeid in regressed}
    files = list(dict.fromkeys(map(_file, wanting)))
    for targets, longest in ((wanting, LONG), (files, LONG), (wanting, sys.maxsize)):
        command = printable(shlex.join(["pytest", *targets, UPDATE_OPTION]))
        if len(targets) <= FEW and len(command) <= longest and spared.isdisjoint(targets):
            return command
    return None if regressed else f"pytest {UPDATE_OPTION}"


def update_summary(summary: UpdateSummary, *, width: int = 80, ascii_only: bool = False) -> str:
    """Return what became of the baselines, changes first, with their differences."""
    groups = {
        name: getattr(summary, name) for name in ("created", "changed", "unchanged", "removed")
    }
    parts = [f"{len(entries)} {name}" for name, entries in groups.items() if entries]
    if summary.errors:
        number = len(summary.errors)
        parts.append("1 error" if number == 1 else f"{number} errors")
    lines = [f"gpumem: baselines: {', '.join(parts) or 'nothing to write'}"]
    lines += [_wrapped("error    ", str(error), width) for error in summary.errors]
    for name in ("changed", "created", "removed"):
        lines += _update_lines(name, groups[name])
    return _encodable("\n".join(lines), ascii_only=ascii_only)


def printable(text: str) -> str:
    """Return text on one line, with what a terminal would obey rather than show escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(name: str, room: int) -> str:
    """Return a name that takes at most so many columns: its end, which tells most."""
    if _columns(name) <= room:
        return name
    name = name[-room:]
    while name and _columns(name) >= room:
        name = name[1:]
    return f"…{name}"


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    special = [c for c in text if c >= FIRST_COMBINING]
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in special)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in special)


def _encodable(text: str, *, ascii_only: bool) -> str:
    if not ascii_only:
        return text
    return text.replace("…", "...").encode("ascii", "backslashreplace").decode()


def _wrapped(label: str, text: str, width: int) -> str:
    """Return a paragraph behind a label; a word that is too long for a line stays whole."""
    return textwrap.fill(
        printable(text),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _advice(result: Result, width: int) -> Iterator[str]:
    verdict = result.verdict
    if verdict.kind is not Kind.OUT_OF_MEMORY:
        yield _wrapped("step: ", _circumstances(result), width)
    for note in verdict.notes:
        yield _wrapped("note: ", note, width)
    if verdict.command:
        yield _wrapped("next: ", verdict.remedy.removesuffix(verdict.command), width)
        yield f"    {printable(verdict.command)}"
    elif verdict.remedy:
        yield _wrapped("next: ", verdict.remedy, width)


def _circumstances(result: Result) -> str:
    """Return in what circumstances a step was measured."""
    parts = [
        f"part {result.part}" if result.part else "",
        "" if result.batch_size is None else f"batch size {result.batch_size}",
        result.budget,
        f"on {_device_key(result)}",
    ]
    return ", ".join(filter(None, parts))


def _shortage_rows(result: Result, oom: OutOfMemory) -> list[tuple[str, str]]:
    several = result.measurement is not None and len(result.measurement.peaks) > 1
    rows = [
        ("part", result.part),
        ("batch size", str(result.batch_size or "")),
        ("budget", result.budget or "none but the device's memory"),
        ("device", _device_key(result) + (f", number {oom.device_index}" if several else "")),
        ("held", f"{format_size(oom.allocated)} allocated, {format_size(oom.reserved)} reserved"),
        ("asked for", "" if oom.requested is None else f"{format_size(oom.requested)} more"),
        ("at", oom.site),
    ]
    return [(title, printable(text)) for title, text in rows if text]


def _comparison_table(comparisons: Sequence[Comparison], measured: str) -> str:
    several = len({row.device for row in comparisons}) > 1
    table = [
        [
            f"peak {row.peak}" + (f", device {row.device}" if several else ""),
            _size(row.budget),
            _size(row.baseline),
            _size(row.measured),
            "" if row.difference is None else _difference(row.difference),
        ]
        for row in comparisons
    ]
    titles = ["", "budget", "baseline", measured, "difference"]
    kept = [i for i in range(len(titles)) if any(row[i] for row in table)]
    rows = [[row[i] for i in kept] for row in (titles, *table)]
    return _drawn(rows, ["left", *("right" for _ in kept[1:])]) if table else ""


def _difference(nbytes: int) -> str:
    return format_size(nbytes, signed=nbytes != 0)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_size(nbytes)


def _drawn(rows: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    """Return a table whose first row is its head; tabulate's own heads are two columns wider."""
    rule = ["-" * max(map(_columns, column)) for column in zip(*rows, strict=True)]
    text = tabulate(
        [rows[0], rule, *rows[1:]], tablefmt="plain", disable_numparse=True, colalign=align
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def _named_table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table without empty columns, with the names of tests cut until it fits the width."""
    if not rows:
        return ""
    kept = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    lines = [[row[i] for i in kept] for row in (titles, *rows)]
    others = list(zip(*lines, strict=True))[1:]
    room = width - sum(2 + max(map(_columns, column)) for column in others)
    lines = [[shortened(name, max(room, LEAST_NAME)), *cells] for name, *cells in lines]
    left = {"test", "device", "verdict"}
    return _drawn(lines, ["left" if title in left else "right" for title in lines[0]])


def _summary_row(result: Result, *, with_device: bool) -> tuple[str, ...]:
    return (
        printable(result.name),
        _device_key(result) if with_device else "",
        *(_taken(result.measurement) if result.measurement else ("", "")),
        _change(result),
        _budget_use(result),
        str(result.verdict.kind),
    )


def _taken(measurement: Measurement) -> tuple[str, str]:
    """Return both peaks; of a step that ran out of memory what it needs, or ">" what it got."""
    oom, more = measurement.out_of_memory, ""
    allocated, reserved = measurement.peak_allocated, measurement.peak_reserved
    if oom and oom.needed:
        allocated, reserved = oom.needed.allocated, oom.needed.reserved
    elif oom:
        more = ">"
    return f"{more}{_mib(allocated)}", f"{more}{_mib(reserved)}"


def _device_key(result: Result) -> str:
    return result.measurement.device.key if result.measurement else "no device"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f}"


def _change(result: Result) -> str:
    """Return the lead's difference from its baseline, in MiB; "new" or "n/a" without one."""
    lead = result.lead
    if lead is None or lead.difference is None:
        return "new" if result.verdict.kind is Kind.NO_BASELINE else "n/a"
    text = f"{lead.difference / MIB:+.2f}" if lead.difference else "0"
    return text if lead.peak == "allocated" else f"{text} res."


def _budget_use(result: Result) -> str:
    """Return how much of its tightest budget a test used, never rounded across the limit."""
    budgeted = [(it.measured, it.budget) for it in result.verdict.comparisons if it.budget]
    if not budgeted:
        return ">100%" if result.verdict.kind is Kind.OUT_OF_MEMORY else ""
    measured, budget = max(budgeted, key=lambda pair: Fraction(*pair))
    percent = measured * 100 // budget if measured <= budget else -(-measured * 100 // budget)
    return f"{percent}%"


def _detail_row(result: Result, measurement: Measurement) -> tuple[str, ...]:
    held, retained = (
        " + ".join(_mib(peak.allocated) for peak in peaks)
        for peaks in (measurement.held, measurement.retained)
    )
    counters = str(measurement.segments), str(measurement.alloc_retries)
    return (printable(result.name), held, retained, *counters)


def _made_with(results: Sequence[Result], width: int) -> Iterator[str]:
    """Yield a line for each different provenance."""
    made = Counter(it.measurement.provenance for it in results if it.measurement)
    for provenance, number in made.items():
        tests = f" ({_tests(number)})" if len(made) > 1 else ""
        yield _wrapped("made with: ", f"{provenance_text(provenance)}{tests}", width)


def _grouped_notes(results: Sequence[Result], width: int) -> Iterator[str]:
    """Yield the notes of tests that passed, each once; a failure has a section of its own."""
    notes = Counter(n for it in results if not it.verdict.failed for n in it.verdict.notes)
    for note, number in notes.most_common(MOST_NOTES):
        yield _wrapped("note: ", f"{note} ({_tests(number)})", width)
    if len(notes) > MOST_NOTES:
        yield f"note: and {len(notes) - MOST_NOTES} more kinds of notes"


def _tests(number: int) -> str:
    return "1 test" if number == 1 else f"{number} tests"


def _wants_baseline(result: Result) -> bool:
    """Whether a new baseline is what the verdict asks for, other than for a regression."""
    return bool(result.verdict.command) and result.verdict.kind is not Kind.REGRESSED


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


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


def _move(old: int, new: int) -> str:
    if old == new:
        return f"{format_size(old)}, as before"
    return f"{format_size(old)} -> {format_size(new)} ({_difference(new - old)})"
