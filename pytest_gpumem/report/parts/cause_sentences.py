"""Describe the cause of a failure in one line: the category and source line that grew most.

Failures with the same category, source line and code share one cause, and are reported together.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.breakdowns import site_name
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import Cause, Comparison
    from pytest_gpumem.measurement import Site

MIN_MEMBERS: Final = 3
"""least number of failures with one cause that are reported together"""

CauseKey = tuple[str, str, str, str]
"""category, file, function and code, which identify a line even if its number changed; for an edit,
its file and description"""


class SharedCause(NamedTuple):
    """Failures that share a cause."""

    cause: Cause
    """the cause of the first result"""
    results: tuple[Result, ...]

    @property
    def sentence(self) -> str:
        """The failures in words, without their number.

        "share model.py:29 (Tiny.forward): activations +250.00 MiB each"
        """
        categories = {result.verdict.causes[0].category for result in self.results}
        category = categories.pop() if len(categories) == 1 else "its tensors"
        amounts = sorted(result.verdict.causes[0].nbytes for result in self.results)
        smallest, largest = (format_size(amounts[index], signed=True) for index in (0, -1))
        growth = f"{smallest} each" if smallest == largest else f"{smallest} to {largest}"
        return f"share {self.place}: {category} {growth}"

    @property
    def place(self) -> str:
        """The source line, as "model.py:29 (Tiny.forward)", or its edit."""
        lead = self.results[0].verdict.lead
        if lead is not None and lead.kind == "edit":
            return lead.place
        return site_name(self.cause.site) if self.cause.site else ""


def short_cause(result: Result) -> str:
    """Describe a failure in one line: "+250.00 MiB (+12.4%): activations, model.py:29"."""
    verdict, measurement = result.verdict, result.measurement
    lead = result.leading_comparison
    part = f"part {result.part}: " if result.part else ""
    if verdict.kind is Kind.REGRESSED and lead is not None:
        cause = verdict.lead.sentence if verdict.lead else ""
        return f"{part}{change_words(lead)}{f': {cause}' if cause else ''}"
    oom = measurement.out_of_memory if measurement else None
    if verdict.kind is Kind.OUT_OF_MEMORY and oom is not None:
        needs = ""
        if oom.needed is not None:
            needs = f": needs {format_size(oom.needed.reserved)}, does not fit in {_room(result)}"
        at = f", at {oom.site}" if oom.site else ""
        return f"{part}{verdict.kind}{needs}{at}"
    return f"{part}{verdict.headline}"


def _room(result: Result) -> str:
    """Return the text for what the step did not fit in: its limits or the device's memory."""
    device = result.measurement.device if result.measurement else None
    size = device.usable_memory if device else 0
    budgets = [row.budget for row in result.verdict.comparisons if row.peak == "reserved"]
    limits = [budget for budget in budgets if budget is not None]
    is_device = not limits or 0 < size < min(limits)
    return f"{result.device_key}'s memory" if is_device else result.budget


def row_cause(result: Result) -> str:
    """Describe a failed test's cause, to print below its table row; "" if unknown."""
    measurement = result.measurement
    if not result.verdict.failed or measurement is None:
        return ""
    if result.verdict.kind is Kind.OUT_OF_MEMORY:
        oom = measurement.out_of_memory
        return f"requested at {oom.site}" if oom is not None and oom.site else ""
    if result.verdict.kind is Kind.LEAKED:
        holders = measurement.stayed.holders if measurement.stayed else ()
        return f"held by {holders[0].names}" if holders else ""
    return result.verdict.lead.sentence if result.verdict.lead else ""


def short_message(results: Iterable[Result]) -> str:
    """Describe a failed test in one line: the whole test's failure, or else a part's."""
    failed = sorted(
        (result for result in results if result.verdict.failed),
        key=lambda result: bool(result.part),
    )
    return short_cause(failed[0]) if failed else ""


def change_words(row: Comparison) -> str:
    """Format a difference: "+250.00 MiB (+12.4%)", or "+250.00 MiB reserved (+12.4%)"."""
    difference = row.difference or 0
    share = f" ({100 * difference / row.baseline:+.1f}%)" if row.baseline else ""
    peak = "" if row.peak == "allocated" else f" {row.peak}"
    return f"{format_size(difference, signed=True)}{peak}{share}"


def shared_causes(results: Iterable[Result]) -> list[SharedCause]:
    """Return causes that several failed tests share, the most frequent first."""
    failed = [result for result in results if result.verdict.failed and not result.expected]
    failures_of = Counter(result.nodeid for result in failed)
    by_line: dict[CauseKey, list[Result]] = {}
    for result in failed:
        if failures_of[result.nodeid] > 1:  # the test's own section explains it better
            continue
        if result.beside is not None:  # a limit relative to another part is specific to this test
            continue
        site = result.verdict.causes[0].site if result.verdict.causes else None
        lead = result.verdict.lead
        if lead is not None and lead.kind == "edit" and result.verdict.causes:
            by_line.setdefault(("", lead.path, "", lead.place), []).append(result)
        elif site is not None and site.path:
            key = (site.category, site.path, site.function, site.code)
            by_line.setdefault(key, []).append(result)
    causes = [
        SharedCause(members[0].verdict.causes[0], tuple(members))
        for (category, *_), group in by_line.items()
        for members in (_by_keeper(group) if category else [group])
        if len(members) >= MIN_MEMBERS
    ]
    return sorted(causes, key=lambda cause: -len(cause.results))


def _by_keeper(results: Sequence[Result]) -> Iterable[list[Result]]:
    """Split failures of one line by their keepers: the objects that keep its memory alive.

    Keepers are searched only for the first of many similar tests. So if the failures with keepers
    form one group, those without keepers join it.
    """
    groups: dict[frozenset[str], list[Result]] = {}
    for result in results:
        names = frozenset(keeper.name for keeper in result.verdict.causes[0].keepers)
        groups.setdefault(names, []).append(result)
    if len(groups) == 2 and frozenset() in groups:  # noqa: PLR2004 - one with keepers
        return [list(results)]
    return groups.values()


def cause_lines(results: Sequence[Result]) -> list[str]:
    """Return a sentence per cause that several failures share."""
    failed = sum(result.verdict.failed and not result.expected for result in results)
    return [
        f"{len(cause.results)} of {failed} failures {cause.sentence}"
        for cause in shared_causes(results)
    ]


def code_words(site: Site) -> tuple[str, ...]:
    """Describe a source line in ever shorter texts, the last without its code.

    "model.py:29 in Tiny.forward: return self.head(x)", "model.py:29: return self.head(x)",
    "model.py:29"
    """
    if not site.path:
        return (site_name(site),)
    place = f"{site.path}:{site.line}"
    code = f": {site.code}" if site.code else ""
    words = (f"{place} in {site.function}{code}", f"{place}{code}", place)
    return words if site.function else words[1:]
