"""Merge several reports into one, or raise an error that names the obstacle."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.baselines.store import UpdateSummary
from pytest_gpumem.errors import ReportError
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.text import printable
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.baselines.paths import Key
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.report.json_report import SavedReport
    from pytest_gpumem.report.model import Origin

_GROUPS: Final = ("created", "changed", "unchanged", "removed", "errors", "files")
_DEVICE_OPTIONS: Final = ("--gpumem-device", "--gpumem-card", "--gpumem-cards")
"""options that distinguish the shards of one device from those of another"""
TOP: Final = "the top of the repository"
DELETE: Final = "pytest --collect-only --gpumem-stale=delete"
"""the command that deletes baselines without a test"""
MAX_NAMES: Final = 5
"""tests or shards to name in a sentence"""


@dataclass(frozen=True)
class Merged:
    """Several reports merged into one."""

    report: Report
    created: str
    """when the newest of the reports was written"""
    missing: str = ""
    """text on the shards without a report; "" if none is known to be missing"""
    stale: tuple[Key, ...] = ()
    """baselines whose tests no report has"""
    origin_names: tuple[str, ...] = ()
    """the name of each origin's report"""


def merge(
    reports: Sequence[tuple[str, SavedReport]], expect: int | None = None, accept: str = ""
) -> Merged:
    """Merge reports, keeping their order.

    A test that several reports have on one device, with the same figure, becomes one row; a report
    that is given twice, directly or as a copy, counts once.

    ``expect`` is the number of reports (None: as their shards say), ``accept`` the command that
    accepts the figures of all reports ("": each result keeps its own command).

    Raises:
        ReportError: they are from different commits or projects, or a test has two figures.
    """
    once: list[tuple[str, SavedReport]] = []
    for name, saved in reports:
        # Equal reports without results may still be different reports.
        if not any(name == shard or (saved.results and saved == same) for shard, same in once):
            once.append((name, saved))
    reports = once
    _require_one_project(reports)
    origins: list[Origin] = []
    names: list[str] = []
    rows: dict[tuple[str, str, str, str], tuple[str, Result]] = {}
    for name, saved in reports:
        first = len(origins)
        origins += saved.report.origins
        names += [name] * len(saved.report.origins)
        for result in saved.results:
            moved = replace(result, origin=result.origin + first) if first else result
            folder = origins[moved.origin].folder if moved.origin < len(origins) else ""
            key = folder, moved.device_key, moved.nodeid, moved.part
            if key in rows:
                moved = _one_of(*rows[key], name, moved)
            rows[key] = name, moved
    stale = stale_of(origins)
    missing = _missing(reports, expect)
    results = [result for _, result in rows.values()]
    if accept:
        results = [
            replace(result, verdict=replace(result.verdict, accept=accept))
            if result.verdict.accept
            else result
            for result in results
        ]
    updates = [saved.report.updates for _, saved in reports if saved.report.updates is not None]
    fates = {
        name: tuple(entry for update in updates for entry in getattr(update, name))
        for name in _GROUPS
    }
    devices = [part for _, saved in reports for part in saved.report.device.split("; ")]
    options: dict[str, list[str]] = {}
    for _, saved in reports:
        for name, value in saved.report.options.items():
            options.setdefault(name, []).append(value)
    report = Report(
        tuple(results),
        UpdateSummary(**fates) if updates else None,
        "; ".join(dict.fromkeys(filter(None, devices))),
        {name: ", ".join(dict.fromkeys(values)) for name, values in options.items()},
        tuple(_merged_remarks(reports, missing, stale)),
        origins=tuple(origins),
        own_outcomes=tuple(
            dict.fromkeys(each for _, saved in reports for each in saved.report.own_outcomes)
        ),
    )
    created = max((saved.created for _, saved in reports), default="")
    return Merged(report, created, missing, stale, tuple(names))


def stale_of(origins: Iterable[Origin]) -> tuple[Key, ...]:
    """Return the baselines whose tests no longer exist: no session collected them.

    Sessions that did not collect a file say nothing about its tests, unless the file does not
    exist.
    """
    stale = set()
    by_folder: dict[str, list[Origin]] = defaultdict(list)
    for origin in origins:
        by_folder[origin.folder].append(origin)
    for members in by_folder.values():
        complete = [
            (frozenset(origin.collected), frozenset(origin.unseen))
            for origin in members
            if not origin.partial
        ]
        for key in frozenset().union(*(unseen for _, unseen in complete)):
            if all(key in unseen for collected, unseen in complete if key.module in collected):
                stale.add(key)
    return tuple(sorted(stale, key=lambda key: (key.nodeid, key.device)))


def _require_one_project(reports: Sequence[tuple[str, SavedReport]]) -> None:
    first_name, first = "", None
    for name, saved in reports:
        for origin in saved.report.origins:
            if first is None:
                first_name, first = name, origin
            if origin.root != first.root:
                raise ReportError(
                    name,
                    f"is from another project: its root is {origin.root or TOP}, and the "
                    f"root of {first_name} is {first.root or TOP}",
                    "merge the reports of each project",
                )
            if origin.commit != first.commit:
                raise ReportError(
                    name,
                    f"is from commit {origin.commit[:12] or 'none'}, and {first_name} from "
                    f"{first.commit[:12] or 'none'}",
                    "merge the reports of one commit",
                )


def _one_of(first_name: str, first: Result, name: str, second: Result) -> Result:
    """Return the more informative of two reports' results of one test.

    Raises:
        ReportError: the results have different figures.
    """
    if _figures_of(first) != _figures_of(second):
        device = printable(first.device_key)
        raise ReportError(
            f"{first_name} and {name}",
            f"have two figures of {printable(first.name)} on {device}: {_in_words(first)} in "
            f"{first_name}, {_in_words(second)} in {name}",
            "leave out one of these reports, or run that test once",
        )

    def telling(result: Result) -> tuple[bool, bool, bool]:
        explained = bool(result.measurement and result.measurement.attributions)
        return result.outcome not in {"", "passed"}, result.verdict.failed, explained

    return second if telling(second) > telling(first) else first


def _figures_of(result: Result) -> tuple[object, ...]:
    measurement = result.measurement
    if measurement is None:
        return result.verdict.kind, None
    oom = measurement.out_of_memory
    needed = (oom.needed, oom.device_index) if oom is not None else None
    # The peaks of a step that ran out of memory are not comparable.
    peaks = measurement.peaks if oom is None else ()
    shape = (result.batch_size, result.world_size, result.rank)
    return shape, peaks, measurement.slope, measurement.largest, measurement.servers, needed


def _in_words(result: Result) -> str:
    measurement = result.measurement
    if measurement is None or measurement.out_of_memory is not None:
        return str(result.verdict.kind)
    allocated = format_size(measurement.peak_allocated)
    words = f"{allocated} allocated, {format_size(measurement.peak_reserved)} reserved"
    return words if result.batch_size is None else f"{words}, batch size {result.batch_size}"


def _missing(reports: Sequence[tuple[str, SavedReport]], expect: int | None) -> str:
    """Describe the shards without a report; "" if none is known to be missing."""
    groups: dict[tuple[tuple[str, ...], str, int], set[int]] = defaultdict(set)
    for _, saved in reports:
        device = tuple(saved.report.options.get(name, "") for name in _DEVICE_OPTIONS)
        for origin in saved.report.origins:
            if origin.shard is not None:
                groups[device, origin.folder, origin.shard.count].add(origin.shard.index)
    lost = []
    for (device, _, count), there in groups.items():
        numbers = [number for number in range(1, count + 1) if number not in there]
        if numbers:
            words = ", ".join(map(str, numbers[:MAX_NAMES]))
            words += f" and {len(numbers) - MAX_NAMES} more" if len(numbers) > MAX_NAMES else ""
            options = [
                f"{name}={value}"
                for name, value in zip(_DEVICE_OPTIONS, device, strict=True)
                if value
            ]
            where = f" with {' '.join(options)}" if len(groups) > 1 and options else ""
            shards = "shard" if len(numbers) == 1 else "shards"
            lost.append(f"{shards} {words} of {count}{where}")
    number = sum(max(1, len(saved.report.origins)) for _, saved in reports)
    if expect is not None and number < expect and not lost:
        lost.append(f"{expect - number} of {expect} reports")
    return "; ".join(lost)


def _merged_remarks(
    reports: Sequence[tuple[str, SavedReport]], missing: str, stale: Sequence[Key]
) -> list[str]:
    remarks = []
    if missing:
        remarks.append(f"missing: {missing}: their measurements are not in this report")
    for name, saved in reports:
        remarks += [
            f"{name}: the run did not finish: {origin.unfinished}"
            for origin in saved.report.origins
            if origin.unfinished
        ]
    if stale:
        names = [f"{key.nodeid} on {key.device}" for key in stale[:MAX_NAMES]]
        names += [f"{len(stale) - MAX_NAMES} more"] if len(stale) > MAX_NAMES else []
        have = "1 baseline has" if len(stale) == 1 else f"{len(stale)} baselines have"
        remarks.append(f"{have} no test any more ({DELETE} deletes them): {', '.join(names)}")
    remarks += [remark for _, saved in reports for remark in saved.report.remarks]
    return list(dict.fromkeys(remarks))
