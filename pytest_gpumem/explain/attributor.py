"""Explain a peak: compute its breakdown, sites and timeline from a recording."""

from __future__ import annotations

import os
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pytest_gpumem.explain import hints
from pytest_gpumem.explain.categories import Blocks
from pytest_gpumem.explain.segments import segment_requests
from pytest_gpumem.explain.sites import BlockOrigin, origin, place_of_origin, sites, users_frame
from pytest_gpumem.explain.timeline import course_of, drawn_timeline
from pytest_gpumem.measurement import CATEGORIES, Attribution, Breakdown, LinePeak, Peak
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.recorder import Recorder
from pytest_gpumem.recording.recording import Call
from pytest_gpumem.sizes import format_size
from pytest_gpumem.source_lines import forget_changed_files, qualified, shown_path, source_code

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pytest_gpumem.measurement import Category, Site
    from pytest_gpumem.recording.allocator_log import Block
    from pytest_gpumem.recording.recording import Recorded, Recording, Span

MAX_SITES: Final = 50
"""maximum number of sites to keep per device, the largest ones"""
MAX_LINES: Final = 50
"""maximum number of source lines per device whose own peaks are kept, the largest ones"""


class Attributor:
    """Explains the peaks of one recording."""

    def __init__(self, recording: Recording, root: Path) -> None:
        self._recording = recording
        self._root = root
        self._devices: dict[int, Blocks] = {}
        forget_changed_files()

    def explained(
        self, index: int, peak: Peak, foreign: Peak, windows: Sequence[Span], *, timeline: bool
    ) -> tuple[Attribution, hints.AnalyzedPeak] | None:
        """Return the attribution of a device's peak, and the peak as analyzed; None if unknown.

        ``foreign`` is memory that is not the step's, such as that of earlier tests. It is not part
        of the peak, which was measured in the ``windows``.
        """
        device = self._devices.get(index)
        if device is None:
            device = self._devices[index] = Blocks(self._recording, index)
        blocks = {block for block in device.blocks if block.start >= 0}
        initial = [block for block in device.blocks if block.start < 0]
        unseen = sum(block.size for block in initial) - foreign.allocated
        # It is known how many bytes of the initial memory are the step's, but not which blocks.
        # The step used the tagged blocks (the recording saw tensors in them): count these as its
        # own, unless they exceed these bytes.
        tagged = [block for block in initial if block.tags]
        tagged_bytes = sum(block.size for block in tagged)
        if unseen > 0 and tagged_bytes <= unseen:
            blocks |= set(tagged)
            unseen -= tagged_bytes
        deltas = device.deltas(blocks)
        totals = device.totals(deltas, unseen)
        indices = [i for span in windows for i in device.history.events_in(span)]
        if not indices:
            return None
        top = max(indices, key=lambda index: (totals[index + 1], -index))
        alive = [block for block in device.blocks if block in blocks and block.alive(top)]
        categories: Counter[Category] = Counter()
        for block in alive:
            categories[device.categories[block]] += block.size
        categories["other"] += unseen
        residue = peak.allocated - sum(categories.values())
        notes = []
        if residue:
            categories["other"] += residue
            if categories["other"] < 0:
                return None
            sentence = (
                f"the allocator's history explains {format_size(totals[top + 1])} of this "
                f"peak of {format_size(peak.allocated)}; the rest is in the "
                "category other"
            )
            notes.append(Note(NoteKind.BREAKDOWN, sentence))
        breakdown = Breakdown(
            {name: categories[name] for name in CATEGORIES if categories[name]},
            cached=max(0, device.reserved(top) - foreign.reserved - peak.allocated),
            sites=sites((origin_of(device, block) for block in alive), self._root)[:MAX_SITES],
            lines=line_peaks(device, blocks, windows, self._root),
            unsplit=sum(block.unsplit for block in alive),
            autocast=self._recording.autocast,
            course=course_of(indices, totals),
        )
        analyzed = hints.AnalyzedPeak(device, blocks, totals, indices, top, breakdown)

        def place_of(block: Block) -> tuple[str, int, str, str]:
            place = origin_of(device, block)
            path, function, code = place_of_origin(place, self._root)
            return path, place.line, function, code

        def line_of(block: Block) -> str:
            path, line, function, _ = place_of(block)
            return f"{path}:{line}{f' in {function}' if function else ''}" if path else ""

        drawn = None
        if timeline:
            drawn = drawn_timeline(analyzed, deltas, foreign.reserved, line_of)
        requests = segment_requests(device, indices, foreign.reserved, place_of)
        earlier = hints.earlier_activations(analyzed) if top >= 0 else ()
        attribution = Attribution(
            *(breakdown, drawn, tuple(notes), hints.of_peak(analyzed)),
            segments=requests,
            kept=sum(block.size for _, blocks in earlier for block in blocks),
        )
        return attribution, analyzed


def breakdown_of(recorded: Recorded, root: Path) -> Breakdown | None:
    """Return the breakdown of a run's peak on its first device; None where it is not known."""
    recording = recorded.recording
    if recording is None or recording.overflowed:
        return None
    measured = recorded.devices[0], recorded.peaks[""][0], recorded.foreign[0]
    windows = recorded.windows[""]
    explained = Attributor(recording, root).explained(*measured, windows, timeline=False)
    return explained[0].breakdown if explained else None


def line_peaks(
    device: Blocks, counted: Collection[Block], windows: Sequence[Span], root: Path
) -> tuple[LinePeak, ...]:
    """Return the most memory that each source line had at any one time, the largest lines first.

    A peak may move to another moment; a line's own peak shows whether the line itself grew.
    """
    changes: dict[tuple[str, int, str, bool], list[tuple[int, int]]] = {}
    for block in counted:
        if not windows[0].start <= block.time <= windows[-1].end:
            continue
        frame = users_frame(block.frames)
        running = None if frame is not None else device.pass_at(block.time)
        if frame is not None:
            place = frame["filename"], frame["line"], frame["name"], False
        elif running is not None and running.line is not None:
            called = running.line
            place = called.filename, called.line, called.function, running.name == "backward"
        else:
            continue
        line = changes.setdefault(place, [])
        line.append((block.start, block.size))
        if block.end is not None:
            line.append((block.end, -block.size))
    peaks = []
    for (filename, number, function, calls_pass), deltas in changes.items():
        deltas.sort()
        peak_bytes = max(accumulate(size for _, size in deltas))
        peaks.append((peak_bytes, filename, number, function, calls_pass))
    peaks.sort(key=lambda peak: (-peak[0], *peak[1:]))
    return tuple(
        LinePeak(
            shown_path(filename, root),
            number,
            qualified(filename, number) or function,
            source_code(filename, number),
            peak_bytes,
            calls_pass,
        )
        for peak_bytes, filename, number, function, calls_pass in peaks[:MAX_LINES]
    )


def lines_before(
    analyzed: hints.AnalyzedPeak, spans: Sequence[Span], root: Path
) -> tuple[Site, ...]:
    """Return the lines whose memory in a peak was allocated before the part of the test began.

    ``spans`` are the part's; it began with the last one that started before the peak.
    """
    began = max(
        (span.start for span in spans if span.start <= analyzed.time), default=analyzed.time
    )
    blocks = [block for block in analyzed.alive if block.start < 0 or block.time < began]
    origins = [origin_of(analyzed.device, block) for block in blocks]
    seen = sum(block.size for block in analyzed.blocks if block.start < 0)
    unseen = analyzed.totals[0] - seen  # the total of this memory is known, not its blocks
    if unseen > 0:
        origins.append(BlockOrigin("", 0, "", "", "other", unseen))
    return sites(origins, root)


def origin_of(device: Blocks, block: Block) -> BlockOrigin:
    """Return the source line, module and category of a block."""
    category = device.categories[block]
    running = device.pass_at(block.time)
    maker = device.made_in(block)
    names = [tag.name for tag in block.tags if tag.category == category]
    # A tensor may have several modules' tags: the longest path begins at the outermost module.
    name = max(names, key=lambda path: path.count("."), default="")
    module = maker.path if isinstance(maker, Call) else ""
    if name:
        module = name.rpartition(".")[0]
    return origin(
        block.frames,
        running.line if running else None,
        module=module,
        category=category,
        nbytes=block.size,
    )


class RecordedChild:
    """Records a child process, and attributes its peaks for the parent."""

    def __init__(self, root: str) -> None:
        """Start recording; CUDA must be initialized. File names are relative to ``root``."""
        self._root, self._owner = Path(root), os.getpid()
        self._recorder = Recorder()
        self._recorder.start()

    def attributions(
        self, measured: Mapping[str, tuple[Mapping[int, Peak], Span]]
    ) -> dict[str, dict[int, Any]]:
        """Stop recording; return the attribution of each device's peak as plain data, by part.

        A device is left out if the recording does not show its peak; in a fork of the process the
        result is {}.

        Args:
            measured: each part's peaks and its time span, by part ("" is the whole run).
        """
        if os.getpid() != self._owner:
            return {}
        recording = self._recorder.stop()
        if recording.overflowed:
            return {}
        attributor = Attributor(recording, self._root)
        return {
            part: {
                index: msgspec.to_builtins(explained[0])
                for index, peak in peaks.items()
                if peak.reserved
                and (
                    explained := attributor.explained(
                        *(index, peak, Peak(0, 0), [span]), timeline=False
                    )
                )
            }
            for part, (peaks, span) in measured.items()
        }
