"""Judge a test: compare a measurement with its budgets and its baseline.

Everything here is pure: :func:`judge` takes records and returns a record. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.breakdowns import blocks_text, provenance_text, site_name
from pytest_gpumem.judge import server_start
from pytest_gpumem.judge.comparison import Judged, both_sizes, growth
from pytest_gpumem.judge.verdict import (
    DEFAULT_TOLERANCES,
    KEEP_LESS,
    LESS_OF,
    NEED_UNKNOWN,
    PEAKS,
    UPDATE_OPTION,
    USE_LESS,
    Comparison,
    Growth,
    Kind,
    Lookup,
    Policy,
    UpdateCommand,
    Verdict,
    beyond_tolerance,
    unexplained,
)
from pytest_gpumem.measurement import MIN_OUTSIDE
from pytest_gpumem.notes import Note, NoteKind, notes_of
from pytest_gpumem.relations import BEFORE
from pytest_gpumem.relations import FIGURES as RELATED
from pytest_gpumem.sizes import GIB, MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.judge.comparison import Limit
    from pytest_gpumem.judge.verdict import ExplainGrowth, Lead
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.relations import Bound
    from pytest_gpumem.spec import MemorySpec


MAX_EARLIER = 3
"""maximum number of source lines in a note on memory that was allocated before a part began"""


def judge(  # noqa: PLR0913 - all that a verdict depends on
    measurement: Measurement,
    spec: MemorySpec,
    lookup: Lookup,
    policy: Policy,
    *,
    nodeid: str = "",
    card_bytes: int | None = None,
    relations: Sequence[Bound] = (),
    explain: ExplainGrowth = unexplained,
) -> Verdict:
    """Judge a measurement: a failed start, out of memory, limits, growth, then the baseline.

    A figure exactly at its budget, or exactly at the tolerance, passes.

    ``lookup`` has the baseline, or the reason why none was found. ``nodeid`` is the test's name for
    a command line in the working folder. ``card_bytes`` is the usable memory of the card to fit on,
    None without one. ``explain`` returns the causes of a peak that grew.
    """
    case = Judged(measurement, spec, lookup, policy, nodeid, card_bytes, relations)
    # A step that runs out of memory, exceeds a limit or leaks fails whatever its baseline is.
    failure = _not_started(case) or _out_of_memory(case) or _too_few_tokens(case)
    failure = failure or _over_budget(case) or _beyond_bound(case) or _growing(case)
    without = failure or _without_baseline(case) or _largest(case)
    return without or _fewer_tokens(case, _compared(case, explain))


def judge_left(measurement: Measurement, spec: MemorySpec, before: Verdict) -> Verdict | None:
    """Return a verdict if a test left more memory than ``max_leak_mib`` allows; else None.

    ``before`` is the verdict on the test's peaks; its ``uncompared`` and ``held_to`` are copied.
    """
    limit = spec.bytes_of("max_leak_mib")
    if limit is None or max(measurement.left, default=0) <= limit:
        return None
    case = Judged(measurement, spec, Lookup(), Policy(), "", None)
    device, left = max(
        enumerate(measurement.left), key=lambda device_and_bytes: device_and_bytes[1]
    )
    finding = f"{format_size(left)}{case.on_device(device)} still allocated after the test"
    if limit:
        finding += f", max_leak_mib={spec.max_leak_mib!r}"
    advice = (
        "delete the references to it; for a cache that is filled once, write warmup=1 or "
        f"max_leak_mib={-(-left // MIB)}"
    )
    finding += _leaking_line(measurement)
    notes = _held_by(measurement)
    verdict = _verdict(case, Kind.LEAKED, finding, notes, failed=True, advice=advice)
    uncompared, held_to = before.uncompared, before.held_to
    return replace(verdict, comparisons=(), uncompared=uncompared, held_to=held_to)


def _verdict(  # noqa: PLR0913 - the parts of a verdict
    case: Judged,
    kind: Kind,
    finding: str,
    notes: Iterable[Note] = (),
    *,
    failed: bool = False,
    lead: Lead | None = None,
    advice: str = "",
) -> Verdict:
    measurement, entry, error = case.measurement, case.entry, case.lookup.error
    notes = [*notes, *measurement.notes]
    if case.fullest is not None and kind not in _TABLED:
        sentence = f"device {case.fullest} of {len(measurement.peaks)} is the fullest"
        notes.append(Note(NoteKind.DEVICE, sentence))
    if measurement.alloc_retries and kind is not Kind.OUT_OF_MEMORY:
        times = "once" if measurement.alloc_retries == 1 else f"{measurement.alloc_retries} times"
        notes.append(
            Note(
                NoteKind.DEVICE, f"the allocator emptied its cache {times}, because memory ran out"
            )
        )
    notes += _unwritten_pinned(case)
    unguarded = ""
    if measurement.pinned_count == "by time" and measurement.peak_pinned:
        unguarded = "DataLoader's thread pins batches ahead, so the peak depends on time"
    elif measurement.pinned_count == "uncounted" and entry and entry.peak_pinned:
        unguarded = f"torch {measurement.provenance.torch} does not count pinned memory"
    if unguarded and case.spec.baseline:
        notes.append(Note(NoteKind.UNGUARDED, f"peak pinned is not compared: {unguarded}"))
    if error is not None and case.spec.baseline and kind is not Kind.INCOMPARABLE:
        notes.append(Note(NoteKind.UNREADABLE, f"cannot read the baseline: {error}"))
    is_bound = failed and kind.too_much and any(note.kind is NoteKind.BOUND for note in notes)
    if is_bound:
        finding = f"by a bound; {finding}"
    toolchain_leads = lead is not None and lead.kind == "toolchain"
    if (
        entry
        and not toolchain_leads
        and (old := provenance_text(entry.provenance, measurement.provenance))
    ):
        new = provenance_text(measurement.provenance, entry.provenance)
        notes.append(Note(NoteKind.BASELINE, f"baseline made with {old}; measured with {new}"))
    held_to = "" if case.uncompared else case.policy.against
    return Verdict(
        kind,
        failed,
        f"{kind.word}: {lead.sentence}; {finding}" if lead else f"{kind.word}: {finding}",
        case.comparisons,
        tuple(notes),
        advice,
        uncompared=case.uncompared,
        held_to=held_to,
        lead=lead,
    )


def _unwritten_pinned(case: Judged) -> list[Note]:
    """Return a note if the host memory limit may hold only because pinned memory was not written.

    A GPU's driver makes all pinned memory resident. On the virtual GPU pinned memory becomes
    resident when it is written, and a copy of values that were not computed writes nothing.
    """
    measurement, limit = case.measurement, case.spec.bytes_of("max_host_gib")
    if measurement.host is None or limit is None or not measurement.device.is_predicted:
        return []
    most = measurement.host + measurement.peak_pinned
    if not measurement.host <= limit < most:
        return []
    sentence = (
        "the limit on host memory may hold only because pinned memory was not written: on a GPU, "
        f"peak host memory is at most {format_size(most)}"
    )
    return [Note(NoteKind.PINNED_COPIES, sentence)]


def _updatable(case: Judged, verdict: Verdict, purpose: str) -> Verdict:
    """Return a verdict that advises to record a new baseline, or passes if this run writes it.

    ``purpose`` begins the advice: "if this is intended".
    """
    if case.policy.against and case.entry is not None:
        advice = (
            "find the lines that differ; if the two devices themselves differ, raise "
            "--gpumem-tolerance"
        )
        return replace(verdict, advice=advice)
    if case.policy.against:
        advice = f"to record the baseline of {case.policy.against}, run on that device with "
        return replace(verdict, advice=f"{advice}{UPDATE_OPTION}")
    if case.policy.base_commit and not case.policy.updating:
        advice = f"{purpose}, merge it: {case.policy.base_commit} is measured anew each time"
        return replace(verdict, advice=advice if verdict.failed else "")
    if case.policy.updating:
        notes = (*verdict.notes, Note(NoteKind.RECORDED, "this run writes a new baseline"))
        return replace(verdict, failed=False, notes=notes)
    verdict = replace(verdict, accept=case.policy.accept)
    if not case.policy.launcher:
        advice = f"{purpose}, start all ranks again with {UPDATE_OPTION}"
        return replace(verdict, advice=advice)
    targets = (case.nodeid,) if case.nodeid else ()
    command = UpdateCommand(case.policy.launcher, targets, case.policy.repeated)
    return replace(verdict, advice=f"{purpose}, run", command=command)


def _not_started(case: Judged) -> Verdict | None:
    finding = server_start.why_not_started(case.measurement.servers)
    if not finding:
        return None
    verdict = _verdict(case, Kind.NO_START, finding, failed=True, advice=server_start.ADVICE)
    return replace(verdict, comparisons=())  # the server's process has the peaks


def _too_few_tokens(case: Judged) -> Verdict | None:
    limit = case.spec.min_cache_tokens
    finding = server_start.too_few_tokens(case.measurement.servers, limit)
    if not finding:
        return None
    return _verdict(case, Kind.UNDER_LIMIT, finding, failed=True, advice=server_start.ADVICE)


def _fewer_tokens(case: Judged, compared: Verdict) -> Verdict:
    """Return a regression if a server's KV cache shrank although its profiling run did not grow."""
    tolerance = case.policy.tolerance_of("reserved", case.spec.tolerance)
    old = case.entry.cache_tokens if case.entry else None
    finding = server_start.fewer_tokens(case.measurement.servers, old, tolerance)
    if not finding or compared.kind is Kind.INCOMPARABLE:
        return compared
    if compared.kind is Kind.REGRESSED:
        note = Note(NoteKind.SERVER, finding)
        return replace(compared, notes=(note, *compared.notes))
    lead = case.toolchain_lead
    verdict = _verdict(case, Kind.REGRESSED, finding, failed=True, lead=lead)
    return _updatable(case, verdict, "if this is intended")


_TABLED = (Kind.OUT_OF_MEMORY, Kind.OVER_BUDGET, Kind.REGRESSED)
"""kinds whose headline names the device: the note on the fullest device is left out"""


def _out_of_memory(case: Judged) -> Verdict | None:
    oom, device = case.measurement.out_of_memory, case.measurement.device
    if oom is None:
        return None
    size = device.usable_memory  # 0: unknown
    caps = [
        limit
        for limit in case.limits
        if limit.name in {"max_gib", "card"} and not 0 < size < limit.nbytes
    ]
    cap = min(caps, key=lambda limit: limit.nbytes, default=None)
    size = cap.nbytes if cap else size
    step = "the step" if case.spec.batch_size is None else f"batch size {case.spec.batch_size}"
    place = f"in {cap}" if cap else f"on {device.name}"
    place += f" ({format_size(size)})" * (cap is None and size > 0)
    place += case.on_device(oom.device_index)
    held = f"{format_size(oom.allocated)} were allocated, {format_size(oom.reserved)} reserved"
    requested = (
        "" if oom.requested is None else f"it asked for {format_size(oom.requested)} more when "
    )
    finding = f"{step} does not fit {place}: {requested}{held}"
    if oom.needed is not None:
        # If a second run needs less than the cap, other memory took up the room in the first run.
        verb = "it needs" if oom.needed.reserved > size else "in a second run it took"
        finding += f"; {verb} {format_size(oom.needed.reserved)}"
    notes = []
    segment = DEFAULT_TOLERANCES["reserved"].absolute
    if oom.requested is not None and oom.reserved + oom.requested + segment <= size:
        uses = case.measurement.device_use[oom.device_index : oom.device_index + 1]
        if any(use.outside >= MIN_OUTSIDE for use in uses):
            outside = format_size(uses[0].outside)
            sentence = (
                f"{outside} of the device's memory were allocated outside PyTorch's allocator"
            )
        else:
            sentence = (
                "less memory was left for this test: others use the rest of the device's memory"
            )
        notes.append(Note(NoteKind.LIMIT, sentence))
    if case.entry is not None and oom.needed is None:
        sentence = f"the baseline is {both_sizes(case.entry.peaks[oom.device_index])}"
        notes.append(Note(NoteKind.BASELINE, sentence))
    verdict = _verdict(case, Kind.OUT_OF_MEMORY, finding, notes, failed=True)
    less = _use_less(case, oom.device_index)
    if oom.needed is None:
        uncompared = verdict.uncompared or NEED_UNKNOWN
        return replace(verdict, comparisons=(), advice=f"try {less}", uncompared=uncompared)
    raisable = [limit.name for limit in caps] == ["max_gib"] and oom.needed.reserved > size
    larger_limit = _declare("max_gib", oom.needed.reserved) if raisable else ""
    rows = case.compare(oom.device_index, oom.needed)
    return replace(verdict, comparisons=rows, advice=f"try {less}{larger_limit}")


def _over_budget(case: Judged) -> Verdict | None:
    excesses = [
        (case.most(row) - limit.nbytes, row, limit)
        for row in case.comparisons
        for limit in case.limits
        if row.peak == limit.peak and case.most(row) > limit.nbytes
    ]
    if not excesses:
        return _over_budget_outside(case)
    excesses.sort(key=lambda item: -item[0])
    texts = [
        f"{row.title} of {format_size(case.most(row))}"
        + (" at most" if case.most(row) > row.measured else "")
        + f"{case.on_device(row.device)} is "
        + ("as much as" if limit.strict and over == 1 else f"{format_size(over)} over")
        + f" {limit}"
        for over, row, limit in excesses
    ]
    notes = notes_of(NoteKind.LIMIT, (f"also, {finding}" for finding in texts[1:]))
    over, worst, limit = excesses[0]
    notes = (*_pinned_by(case.measurement), *notes)
    if limit.relation is None or limit.relation.part != BEFORE:
        notes = (*notes, *_from_before(case.measurement, worst, over))
    if worst.peak == "host" and case.measurement.device.is_predicted:
        sentence = 'values of the virtual GPU are in host memory too: values="off" computes none'
        notes = (*notes, Note(NoteKind.LIMIT, sentence))
    verdict = _verdict(case, Kind.OVER_BUDGET, texts[0], notes, failed=True)
    if limit.relation is not None and limit.relation.part in {"", BEFORE}:
        return replace(verdict, advice=f"try {_use_less(case, worst.device)}")
    if limit.relation is not None:
        advice = f"find the lines that differ from {limit.relation.part}'s"
        if limit.relation.limit(case.most(worst)) == limit.nbytes:
            advice = f"find why it saves nothing: {limit.relation.part} has the same peak"
        return replace(verdict, advice=advice, beside=limit.relation.part)
    return replace(
        verdict, advice=_less_or_larger(limit, case.most(worst), _use_less(case, worst.device))
    )


def _beyond_bound(case: Judged) -> Verdict | None:
    """Judge lower limits, and limits on active and held memory; None if all hold."""
    bounds = [case.at_least(bound) for bound in case.relations if not bound.relation.is_limit]
    broken = [bound for bound in bounds if bound.excess > 0]
    if not broken:
        return None
    broken.sort(key=lambda bound: -bound.excess)
    texts = [
        f"{bound.relation.chain!r} does not hold: {bound.sizes}"
        if bound.relation.chain
        else f"{RELATED[bound.relation.figure]} of {format_size(bound.measured)} is {bound}"
        for bound in broken
    ]
    worst = broken[0].relation
    kind = Kind.UNDER_LIMIT if worst.is_lower else Kind.OVER_BUDGET
    notes = notes_of(NoteKind.LIMIT, (f"also, {finding}" for finding in texts[1:]))
    verdict = _verdict(case, kind, texts[0], notes, failed=True)
    advice = "delete references to memory that the part no longer needs"
    if worst.chain:
        advice = f"find the lines that differ from {worst.part}'s"
    elif worst.is_lower:
        advice = (
            f"find the tensors that were expected: {format_size(broken[0].excess)} or more are "
            "on no device, or were freed before"
        )
    if worst.figure == "held":
        return replace(verdict, advice=advice, not_of_peak=True)
    return replace(verdict, advice=advice, beside=worst.part)


def _over_budget_outside(case: Judged) -> Verdict | None:
    """Return a verdict if memory reserved plus memory outside PyTorch's allocator is too much.

    None also on a real GPU, where memory outside may be the driver's or another process's.
    """
    measurement = case.measurement
    if not measurement.device.is_predicted:
        return None
    totals = [
        (use.peak - use.besides - held.reserved, use.outside, device)
        for device, (use, held) in enumerate(
            zip(measurement.device_use, measurement.held, strict=False)
        )
        if use.outside >= MIN_OUTSIDE
    ]
    limits = [limit for limit in case.limits if limit.peak == "reserved"]
    if not totals or not limits:
        return None
    total, outside, device = max(totals)
    limit = min(limits, key=lambda limit: limit.nbytes)
    if total <= limit.nbytes:
        return None
    finding = (
        f"{format_size(total)} in use{case.on_device(device)}, {format_size(outside)} of "
        f"it outside PyTorch's allocator, is {format_size(total - limit.nbytes)} over "
        f"{limit}"
    )
    advice = _less_or_larger(limit, total, _use_less(case, device))
    return _verdict(case, Kind.OVER_BUDGET, finding, failed=True, advice=advice)


def _growing(case: Judged) -> Verdict | None:
    """Judge the growth of allocated memory from step to step, on the device that grew most.

    None if the marker does not declare ``steady``, or if no device's memory grew.
    """
    growths = [
        (grown, device)
        for device, steps in enumerate(case.measurement.steps)
        if (grown := growth(steps)) is not None
    ]
    if not case.spec.steady or not growths:
        return None
    grown, device = max(growths, key=lambda item: item[0].final - item[0].initial)
    rises = [rise for rise in grown.rises if rise]
    half, steps = len(grown.rises), len(case.measurement.steps[device])
    amount = f"{format_size(grown.final - grown.initial)} in the"
    if len(set(rises)) == 1:
        each = "each" if len(rises) == half else str(len(rises))
        amount = f"{format_size(rises[0])} in {each} of the"
    amount += f" last {half} of {steps} steps"
    moved = f"{format_size(grown.initial)} -> {format_size(grown.final)}"
    finding = f"allocated memory grew by {amount}{case.on_device(device)} ({moved})"
    finding += _leaking_line(case.measurement)
    notes = _held_by(case.measurement)
    advice = (
        "keep no tensor after its step: for logs, keep loss.item() or .detach().cpu(); if a cache "
        "is full after n steps, run 2 n steps or more: only the last half of them is judged"
    )
    return _verdict(case, Kind.LEAKED, finding, notes, failed=True, advice=advice)


def _leaking_line(measurement: Measurement) -> str:
    """Return a clause with the line that allocated most of the leaked memory; "" if unknown."""
    stayed = measurement.stayed
    if stayed is None or not stayed.sites or not stayed.sites[0].path:
        return ""
    site = stayed.sites[0]
    words = f", of which {site_name(site)} {format_size(site.nbytes)} in {blocks_text(site.blocks)}"
    shrank = sum(each.nbytes for each in stayed.sites) - stayed.nbytes
    return words + (f", less {format_size(shrank)} of other memory" if shrank > 0 else "")


def _held_by(measurement: Measurement) -> Iterator[Note]:
    for holder in measurement.stayed.holders if measurement.stayed else ():
        size = format_size(holder.nbytes)
        sentence = f"held by {holder.names}: {size} in {blocks_text(holder.blocks)}"
        if holder.others and holder.shared == holder.nbytes:
            sentence += ", freed when all of them let go"
        elif holder.others:
            others = " and ".join(holder.others)
            sentence += f", of which {format_size(holder.shared)} are also held by {others}"
        yield Note(NoteKind.HOLDER, sentence)


def _pinned_by(measurement: Measurement) -> Iterator[Note]:
    """Yield a note on each line that pinned a large part of a peak that is too high."""
    for line in measurement.pinned_lines:
        place = f"{line.path}:{line.line} in {line.function}"
        yield Note(NoteKind.PINNED, f"{format_size(line.nbytes)} pinned by {place}: {line.code}")


def _from_before(measurement: Measurement, row: Comparison, excess: int) -> Iterator[Note]:
    """Yield a note if memory allocated or reserved before the part makes up the excess."""
    attributions = measurement.attributions[row.device : row.device + 1]
    earlier = [site for attribution in attributions for site in attribution.earlier]
    nbytes = sum(site.nbytes for site in earlier)
    reserved = measurement.reserved_before(row.device) if row.peak == "reserved" else 0
    if reserved:
        sentence = (
            f"the allocator had reserved {format_size(reserved)} before the part began, and "
            "the part took no more: look at the code before the part, or call "
            "torch.cuda.empty_cache() before it"
        )
        yield Note(NoteKind.LIMIT, sentence)
    elif row.peak in PEAKS and earlier and nbytes >= excess:
        places = "; ".join(
            f"{format_size(site.nbytes)} at {site_name(site)}" for site in earlier[:MAX_EARLIER]
        )
        more = "; ..." if len(earlier) > MAX_EARLIER else ""
        size = format_size(nbytes)
        sentence = f"{size} of the peak were allocated when the part began: {places}{more}"
        yield Note(NoteKind.LIMIT, sentence)


def _without_baseline(case: Judged) -> Verdict | None:
    """Judge a test that has no baseline to compare with; None if it has one."""
    lookup, measured = case.lookup, case.highest
    kind, purpose = Kind.INCOMPARABLE, "to record a baseline"
    if not case.spec.baseline:
        return _verdict(case, Kind.WITHIN, measured)
    if lookup.error is not None:
        finding = f"cannot read the baseline: {lookup.error}"
        advice = "repair the file, or restore it from version control"
        return _verdict(case, kind, finding, failed=True, advice=advice)
    device = case.policy.against or case.measurement.device.key
    if case.mismatch:
        finding, purpose = f"{case.mismatch}; {measured}", "if this is intended"
    elif lookup.entry is not None:
        return None
    elif lookup.other_devices:
        finding = (
            f"no baseline for {device}, only for {', '.join(lookup.other_devices)}; {measured}"
        )
    else:
        kind, finding = Kind.NO_BASELINE, f"{measured} on {case.measurement.device.key}"
    failed = case.policy.missing_baseline == "fail"
    return _updatable(case, _verdict(case, kind, finding, failed=failed), purpose)


def _largest(case: Judged) -> Verdict | None:
    """Judge the largest value that a search found to fit; its peaks are not compared.

    None if the test did not search, or if its baseline has no such value.
    """
    new, old = case.measurement.largest, case.entry.largest if case.entry else None
    if new is None or old is None:
        return None
    finding = f"the largest value that fits changed from {old} to {new}"
    refused = case.toolchain and case.policy.provenance == "fail"
    if case.toolchain and (refused or (new != old and case.policy.provenance == "note")):
        finding += f"; the baseline was made with {case.toolchain}"
        verdict = _verdict(case, Kind.INCOMPARABLE, finding, failed=bool(refused))
    elif new == old:
        verdict = _verdict(case, Kind.WITHIN, case.highest)
    elif new < old:
        verdict = _verdict(case, Kind.REGRESSED, finding, failed=True)
    else:
        failed = case.policy.shrinkage == "fail"
        verdict = _verdict(case, Kind.IMPROVED, finding, failed=failed)
    verdict = replace(verdict, comparisons=())
    if verdict.kind is Kind.WITHIN:
        return verdict
    purpose = "if this is intended" if verdict.failed else "to compare later runs with it"
    return _updatable(case, verdict, purpose)


def _compared(case: Judged, explain: ExplainGrowth) -> Verdict:
    beyond = beyond_tolerance(case.comparisons)
    unguarded = []
    if case.policy.guard == "allocated":
        unguarded = [
            Note(NoteKind.UNGUARDED, f"{_change(case, row)}, unguarded")
            for row in beyond
            if row.peak == "reserved"
        ]
        beyond = [row for row in beyond if row.peak != "reserved"]
    against = (
        f"; compared with the baseline of {case.policy.against}" if case.policy.against else ""
    )
    if case.toolchain and case.policy.provenance == "fail":
        finding = f"the baseline was made with {case.toolchain}; {case.highest}"
        verdict = _verdict(case, Kind.INCOMPARABLE, finding, failed=True)
        return _updatable(case, verdict, "if this is intended")
    if beyond and case.toolchain and case.policy.provenance == "note":
        finding = f"{_change(case, beyond[0])} from a baseline made with {case.toolchain}"
        return _updatable(
            case, _verdict(case, Kind.INCOMPARABLE, finding), "to compare later runs with it"
        )
    # A change that fails comes first; one that passes must not hide that the baseline lacks pinned
    # memory.
    passes = not beyond or (beyond[0].excess < 0 and case.policy.shrinkage == "note")
    if passes and case.unrecorded is not None:
        finding = f"{format_size(case.unrecorded.measured)} of pinned host memory"
        failed = case.policy.missing_baseline == "fail"
        verdict = _verdict(case, Kind.NO_BASELINE, finding, unguarded, failed=failed)
        return _updatable(case, verdict, "to record a baseline")
    if not beyond:
        return _verdict(case, Kind.WITHIN, f"{case.highest}{against}", unguarded)
    finding = f"{_change(case, beyond[0])}{_sizes(case, beyond[0])}, tolerance "
    finding += format_size(beyond[0].allowance or 0)
    if beyond[0].excess < 0:
        failed = case.policy.shrinkage == "fail"
        verdict = _verdict(case, Kind.IMPROVED, finding, failed=failed)
        return _updatable(case, verdict, "to compare later runs with it")
    notes = unguarded
    if all(row.peak == "reserved" for row in beyond):
        more = max(row.difference or 0 for row in case.comparisons if row.peak == "allocated")
        sentence = "live tensors take no more memory; the allocator's cache grew"
        if more > 0:
            sentence = (
                f"live tensors take {format_size(more)} more, within tolerance; the allocator's "
                "cache grew"
            )
        notes = [Note(NoteKind.BREAKDOWN, sentence)]
    old = case.entry.breakdowns if case.entry else ()
    causes, lead = explain(
        Growth(beyond[0], old, case.measurement.attributions, case.toolchain_lead)
    )
    notes = [*_pinned_by(case.measurement), *notes]
    if beyond[0].peak == "reserved":
        notes += _from_before(case.measurement, beyond[0], beyond[0].excess)
    verdict = _verdict(case, Kind.REGRESSED, finding, notes, failed=True, lead=lead)
    return _updatable(case, replace(verdict, causes=causes), "if this is intended")


def _change(case: Judged, row: Comparison) -> str:
    """Return a figure's change as text: "peak allocated grew by 512.00 MiB (+4.1%)"."""
    difference, baseline = row.difference or 0, row.baseline or 0
    share = f" ({100 * difference / baseline:+.1f}%)" if baseline else ""
    place = case.on_device(row.device)
    if case.policy.against:
        side = "above" if difference > 0 else "below"
        amount = f"{format_size(abs(difference))}{share}"
        return f"{row.title}{place} is {amount} {side} that of {case.policy.against}"
    verb = "grew" if difference > 0 else "shrank"
    return f"{row.title}{place} {verb} by {format_size(abs(difference))}{share}"


def _sizes(case: Judged, row: Comparison) -> str:
    """Return a figure's old and new size: ": 2014.44 -> 2264.44 MiB"; "" between two devices."""
    if case.policy.against:
        return ""
    old, new = format_size(row.baseline or 0), format_size(row.measured)
    if old[-3:] == new[-3:]:  # write a common unit once
        old = old.rpartition(" ")[0]
    return f": {old} -> {new}"


def _less_or_larger(limit: Limit, nbytes: int, use_less: str) -> str:
    """Return the advice for an exceeded limit: use less or, unless it is a card's, raise it."""
    less = LESS_OF.get(limit.peak, use_less)
    return f"try {less}{'' if limit.name == 'card' else _declare(limit.name, nbytes)}"


def _use_less(case: Judged, device: int) -> str:
    """Return how to lower a device's peak: keep less memory, or else use less.

    Keep less if most of the peak is garbage, memory of earlier forward passes, or uncategorized.
    """
    if case.measurement.garbage * 2 > case.measurement.peak_allocated:
        return KEEP_LESS
    for attribution in case.measurement.attributions[device : device + 1]:
        categories = attribution.breakdown.categories
        if (categories.get("other", 0) + attribution.kept) * 2 > sum(categories.values()):
            return KEEP_LESS
    return USE_LESS


def _declare(name: str, nbytes: int) -> str:
    """Return a clause that suggests a larger limit, rounded up to a hundredth of its unit."""
    unit = MIB if name == "max_mib_per_sample" else GIB
    number = -(-nbytes * 100 // unit) / 100
    return f"; or, if the step may take that much, declare {name}={number:.10g}"
