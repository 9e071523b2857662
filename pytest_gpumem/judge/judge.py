"""The one judgement of a test: a measurement held against its budgets and its baseline.

Everything here is pure: :func:`judge` takes records and gives a record. Sizes are bytes.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.judge.breakdown_diff import provenance_text, site_name
from pytest_gpumem.judge.comparison import Case, held_text
from pytest_gpumem.judge.verdict import (
    DEFAULT_TOLERANCES,
    NEED_UNKNOWN,
    UPDATE_OPTION,
    USE_LESS,
    Comparison,
    Kind,
    Lookup,
    Policy,
    Verdict,
    beyond_tolerance,
)
from pytest_gpumem.sizes import GIB, MIB, format_size
from pytest_gpumem.step_growth import growth

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_gpumem.measurement import Measurement, OutOfMemory
    from pytest_gpumem.spec import MemorySpec


def judge(  # noqa: PLR0913 - the last two are words for the verdict
    measurement: Measurement,
    spec: MemorySpec,
    lookup: Lookup,
    policy: Policy,
    *,
    nodeid: str = "",
    card_bytes: int | None = None,
) -> Verdict:
    """Judge a measurement: out of memory first, then budgets, growth, and the baseline.

    Exactly at a budget, or exactly at the tolerance, is within.

    Args:
        measurement: what was measured.
        spec: what the test declares.
        lookup: what was found of its baseline.
        policy: what the session's options say.
        nodeid: the test as pytest names it, for the command in the remedy.
        card_bytes: what ``spec.card`` leaves to a step: its memory less its CUDA context.
    """
    case = Case(measurement, spec, lookup, policy, nodeid, card_bytes)
    found = _out_of_memory(case) or _over_budget(case) or _growing(case)
    return found or _without_baseline(case) or _compared(case)


def judge_left(measurement: Measurement, spec: MemorySpec) -> Verdict | None:
    """Judge what a test left behind; None where it is no more than ``max_leak_mib``."""
    limit = spec.max_leak_bytes
    if limit is None or max(measurement.left, default=0) <= limit:
        return None
    case = Case(measurement, spec, Lookup(), Policy(), "", None)
    device, left = max(enumerate(measurement.left), key=lambda it: it[1])
    finding = f"{format_size(left)}{case.on_device(device)} still held after the test"
    if limit:
        finding += f", max_leak_mib={spec.max_leak_mib!r}"
    verdict = _verdict(case, Kind.LEAKED, f"{finding}{_of_which(measurement)}", failed=True)
    remedy = (
        "let go of what refers to it; for a cache that is filled once, give warmup=1, or declare "
        f"max_leak_mib={-(-left // MIB)}"
    )
    notes = (*_held_by(measurement), *verdict.notes)
    return replace(verdict, notes=notes, remedy=remedy, comparisons=())


def _verdict(
    case: Case, kind: Kind, finding: str, notes: Iterable[str] = (), *, failed: bool = False
) -> Verdict:
    """Return a verdict with the notes that every kind has, and no remedy as yet."""
    notes = (*notes, *_common_notes(case, kind))
    found = Verdict(kind, failed, f"{kind}: {finding}", case.comparisons, notes)
    held_to = "" if case.uncompared else case.policy.against
    return replace(found, uncompared=case.uncompared, held_to=held_to)


def _updatable(case: Case, verdict: Verdict, purpose: str) -> Verdict:
    """Add that a new baseline is the remedy; where the run writes one, the test does not fail."""
    if case.policy.against:
        return replace(verdict, remedy=_against_remedy(case))
    if case.policy.updating:
        notes = (*verdict.notes, "this run writes the baseline anew")
        return replace(verdict, failed=False, notes=notes)
    command = shlex.join(filter(None, ("pytest", case.nodeid, UPDATE_OPTION)))
    return replace(verdict, remedy=f"{purpose}, run {command}", command=command)


def _against_remedy(case: Case) -> str:
    """Return what to do where the baselines are another device's, and not to be written here."""
    key = case.policy.against
    if case.entry is not None:
        return (
            "see which lines differ; where the two devices do, allow for it with "
            "--gpumem-against-tolerance"
        )
    return f"record the baseline of {key}, on that device, with {UPDATE_OPTION}"


_TABLED = (Kind.OUT_OF_MEMORY, Kind.OVER_BUDGET, Kind.REGRESSED)
"""verdicts whose reports have a table of all devices"""


def _common_notes(case: Case, kind: Kind) -> Iterator[str]:
    now, entry, error = case.measurement, case.entry, case.lookup.error
    yield from now.notes
    if case.fullest is not None and kind not in _TABLED:
        yield f"device {case.fullest} of {len(now.peaks)} is the fullest"
    if now.alloc_retries and kind is not Kind.OUT_OF_MEMORY:
        times = "once" if now.alloc_retries == 1 else f"{now.alloc_retries} times"
        yield f"the allocator had to empty its cache {times} to go on"
    if error is not None and case.spec.baseline and kind is not Kind.INCOMPARABLE:
        yield f"cannot read the baseline: {error}"
    if entry and (before := provenance_text(entry.provenance, now.provenance)):
        after = provenance_text(now.provenance, entry.provenance)
        yield f"baseline made with {before}; measured with {after}"


def _out_of_memory(case: Case) -> Verdict | None:
    oom, device = case.measurement.out_of_memory, case.measurement.device
    if oom is None:
        return None
    caps = [limit for limit in case.limits if limit.name in {"max_gib", "card"}]
    cap = min(caps, key=lambda limit: limit.nbytes, default=None)
    size = cap.nbytes if cap else device.total_memory - device.context
    step = "the step" if case.spec.batch_size is None else f"batch size {case.spec.batch_size}"
    place = f"in {cap}" if cap else f"on {device.name} ({format_size(size)})"
    place += case.on_device(oom.device_index)
    finding = f"{step} does not fit {place}: {_shortage(oom, size)}"
    notes = _shortage_notes(case, oom, size)
    verdict = _verdict(case, Kind.OUT_OF_MEMORY, finding, notes, failed=True)
    if oom.needed is None:
        uncompared = verdict.uncompared or NEED_UNKNOWN
        return replace(verdict, comparisons=(), remedy=f"try {USE_LESS}", uncompared=uncompared)
    raisable = [lim.name for lim in caps] == ["max_gib"] and oom.needed.reserved > size
    more = _declare("max_gib", oom.needed.reserved) if raisable else ""
    rows = case.compare(oom.device_index, oom.needed)
    return replace(verdict, comparisons=rows, remedy=f"try {USE_LESS}{more}")


def _shortage(oom: OutOfMemory, size: int) -> str:
    asked = "" if oom.requested is None else f"{format_size(oom.requested)} more asked for "
    text = f"{asked}with {held_text(oom)}"
    if oom.needed is None:
        return text
    verb = "it needs" if oom.needed.reserved > size else "run again it took"
    return f"{text}; {verb} {format_size(oom.needed.reserved)}"


def _shortage_notes(case: Case, oom: OutOfMemory, size: int) -> Iterator[str]:
    segment = DEFAULT_TOLERANCES["reserved"].absolute
    if oom.requested is not None and oom.reserved + oom.requested + segment <= size:
        yield "that much was left for this test: others hold the device's memory"
    if case.entry is not None and oom.needed is None:
        yield f"the baseline is {held_text(case.entry.peaks[oom.device_index])}"


def _over_budget(case: Case) -> Verdict | None:
    found = [
        (row.measured - limit.nbytes, row, limit)
        for row in case.comparisons
        for limit in case.limits
        if row.peak == limit.peak and row.measured > limit.nbytes
    ]
    if not found:
        return None
    found.sort(key=lambda item: -item[0])
    texts = [
        f"{row.title} of {format_size(row.measured)}{case.on_device(row.device)} "
        f"is {format_size(over)} over {limit}"
        for over, row, limit in found
    ]
    notes = [f"also, {text}" for text in texts[1:]]
    verdict = _verdict(case, Kind.OVER_BUDGET, texts[0], notes, failed=True)
    _, worst, limit = found[0]
    more = "" if limit.name == "card" else _declare(limit.name, worst.measured)
    return replace(verdict, remedy=f"try {USE_LESS}{more}")


def _growing(case: Case) -> Verdict | None:
    """Judge what was allocated after each step, on the device where it grew most."""
    found = [
        (grown, device)
        for device, steps in enumerate(case.measurement.steps)
        if (grown := growth(steps)) is not None
    ]
    if not case.spec.steady or not found:
        return None
    grown, device = max(found, key=lambda it: it[0].final - it[0].initial)
    rises = [rise for rise in grown.rises if rise]
    number, of = len(rises), len(grown.rises)
    if len(set(rises)) == 1:
        text = f"{format_size(rises[0])} in "
        text += f"each of {of} steps" if number == of else f"{number} of {of} steps"
    else:
        text = f"{format_size(sum(rises))} in {of} steps"
    moved = f"{format_size(grown.initial)} -> {format_size(grown.final)}"
    finding = f"allocated grew by {text}{case.on_device(device)} ({moved})"
    finding += _of_which(case.measurement)
    notes = _held_by(case.measurement)
    verdict = _verdict(case, Kind.LEAKED, finding, notes, failed=True)
    remedy = (
        "keep no tensor of a step beyond it: loss.item() or .detach().cpu() of what is kept for "
        "logs; where it does stop growing, run more steps"
    )
    return replace(verdict, remedy=remedy)


def _of_which(measurement: Measurement) -> str:
    """Return at which line most of what stayed was allocated; "" where that is not known."""
    stayed = measurement.stayed
    site = stayed.sites[0] if stayed and stayed.sites else None
    if site is None or not site.path:
        return ""
    blocks = "1 block" if site.blocks == 1 else f"{site.blocks} blocks"
    return f", of which {site_name(site)} {format_size(site.nbytes)} in {blocks}"


def _held_by(measurement: Measurement) -> Iterator[str]:
    """Say who refers to what stayed."""
    for it in measurement.stayed.holders if measurement.stayed else ():
        blocks = "1 block" if it.blocks == 1 else f"{it.blocks} blocks"
        yield f"held by {it.text}: {format_size(it.nbytes)} in {blocks}"


def _without_baseline(case: Case) -> Verdict | None:
    """Judge a test that has nothing to be compared with, whether on purpose or not."""
    lookup, measured = case.lookup, case.highest
    kind, purpose = Kind.INCOMPARABLE, "to record one"
    if not case.spec.baseline:
        return _verdict(case, Kind.WITHIN, measured)
    if lookup.error is not None:
        verdict = _verdict(case, kind, f"cannot read the baseline: {lookup.error}", failed=True)
        return replace(verdict, remedy="repair the file, or restore it from version control")
    device = case.policy.against or case.measurement.device.key
    if case.mismatch:
        finding, purpose = f"{case.mismatch}; {measured}", "if this is intended"
    elif lookup.entry is not None:
        return None
    elif lookup.others:
        finding = f"no baseline of {device}, only of {', '.join(lookup.others)}; {measured}"
    else:
        kind, finding = Kind.NO_BASELINE, f"{measured} on {case.measurement.device.key}"
    failed = case.policy.missing_baseline == "fail"
    return _updatable(case, _verdict(case, kind, finding, failed=failed), purpose)


def _compared(case: Case) -> Verdict:
    far = beyond_tolerance(case.comparisons)
    against = f"; held to the baseline of {case.policy.against}" if case.policy.against else ""
    if case.toolchain and case.policy.provenance == "fail":
        finding = f"the baseline was made with {case.toolchain}; {case.highest}"
        verdict = _verdict(case, Kind.INCOMPARABLE, finding, failed=True)
        return _updatable(case, verdict, "if this is intended")
    if far and case.toolchain and case.policy.provenance == "note":
        finding = f"{_change(case, far[0])} from a baseline made with {case.toolchain}"
        return _updatable(
            case, _verdict(case, Kind.INCOMPARABLE, finding), "to hold later runs to it"
        )
    if not far:
        return _verdict(case, Kind.WITHIN, f"{case.highest}{against}")
    finding = f"{_change(case, far[0])}, tolerance {format_size(far[0].allowance or 0)}"
    cause = case.cause(far[0])
    finding = f"{cause}; {finding}" if cause else finding
    if far[0].excess < 0:
        failed = case.policy.shrinkage == "fail"
        verdict = _verdict(case, Kind.IMPROVED, finding, failed=failed)
        return _updatable(case, verdict, "to hold later runs to it")
    only_reserved = all(row.peak == "reserved" for row in far)
    notes = ["live tensors take no more: it is the allocator's cache"] if only_reserved else []
    verdict = _verdict(case, Kind.REGRESSED, finding, notes, failed=True)
    return _updatable(case, verdict, "if this is intended")


def _change(case: Case, row: Comparison) -> str:
    difference, baseline = row.difference or 0, row.baseline or 0
    share = f" ({100 * difference / baseline:+.1f}%)" if baseline else ""
    place = case.on_device(row.device)
    if case.policy.against:
        side = "above" if difference > 0 else "below"
        text = f"is {format_size(abs(difference))}{share} {side} that of {case.policy.against}"
        return f"{row.title}{place} {text}"
    verb = "grew" if difference > 0 else "shrank"
    return f"{row.title}{place} {verb} by {format_size(abs(difference))}{share}"


def _declare(name: str, nbytes: int) -> str:
    """Return the budget to declare for so many bytes: the next hundredth of its unit."""
    unit = MIB if name == "max_mib_per_sample" else GIB
    number = -(-nbytes * 100 // unit) / 100
    return f"; or, if the step may take that much, declare {name}={number:.10g}"
