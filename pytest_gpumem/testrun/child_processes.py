"""Sentences on the memory of processes that a test started: it is in no figure of the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.children import value_notes
from pytest_gpumem.notes import Note, NoteKind, notes_of
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.testrun.run import Run

MAX_SHOWN: Final = 4
"""processes on one device that have a size each in a note"""


def child_notes(run: Run) -> Iterator[Note]:
    """Yield notes on the child processes of a test that has ended.

    They name no process by its number, so that they are the same in every run.
    """
    if not run.children:
        return
    reserved: dict[int, list[int]] = {}
    for child in run.children:
        for device, peak in child.peaks.items():
            reserved.setdefault(device, []).append(peak.reserved)
    shown, excesses, own_peaks = [], [], run.meter.peaks()
    for device, sizes in sorted(reserved.items()):
        sizes_text = " and ".join(format_size(size) for size in sorted(sizes, reverse=True))
        if len(sizes) > MAX_SHOWN:
            sizes_text = (
                f"at most {format_size(max(sizes))} each, {format_size(sum(sizes))} in all,"
            )
        shown.append(f"{sizes_text} of device {device}")
        # Each process has a CUDA context of its own.
        room = run.info.total_memory - run.info.context * (1 + len(sizes))
        limit = room if run.limit is None else min(run.limit, room)
        total = sum(sizes) + (own_peaks[device].reserved if device < len(own_peaks) else 0)
        if total > limit:  # each is measured by itself
            excesses.append(
                "together with the test's own memory, child processes may use up to "
                f"{format_size(total)} on device {device} at the same time: the limit is "
                f"{format_size(limit)}"
            )
    if shown:
        number = sum(bool(child.peaks) for child in run.children)
        parts = dict.fromkeys(child.part for child in run.children if child.peaks)
        only = f"part {min(parts)} includes" if len(parts) == 1 else "parts of the ranks include"
        sentence = f"{_counted(number)} reserved {', '.join(shown)}, which only the {only}"
        yield Note(NoteKind.CHILD_PROCESS, sentence)
    yield from notes_of(NoteKind.CHILD_PROCESS, excesses)
    yield from value_notes(run.children, run.root)
    silent = sum(not child.ended for child in run.children)
    if silent:
        sentence = (
            f"{_counted(silent)} used the GPU and reported no peak: a process reports its "
            "peak at its normal end, and not after a signal or os._exit()"
        )
        yield Note(NoteKind.CHILD_PROCESS, sentence)


def _counted(number: int) -> str:
    return "1 child process" if number == 1 else f"{number} child processes"
