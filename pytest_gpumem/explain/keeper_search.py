"""Find the keepers of the blocks that a peak has beyond its baseline, in another run.

A recording shows which blocks were alive at the peak. In another run of the same step the search
waits for the last hook before the peak and the first one after it. There it identifies the same
blocks by counting allocations, and climbs to the objects that refer to them. If no name leads to a
block and a garbage collection frees it, the block was garbage at that moment. The search keeps no
tensor alive, and allocates no device memory.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from math import inf
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.explain.attributor import origin_of
from pytest_gpumem.explain.keeper_choice import KeptBlock, choices
from pytest_gpumem.explain.sites import place_of_origin, users_frame
from pytest_gpumem.measurement import Keeper
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.referrers import BlockKeeper, kept_memory
from pytest_gpumem.recording.ways import shared_words, with_way
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.breakdowns import SiteKey
    from pytest_gpumem.explain.hints import AnalyzedPeak
    from pytest_gpumem.measurement import Category, ExtraBlocks
    from pytest_gpumem.recording.recording import Recording
    from pytest_gpumem.source_lines import Line

MAX_BLOCKS: Final = 100
"""maximum number of blocks of one line to look up, the oldest first"""
CYCLES: Final = "reference cycles that Python's garbage collector has not freed yet"
Identity = tuple[int, str, int]
"""requested bytes, user file and user line of an allocation"""


class _Candidate(NamedTuple):
    """A block alive at the peak, on a line in ``extra`` (see :class:`KeeperSearch`)."""

    key: SiteKey
    """the source line and category whose growth the block may belong to; the category is "" where
    all categories of the line count together"""
    line: int
    category: Category
    nbytes: int
    unsplit: int
    """bytes beyond the request"""
    start: int
    """index of the event that allocated it"""
    step: int | None
    """number of the training step that allocated it, from 1; None if no optimizer stepped after
    the allocation"""
    earlier: bool
    """whether the block was allocated in a step before that of the peak; without an optimizer, each
    forward pass is a step"""
    last_moment: int
    """number of the last moment before the block was freed; a moment is the start or the end of a
    module call or of a pass"""


class _Naming(NamedTuple):
    """The parts of a keeper's name in a report."""

    before: str
    kept: BlockKeeper
    after: str

    @property
    def key(self) -> tuple[str, ...]:
        """A key that is equal for blocks that one object keeps in the same way."""
        return self.before, self.kept.name, self.kept.holder, self.after


class KeeperSearch:
    """Searches one run for the keepers of one device's blocks."""

    def __init__(
        self, analyzed: AnalyzedPeak, extra: Mapping[SiteKey, ExtraBlocks], root: Path
    ) -> None:
        """Prepare the search for the keepers of ``extra`` blocks.

        ``extra`` has, for each line, how many more blocks it has at the analyzed peak than in the
        baseline; for a peak over a limit, how many blocks each of its largest lines has.
        """
        self._extra = extra
        self._device = analyzed.device.index
        self._number: Counter[SiteKey] = Counter()
        """number of blocks of each line, looked up or not"""
        self._candidates = list(self._candidates_of(analyzed, root))
        self._sizes = frozenset(
            analyzed.device.history.events[candidate.start]["size"]
            for candidate in self._candidates
        )
        recording = analyzed.device.recording
        last = recording.moments_until(analyzed.time)
        self._at_moment: dict[int, dict[tuple[Identity, int], int]] = {}
        """by moment number: indices of the candidates that outlive the moment. A candidate's key is
        the identity of its allocation, and its number among the allocations of that identity,
        counted backwards from the moment"""
        history = analyzed.device.history
        for number in (last, last + 1):
            if not 0 < number <= recording.moment:
                continue
            end = bisect_right(history.times, recording.time_of(number))
            by_start = {
                candidate.start: index
                for index, candidate in enumerate(self._candidates)
                if candidate.last_moment >= number
            }
            self._at_moment[number] = {
                allocation: by_start[end - 1 - place]
                for place, allocation in self._allocations(history.events[:end])
                if end - 1 - place in by_start
            }
        self._namings: dict[int, _Naming] = {}
        """the parts of each keeper's name, by index of the candidate"""

    def _candidates_of(self, analyzed: AnalyzedPeak, root: Path) -> Iterator[_Candidate]:
        """Yield the blocks alive at the peak that the lines in ``extra`` allocated."""
        device = analyzed.device
        steps = analyzed.passes("optimizer")
        # Of several optimizers, the one that stepped first ends each training step.
        lead = next(iter(steps[0].fresh), None) if steps else None
        ends = [each.end for each in steps if lead in each.fresh]
        rounds = ends or [call.end for call in analyzed.forwards]
        peak_round = bisect_right(rounds, analyzed.time)
        first = next((call.start for call in analyzed.forwards), inf)
        for block in sorted(analyzed.alive, key=lambda block: block.start):
            if block.start < 0:
                continue
            block_origin = origin_of(device, block)
            line = place_of_origin(block_origin, root)
            by_category: SiteKey = (*line, block_origin.category)
            key = by_category if by_category in self._extra else (*line, "")
            # PyTorch itself keeps the workspaces, as it did in the baseline.
            if key not in self._extra or block_origin.category == "workspaces":
                continue
            self._number[key] += 1
            if self._number[key] > MAX_BLOCKS:
                continue
            step = bisect_right(ends, block.time)
            yield _Candidate(
                key=key,
                line=block_origin.line,
                category=block_origin.category,
                nbytes=block.size,
                unsplit=block.unsplit,
                start=block.start,
                step=step + 1 if step < len(ends) else None,
                earlier=first <= block.time and bisect_right(rounds, block.time) < peak_round,
                last_moment=device.recording.moments_until(block.end_time),
            )

    def _allocations(
        self, events: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[int, tuple[Identity, int]]]:
        """Yield the allocations of the candidates' sizes, the last one first.

        For each, yield its place counted from the last event, its identity, and its number among
        the allocations of that identity. Each identity has a count of its own, because another run
        may make other allocations in between: only a first run sets up fixtures of wider scope.
        """
        number: Counter[Identity] = Counter()
        for place, event in enumerate(reversed(events)):
            if event["action"] == "alloc" and event["size"] in self._sizes:
                frame = users_frame(event.get("frames") or ())
                line = (frame["filename"], frame["line"]) if frame else ("", 0)
                identity = (event["size"], *line)
                number[identity] += 1
                yield place, (identity, number[identity])

    @property
    def has_candidates(self) -> bool:
        """Whether there is any block to search for."""
        return bool(self._candidates)

    @property
    def has_moments(self) -> bool:
        """Whether a block is alive at a moment next to the peak, where its keeper can be found."""
        return any(self._at_moment.values())

    def at_moment(self, recording: Recording) -> None:
        """Look for keepers, if this is the moment before or after the peak."""
        candidates = self._at_moment.get(recording.moment, {})
        if all(index in self._namings for index in candidates.values()):
            return
        with without_collections():  # a snapshot makes objects, which may trigger a collection
            self._look(candidates, recording)

    def _look(self, candidates: Mapping[tuple[Identity, int], int], recording: Recording) -> None:
        events = VIEW.snapshot()["device_traces"][self._device]
        last_use = {
            event["addr"]: len(events) - 1 - index
            for index, event in enumerate(events)
            if event["action"] in {"alloc", "free_requested"}
        }
        """by address: index, from the end, of the last event of a block at this address"""
        places = {
            (self._device, events[-1 - place]["addr"]): candidates[allocation]
            for place, allocation in self._allocations(events)
            if allocation in candidates and last_use[events[-1 - place]["addr"]] == place
        }
        places = {place: index for place, index in places.items() if index not in self._namings}
        if not places:
            return
        memory = kept_memory(
            {place: self._candidates[index].nbytes for place, index in places.items()}
        )
        unnamed = {place for place, kept in memory.items() if not kept.name}
        garbage = self._collected() if unnamed else set()
        for place, index in places.items():
            kept = memory[place]
            if place in unnamed and place[1] in garbage:
                kept = BlockKeeper(name=CYCLES, way=kept.way)
            naming = _naming_of(kept, recording)
            if naming is not None:
                self._namings[index] = naming

    def _collected(self) -> set[int]:
        """Collect garbage; return the addresses of the blocks that this frees."""
        before = len(VIEW.snapshot()["device_traces"][self._device])
        gc.collect()
        events = VIEW.snapshot()["device_traces"][self._device][before:]
        return {event["addr"] for event in events if event["action"] == "free_requested"}

    def keepers(self) -> tuple[Keeper, ...]:
        """Return the keepers of the extra blocks, the largest first."""
        keepers = []
        for key, extra in self._extra.items():
            members = [at for at, candidate in enumerate(self._candidates) if candidate.key == key]
            names = _texts([self._namings.get(at) for at in members])
            blocks = [
                KeptBlock(name, each.nbytes, each.unsplit, each.earlier)
                for name, each in zip(names, (self._candidates[at] for at in members), strict=True)
            ]
            number, found = self._number[key], len(blocks)
            if found != number:  # scale the growth down to the blocks that were looked up
                of_blocks, nbytes = extra.blocks * found // number, extra.nbytes * found // number
                extra = extra._replace(blocks=of_blocks, nbytes=nbytes)  # noqa: PLW2901
            for choice in choices(blocks, extra):
                own = [self._candidates[members[at]] for at in choice.blocks]
                # Blocks of one line may be of two categories.
                for category in dict.fromkeys(candidate.category for candidate in own):
                    group = [candidate for candidate in own if candidate.category == category]
                    steps = {candidate.step for candidate in group if candidate.step is not None}
                    keeper = Keeper(
                        path=key[0],
                        line=group[0].line,
                        category=category,
                        text=choice.name,
                        nbytes=sum(candidate.nbytes for candidate in group),
                        blocks=len(group),
                        steps=tuple(sorted(steps)),
                    )
                    keepers.append(keeper)
        return tuple(sorted(keepers, key=lambda keeper: (-keeper.nbytes, keeper.text)))


def _naming_of(kept: BlockKeeper, recording: Recording) -> _Naming | None:
    """Return the parts of a keeper's name; None if no name leads to the block."""
    if kept.is_gradient and kept.is_parameters and not kept.is_of_graph:
        lines = ", ".join(map(_file_and_line, recording.zeroed_gradients))
        since = f", since zero_grad(set_to_none=False) at {lines}" if lines else ""
        return _Naming("", BlockKeeper(name=f".grad of the parameters{since}"), "")
    if not kept.name:
        return None
    after = "".join(f" and {other}" for other in kept.others)
    if not kept.is_of_graph:
        return _Naming(".grad of " if kept.is_gradient else "", kept, after)
    line = recording.retained_graphs.get(kept.sequence)
    if line is not None:
        place = _file_and_line(line)
        after = f", which backward(retain_graph=True) did not free ({place}){after}"
    return _Naming("the graph of ", kept, after)


def _texts(namings: Sequence[_Naming | None]) -> list[str]:
    """Return the name of each block's keeper, "" without one.

    Blocks of one keeper get the same name, with the common part of their paths.
    """
    ways: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for naming in filter(None, namings):
        ways.setdefault(naming.key, []).append(naming.kept.way)
    return [
        ""
        if naming is None
        else naming.before
        + with_way(naming.kept.name, shared_words(ways[naming.key]))
        + naming.after
        for naming in namings
    ]


def _file_and_line(line: Line) -> str:
    return f"{PurePath(line.filename).name}:{line.line}"
