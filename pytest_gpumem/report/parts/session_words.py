"""Describe facts of a session, with the same words in every renderer.

These are the number of results of each kind, the next command, the figures that changed together,
and how many tests were compared with baselines.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import UNCOMPARED_IN_TABLE, Kind
from pytest_gpumem.nodeids import module_of
from pytest_gpumem.report.model import count_kinds
from pytest_gpumem.report.parts.styles import StyledText
from pytest_gpumem.report.parts.toolchain_change import (
    ToolchainChange,
    find_common_changes,
    moved_categories,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.judge.verdict import UpdateCommand
    from pytest_gpumem.report.parts.toolchain_change import CommonChange

FEW = 3
"""tests or files that a command names one by one"""
LONG = 120
"""preferred maximum of characters in a command that names tests or files"""
MAX_REASONS = 4
"""reasons in a sentence, the most frequent first"""


def moved_together(results: Iterable[Result]) -> list[CommonChange]:
    """Return groups of figures that a new toolchain moved together, beyond their tolerance."""
    toolchain_changes = []
    for result in results:
        entry, measurement = result.baseline_entry, result.measurement
        lead = result.leading_comparison
        if entry is None or measurement is None or lead is None or measurement.out_of_memory:
            continue
        if entry.provenance == measurement.provenance:
            continue
        if result.verdict.held_to:  # another device's baseline may differ in any case
            continue
        change = ToolchainChange(
            result.nodeid,
            result.part,
            measurement.device.key,
            entry.provenance,
            measurement.provenance,
        )
        if lead.excess:
            breakdowns = [attribution.breakdown for attribution in measurement.attributions]
            change = replace(
                change,
                peak=lead.peak,
                difference=lead.difference or 0,
                categories=moved_categories(entry.breakdowns, breakdowns, lead.device),
            )
        # Figures within tolerance are included, as not all tests need to change with a toolchain.
        toolchain_changes.append(change)
    return find_common_changes(toolchain_changes)


def counts(results: Sequence[Result]) -> list[StyledText]:
    """Return the number of results of each kind, in words; [] without results."""
    recorded = sum(result.verdict.recorded for result in results)
    expected = count_kinds(result for result in results if result.expected)
    parts = []
    for kind, number in count_kinds(results).items():
        if kind is Kind.NO_BASELINE:
            missing = number - recorded
            parts += [StyledText(f"{missing} without baseline", kind.tone)] if missing else []
            parts += [StyledText(f"{recorded} recorded", "good")] if recorded else []
        else:
            as_expected = f" ({expected[kind]} as expected)" if kind in expected else ""
            parts.append(StyledText(f"{number} {kind.word}{as_expected}", kind.tone))
    return [text for part in parts for text in (StyledText(", "), part)][1:]


def next_command(
    results: Sequence[Result], *, updating: bool = False, arguments: Sequence[str] = ()
) -> UpdateCommand | None:
    """Return the command that records missing baselines; None if none are missing.

    It never includes a test that regressed, as accepting that is a separate decision.

    ``updating`` says that the session already writes baselines.
    """
    regressed = {
        target
        for result in results
        if result.verdict.kind is Kind.REGRESSED
        for target in (result.verdict.command and result.verdict.command.targets)
        or (result.nodeid,)
    }
    # Results that need a new baseline, but did not regress.
    asking = {
        target: result.verdict.command
        for result in results
        if result.verdict.command and result.verdict.kind is not Kind.REGRESSED
        for target in result.verdict.command.targets
    }
    missing = list(asking)
    if updating or not missing:
        return None
    any_command = asking[missing[0]]
    spared = regressed | {module_of(nodeid) for nodeid in regressed}
    files = list(dict.fromkeys(map(module_of, missing)))
    for targets, longest in ((missing, LONG), (files, LONG), (missing, sys.maxsize)):
        command = any_command.of(targets)
        if len(targets) <= FEW and len(str(command)) <= longest and spared.isdisjoint(targets):
            return command
    return None if regressed else any_command.of(arguments)


def unguarded_sentence(results: Iterable[Result]) -> str:
    """Name the tests that have neither a baseline nor a size limit; "" if there are none.

    A test whose part has a baseline or a limit is not named.
    """
    held: dict[str, bool] = {}
    for result in results:
        compared = not result.verdict.uncompared or result.verdict.is_written
        held[result.nodeid] = (
            held.get(result.nodeid, False)
            or compared
            or bool(result.budget)
            or result.verdict.failed
        )
    names = [nodeid for nodeid, is_held in held.items() if not is_held]
    if not names:
        return ""
    lead = "1 test" if len(names) == 1 else f"{len(names)} tests"
    more = [f"{len(names) - FEW} more"] if len(names) > FEW else []
    return f"{lead} held to no baseline and no size limit: {', '.join([*names[:FEW], *more])}"


def comparison_sentences(results: Sequence[Result]) -> dict[str, str]:
    """Return, by device key, how many results were compared: "9 of 10 compared, 1 missing"."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.measurement:
            groups.setdefault(result.device_key, []).append(result)
    sentences = {}
    for key, members in groups.items():
        reasons = Counter(result.verdict.uncompared for result in members)
        compared = reasons.pop("", 0)
        devices = dict.fromkeys(result.verdict.held_to for result in members)
        against = ", ".join(filter(None, devices))
        shown = [f"{number} {reason}" for reason, number in reasons.most_common(MAX_REASONS)]
        hidden = len(reasons) - len(shown)
        shown += [f"and {hidden} more reasons"] if hidden else []
        baselines = f" with those of {against}" if against else ""
        lead = f"{compared} of {len(members)} compared{baselines}"
        sentences[key] = ", ".join([lead, *shown])
    return sentences


def tells_more_than_table(results: Sequence[Result]) -> bool:
    """Return whether :func:`comparison_sentences` say more than the table of tests.

    They do for several devices, for another device's baselines, and if some baselines could not be
    compared.
    """
    devices = {result.device_key for result in results if result.measurement}
    verdicts = [result.verdict for result in results]
    return len(devices) > 1 or any(
        verdict.held_to or verdict.uncompared not in UNCOMPARED_IN_TABLE for verdict in verdicts
    )
