"""The report on the terminal: each function returns text without a newline at its end.

All of it fits 80 columns where names allow. Whatever comes from outside (test names, parts, source
lines, error texts) is shown with its control characters escaped.
"""

from __future__ import annotations

import posixpath
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_gpumem.attribution.optimizer_watch import FRESH
from pytest_gpumem.attribution.snapshots import VIEWER
from pytest_gpumem.judge.breakdown_diff import Row, category_rows, site_name, site_rows
from pytest_gpumem.judge.result import count_kinds, hints_of
from pytest_gpumem.judge.verdict import UPDATE_OPTION, Kind
from pytest_gpumem.report.held_to import compared, is_news
from pytest_gpumem.report.text import (
    columns,
    drawn,
    encodable,
    printable,
    shortened,
    size,
    wrapped,
)
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Comparison
    from pytest_gpumem.measurement import DeviceInfo, OutOfMemory

FEW = 3
"""tests or files that a command still names one by one"""
LONG = 120
"""characters that a command that names them has at most, where there is a shorter one"""
LEAST_SITE = 24
"""columns that the name of a source line keeps, however narrow the terminal"""
MOST_ROWS = 10
"""rows of a table that says where a peak comes from"""


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


def failures(
    results: Sequence[Result], *, width: int = 80, most_rows: int | None = MOST_ROWS
) -> str:
    """Return the sections of one test's failures: its parts first, which tell where.

    A command that is the next step for several of them stands at the end of the last, and so does
    their snapshot.
    """
    failed = sorted((it for it in results if it.verdict.failed), key=lambda it: not it.part)
    texts = []
    for index, result in enumerate(failed):
        command = result.verdict.command
        again = command and any(command == it.verdict.command for it in failed[index + 1 :])
        quiet = replace(result.verdict, command="", remedy="") if again else result.verdict
        snapshot = "" if failed[index + 1 :] else result.snapshot
        shown = replace(result, verdict=quiet, snapshot=snapshot)
        texts.append(failure(shown, width=width, most_rows=most_rows))
    return "\n\n".join(texts)


def failure(
    result: Result, *, width: int = 80, ascii_only: bool = False, most_rows: int | None = MOST_ROWS
) -> str:
    """Return the section of one failed test: what is wrong, the figures, what to do about it."""
    verdict = result.verdict
    oom = result.measurement.out_of_memory if result.measurement else None
    blocks = [
        [wrapped("", verdict.headline, width)],
        [tabulate(shortage_rows(result, oom), tablefmt="plain", disable_numparse=True)]
        if oom
        else [],
        [_comparison_table(verdict.comparisons, "needed" if oom else "measured")],
        *explanation(result, width, most_rows),
        list(_advice(result, width)),
    ]
    text = "\n\n".join("\n".join(lines) for lines in blocks if any(lines))
    return encodable(text, ascii_only=ascii_only)


def counts(results: Sequence[Result]) -> str:
    """Return one line that says how many results are of each kind; "" where there are none."""
    names = {Kind.NO_BASELINE: "without baseline"}
    wanted = count_kinds(it for it in results if it.expected)
    parts = [
        f"{n} {names.get(kind, kind)}"
        + (f" ({wanted[kind]} as expected)" if kind in wanted else "")
        for kind, n in count_kinds(results).items()
    ]
    return f"gpumem: {', '.join(parts)}" if parts else ""


def compared_lines(results: Sequence[Result], *, width: int = 80) -> list[str]:
    """Return lines that say, of each device, what was held to baselines and what not and why."""
    found = compared(results) if is_news(results) else {}
    return [wrapped("gpumem: ", f"on {key}: {text}", width) for key, text in found.items()]


def snapshots(results: Sequence[Result], *, width: int = 80) -> list[str]:
    """Return lines that say where snapshots are, and why others could not be written."""
    files = list(dict.fromkeys(it.snapshot for it in results if it.snapshot))
    errors = list(dict.fromkeys(it.snapshot_error for it in results if it.snapshot_error))
    lines = []
    if files:
        number = "1 snapshot" if len(files) == 1 else f"{len(files)} snapshots"
        lines.append(f"gpumem: {number} in {printable(posixpath.dirname(files[0]) or '.')}")
    lines += [wrapped("gpumem: no snapshot: ", text, width) for text in errors[:FEW]]
    if len(errors) > FEW:
        lines.append(f"gpumem: and {len(errors) - FEW} more snapshots could not be written")
    return lines


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


def explanation(result: Result, width: int, most_rows: int | None) -> list[list[str]]:
    """Return two tables, of what a peak consists of and which lines it comes from.

    They are of the device whose peak grew most, else of the fullest. Of a leak there is one, of
    what stayed.
    """
    if result.verdict.kind is Kind.LEAKED:
        return _stayed(result, width, most_rows)
    attributions = result.measurement.attributions if result.measurement else ()
    if not attributions:
        return []
    device = result.lead.device if result.lead else 0
    device = device if device < len(attributions) else 0
    now = attributions[device].breakdown
    kept = result.breakdowns_before
    before = kept[device] if device < len(kept) else None
    where = f", device {device}" if len(attributions) > 1 else ""
    tables = [
        rows_table(f"at the peak{where}", category_rows(now, before), width, most_rows),
        rows_table("allocated by", site_rows(now, before), width, most_rows),
    ]
    notes = [wrapped("note: ", note, width) for note in attributions[device].notes]
    return [[table] for table in tables if table] + [[note] for note in notes]


def _stayed(result: Result, width: int, most_rows: int | None) -> list[list[str]]:
    """Return a table of the lines that allocated what a leak consists of."""
    stayed = result.measurement.stayed if result.measurement else None
    sites = stayed.sites if stayed else ()
    rows = [Row(site_name(it), it.nbytes, None, it, it.blocks) for it in sites]
    table = rows_table("stayed, allocated by", rows, width, most_rows)
    return [[table]] if table else []


def rows_table(title: str, rows: Sequence[Row], width: int, most: int | None) -> str:
    """Return rows of categories or sites as a table, the first ``most`` of them."""
    shown = rows[:most]
    if not shown:
        return ""
    compared = any(row.before is not None for row in shown)
    titles = [title, "baseline", "now", "difference"] if compared else [title, "now"]
    table = [titles]
    for row in shown:
        difference = "" if row.difference is None else _difference(row.difference)
        sizes = [size(row.before), size(row.now), difference]
        table.append([printable(row.name), *(sizes if compared else sizes[1:2])])
    align = ["left", *("right" for _ in titles[1:])]
    if any(row.site for row in shown):
        table, align = _with_subjects(table, shown, width), [*align, "left"]
    more = len(rows) - len(shown)
    text = drawn(table, align)
    return f"{text}\n({more} more with -vv)" if more else text


def _with_subjects(table: list[list[str]], rows: Sequence[Row], width: int) -> list[list[str]]:
    """Add what each site allocated, as much of it as the width allows."""
    sizes = sum(2 + max(map(columns, column)) for column in list(zip(*table, strict=True))[1:])
    names = max(columns(row[0]) for row in table)
    subjects = ["of", *map(_subject, rows)]
    if names + sizes + 2 + max(map(columns, subjects)) > width:
        subjects = ["of", *(row.site.category if row.site else "" for row in rows)]
    room = max(width - sizes - 2 - max(map(columns, subjects)), LEAST_SITE)
    return [
        [_short_site(name, room), *cells, subject]
        for (name, *cells), subject in zip(table, subjects, strict=True)
    ]


def _short_site(name: str, room: int) -> str:
    """Return a site's name that fits: without its folders, and if need be without its beginning."""
    return shortened(name if columns(name) <= room else name.rpartition("/")[2], room)


def _subject(row: Row) -> str:
    """Return what a site allocated: "activations, 12 blocks, GPT2.h.*.attn"."""
    if row.site is None:
        return ""
    blocks = "" if not row.blocks else "1 block" if row.blocks == 1 else f"{row.blocks} blocks"
    return printable(", ".join(filter(None, [row.site.category, blocks, row.site.module])))


def _advice(result: Result, width: int) -> Iterator[str]:
    verdict = result.verdict
    if verdict.kind is not Kind.OUT_OF_MEMORY:
        yield wrapped("step: ", circumstances(result), width)
    hints = hints_of(result)
    exact = any(FRESH in hint for hint in hints)  # it says more than the note does
    for note in verdict.notes:
        if not (exact and note.startswith(FRESH)):
            yield wrapped("note: ", note, width)
    for hint in hints:
        yield wrapped("hint: ", hint, width)
    if result.snapshot:
        yield f"snapshot: {printable(result.snapshot)} (open it at {VIEWER})"
    if verdict.command:
        yield wrapped("next: ", verdict.remedy.removesuffix(verdict.command), width)
        yield f"    {printable(verdict.command)}"
    elif verdict.remedy:
        yield wrapped("next: ", verdict.remedy, width)


def circumstances(result: Result) -> str:
    """Return in what circumstances a step was measured; "part forward, batch size 32 ..."."""
    parts = [
        f"part {result.part}" if result.part else "",
        "" if result.batch_size is None else f"batch size {result.batch_size}",
        f"rank {result.ranks}" if result.ranks else "",
        result.budget,
        f"on {result.device_key}",
    ]
    return ", ".join(filter(None, parts))


def shortage_rows(result: Result, oom: OutOfMemory) -> list[tuple[str, str]]:
    """Return what there is to say of an out-of-memory error: titles and texts."""
    several = result.measurement is not None and len(result.measurement.peaks) > 1
    rows = [
        ("part", result.part),
        ("batch size", str(result.batch_size or "")),
        ("rank", result.ranks),
        ("budget", result.budget or "none but the device's memory"),
        ("device", result.device_key + (f", number {oom.device_index}" if several else "")),
        ("held", f"{format_size(oom.allocated)} allocated, {format_size(oom.reserved)} reserved"),
        ("asked for", "" if oom.requested is None else f"{format_size(oom.requested)} more"),
        ("at", oom.site),
    ]
    return [(title, printable(text)) for title, text in rows if text]


def _comparison_table(comparisons: Sequence[Comparison], measured: str) -> str:
    several = len({row.device for row in comparisons}) > 1
    table = [
        [
            row.title + (f", device {row.device}" if several else ""),
            size(row.budget),
            size(row.baseline),
            size(row.measured),
            "" if row.difference is None else _difference(row.difference),
        ]
        for row in comparisons
    ]
    titles = ["", "budget", "baseline", measured, "difference"]
    kept = [i for i in range(len(titles)) if any(row[i] for row in table)]
    rows = [[row[i] for i in kept] for row in (titles, *table)]
    return drawn(rows, ["left", *("right" for _ in kept[1:])]) if table else ""


def _difference(nbytes: int) -> str:
    return format_size(nbytes, signed=nbytes != 0)


def _wants_baseline(result: Result) -> bool:
    """Whether a new baseline is what the verdict asks for, other than for a regression."""
    return bool(result.verdict.command) and result.verdict.kind is not Kind.REGRESSED


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
