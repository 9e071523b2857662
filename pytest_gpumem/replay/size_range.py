"""The range of a test's peaks if they depend on choices that only a GPU makes.

Such choices are a library's workspace size, how long another stream uses a tensor, or which kernel
is fastest. PyTorch's allocator serves the same requests again, with the smallest and with the
largest possible sizes and times (:mod:`pytest_gpumem.replay.allocator_replay`).

Served on new streams, the requests also show how much the test reserves alone, if its segments
contained memory of earlier tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.measurement import Peak, PeakRange
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.replay.allocator_replay import AllocatorReplay, unpinned
from pytest_gpumem.replay.match_alternatives import NoRangeError
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from pytest_gpumem.devices.base import Alternatives, RangeEnd
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.recording.recording import Recording
    from pytest_gpumem.replay.allocator_replay import ReplayedRun
    from pytest_gpumem.spec import MemorySpec

SHARES: Final = (0.25, 0.5, 0.75)
"""late frees are replayed with these fractions of their longest possible delay, besides 0 and 1"""
IN_DOUBT: Final = NoteKind.EARLIER_SEGMENTS
"""kind of the note on an uncertain peak reserved, which a replay resolves"""
REPLACED_NOTES: Final = (NoteKind.STREAMS, NoteKind.TIMING)
"""kinds of the warnings that figures may be higher, which a range replaces"""


def is_replayed(run: ReplayedRun) -> bool:
    """Return whether to replay a run's requests to get the range of its peaks.

    Tests for leaks or growth, searches, and tests with several batch sizes are not replayed.
    """
    spec, alternatives = run.spec, run.device.alternatives()
    if spec.steady or spec.max_leak_mib is not None or spec.batch_sizes or run.searches:
        return False
    return alternatives.smaller or alternatives.larger or run.meter.isolation.is_reserved_in_doubt


def with_ranges(
    run: ReplayedRun,
    measured: Mapping[str, tuple[MemorySpec, Measurement]],
    recording: Recording | None,
) -> dict[str, tuple[MemorySpec, Measurement]]:
    """Return the measurements of a passed test and its parts with the ranges of their peaks.

    If segments of earlier tests make reserved peaks uncertain, the reserved peaks of a replay
    without these segments replace them.
    """
    results = dict(measured)
    if recording is None or not is_replayed(run):
        return results
    alternatives = run.device.alternatives()
    is_uncertain = alternatives.smaller or alternatives.larger
    try:
        with AllocatorReplay(run, recording, list(measured), alternatives).checked() as replay:
            if run.meter.isolation.is_reserved_in_doubt:
                for part, (spec, kept) in measured.items():
                    if not (alone := replay.alone[part]):  # the part did not run
                        continue
                    peaks = tuple(
                        replace(peak, reserved=served.reserved)
                        for peak, served in zip(kept.peaks, alone, strict=True)
                    )
                    notes = [note for note in kept.notes if note.kind is not IN_DOUBT]
                    results[part] = spec, replace(kept, peaks=peaks, notes=tuple(notes))
            if is_uncertain:
                results = _ranged(run, results, replay, alternatives)
    except NoRangeError as error:
        if not is_uncertain:  # leave the note on segments of earlier tests
            return results
        note = Note(NoteKind.RANGE, f"{error}: {alternatives.reason}")
        whole_spec, whole = results[""]
        results[""] = whole_spec, replace(whole, notes=(*whole.notes, note))
    return results


def _ranged(
    run: ReplayedRun,
    measured: Mapping[str, tuple[MemorySpec, Measurement]],
    replay: AllocatorReplay,
    alternatives: Alternatives,
) -> dict[str, tuple[MemorySpec, Measurement]]:
    """Return measurements with ranges; raise NoRangeError if the test does not fit at a bound."""
    tries: list[tuple[RangeEnd, Collection[str], float]] = []
    if alternatives.smaller:
        tries.append(("least", (), 1))
    if alternatives.larger:
        tries.append(("most", (), 1))
        # More requests may reserve less memory, because later requests reuse their freed blocks: so
        # also replay without those of each reason.
        reasons = replay.reasons()
        tries += [("most", (reason,), 1) for reason in reasons if len(reasons) > 1]
        # A block that is freed earlier may be split, and another segment reserved: so also replay
        # with shorter delays.
        tries += [("most", (), share) for share in SHARES if replay.has_late_frees()]
    replays = [replay.peaks(end, without, share=share) for end, without, share in tries]
    ends = [peaks for peaks, _ in replays]
    unfit = sum(refused for _, refused in replays)
    refusals = []
    if replay.passed_over:
        sentence = (
            "the limit holds because other streams were idle: on a GPU, PyTorch may run out of "
            f"memory at a request of {format_size(replay.passed_over)}, although a block for which "
            "it waits (record_stream) has room (pytorch#189504)"
        )
        refusals.append(Note(NoteKind.STREAMS, sentence))
    results = {}
    for part, (part_spec, measurement) in measured.items():
        peaks_of_ends = [measurement.peaks, *(parts[part] for parts in ends)]
        low, high = _of_each_device(peaks_of_ends, min), _of_each_device(peaks_of_ends, max)
        if alternatives.margin:
            low = tuple(Peak(peak.allocated, peak.allocated) for peak in low)
            cap = run.limit or run.info.total_memory
            high = tuple(widened(peak, alternatives.margin, cap, full=unfit > 0) for peak in high)
        spanned = PeakRange(low, high, alternatives.reason, alternatives.judged)
        figures = []
        for name in ("allocated", "reserved"):
            sizes = [
                format_size(max(getattr(peak, name) for peak in peaks))
                for peaks in (spanned.least, spanned.most)
            ]
            if sizes[0] != sizes[1]:
                figures.append(f"{name} {sizes[0]} to {sizes[1]}")
        notes = [note for note in measurement.notes if note.kind not in REPLACED_NOTES]
        notes += [] if part else refusals
        if figures:
            judged = "; the largest figures are compared with limits" if spanned.judged else ""
            if tuple(map(unpinned, measurement.peaks)) == spanned.most:
                judged = "; the test's figures are the largest"
            sentence = f"{', '.join(figures)}: {spanned.reason}{judged}"
            notes.append(Note(NoteKind.RANGE, sentence))
        results[part] = part_spec, replace(measurement, range=spanned, notes=tuple(notes))
    return results


def _of_each_device(
    runs: Iterable[tuple[Peak, ...]], choose: Callable[[Iterable[int]], int]
) -> tuple[Peak, ...]:
    """Choose the smallest or the largest figures of several runs, for each device."""
    return tuple(
        Peak(choose(peak.allocated for peak in peaks), choose(peak.reserved for peak in peaks))
        for peaks in zip(*runs, strict=True)
    )


def widened(peak: Peak, percent: int, cap: int, *, full: bool) -> Peak:
    """Return an upper bound raised by the memory that may be reserved beyond it.

    Args:
        peak: the largest of several runs.
        percent: additional bytes that may be reserved, in percent of the reserved bytes.
        cap: bytes that can be reserved: at this limit the allocator empties its cache, and PyTorch
            chooses a workspace that fits.
        full: whether the largest sizes did not fit: then a size in between may have filled the
            memory.
    """
    if full:
        return Peak(max(peak.allocated, cap), max(peak.reserved, cap))
    reserved = min(cap, peak.reserved * (100 + percent) // 100)
    return Peak(peak.allocated, max(peak.reserved, reserved))
