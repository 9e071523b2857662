"""Keepers of the blocks at a peak that the baseline's had not: found by a run of its own.

A recording has told which blocks were alive at the peak. In another run of the same step the search
waits for the last hook before the peak and for the first one after it: there it looks up the same
blocks, by their number among the allocations, and climbs to the objects that refer to them. The
search holds no tensor, and allocates nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.allocator_view import VIEW
from pytest_gpumem.attribution.attributor import origin_of
from pytest_gpumem.attribution.referrers import kept_memory
from pytest_gpumem.attribution.sites import place_of_origin
from pytest_gpumem.measurement import Keeper

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from pytest_gpumem.attribution.hints import Scene
    from pytest_gpumem.attribution.recording import Recording
    from pytest_gpumem.attribution.referrers import Kept
    from pytest_gpumem.measurement import Category, LineKey
    from pytest_gpumem.source_lines import Line

MAX_BLOCKS: Final = 100
"""blocks of one line that are looked up, the oldest and the largest first"""


class _Candidate(NamedTuple):
    """A block alive at the peak, of a line that has more blocks than in the baseline."""

    key: LineKey
    line: int
    category: Category
    nbytes: int
    number: int
    """among the device's allocations"""
    requested: int
    """bytes that were asked for"""
    step: int | None
    """the step of training that allocated it; None where steps are not known"""
    current: bool
    """whether that step was under way at the peak"""
    last_moment: int
    """the number of moments that it outlived"""


class _Name(NamedTuple):
    """The name of a block's keeper."""

    text: str
    direct: bool
    """whether it refers to the block's tensor, and not to a graph that has it"""


class KeeperSearch:
    """The search in one run for the keepers of one device's blocks."""

    def __init__(self, scene: Scene, extra: Mapping[LineKey, int], root: Path) -> None:
        """Look for keepers.

        Args:
            scene: the peak, as it was recorded in an earlier run.
            extra: the number of blocks that each source line has more than in the baseline.
            root: the project's folder.
        """
        self._extra = extra
        self._device = scene.device.index
        self._candidates = list(_candidates(scene, extra, root))
        moments = scene.device.recording.moments
        last = bisect_right(moments, scene.time)
        allocations = _allocations(scene)
        self._allocated = {
            number: allocations[bisect_right(scene.device.history.times, moments[number - 1])]
            for number in (last, last + 1)
            if 0 < number <= len(moments)
        }
        """by the number of a moment: how many blocks had been allocated until then"""
        self._names: dict[int, _Name] = {}
        """by the index of a candidate"""

    @property
    def has_candidates(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._candidates and self._allocated)

    def at_moment(self, recording: Recording) -> None:
        """Look for keepers, if this is the moment before the peak or the one after it."""
        number = len(recording.moments)
        if number not in self._allocated:
            return
        # Counted from the moment backwards: fixtures of wider scope, which only the first run sets
        # up, may have allocated before.
        ages = {
            self._allocated[number] - candidate.number: index
            for index, candidate in enumerate(self._candidates)
            if index not in self._names
            and candidate.number <= self._allocated[number]
            and candidate.last_moment >= number
        }
        places: dict[tuple[int, int], int] = {}
        freed: set[int] = set()
        age = 0
        for event in reversed(VIEW.snapshot()["device_traces"][self._device]):
            if event["action"] == "free_requested":
                freed.add(event["addr"])
            elif event["action"] == "alloc":
                index = ages.get(age, -1)
                age += 1
                address, size = event["addr"], event["size"]
                # Of another size it is another block: the run takes another course.
                same = index >= 0 and size == self._candidates[index].requested
                if same and address not in freed:
                    places[self._device, address] = index
                freed.discard(address)
        if not places:
            return
        memory = kept_memory(
            {place: self._candidates[index].nbytes for place, index in places.items()}
        )
        for place, index in places.items():
            keeper_name = _name_of(memory[place], self._candidates[index], recording)
            if keeper_name is not None:
                self._names[index] = keeper_name

    def keepers(self) -> tuple[Keeper, ...]:
        """Return the keepers of the extra blocks, of each line the largest first."""
        groups: dict[tuple[LineKey, int, Category, str], list[_Candidate]] = {}
        for key, number in self._extra.items():
            members = [
                (index, candidate)
                for index, candidate in enumerate(self._candidates)
                if candidate.key == key
            ]
            # Which of a line's blocks the baseline had not is not known. Those of earlier steps
            # come first, then those that something refers to besides the graph.
            members.sort(key=lambda member: self._rank(*member))
            for index, candidate in members[:number]:
                keeper_name = self._names.get(index)
                if keeper_name is not None:
                    group = (key, candidate.line, candidate.category, keeper_name.text)
                    groups.setdefault(group, []).append(candidate)
        keepers = [
            Keeper(
                path=key[0],
                line=line,
                category=category,
                text=description,
                nbytes=sum(candidate.nbytes for candidate in group),
                blocks=len(group),
                steps=tuple(sorted({member.step for member in group if member.step is not None})),
            )
            for (key, line, category, description), group in groups.items()
        ]
        return tuple(sorted(keepers, key=lambda keeper: (-keeper.nbytes, keeper.text)))

    def _rank(self, index: int, candidate: _Candidate) -> tuple[bool, bool, bool, int]:
        keeper_name = self._names.get(index)
        direct = keeper_name is not None and keeper_name.direct
        return keeper_name is None, candidate.current, not direct, candidate.number


def _candidates(scene: Scene, extra: Mapping[LineKey, int], root: Path) -> Iterator[_Candidate]:
    """Yield the blocks alive at the peak of the lines in question."""
    device = scene.device
    events = device.recording.events[device.index]
    allocations = _allocations(scene)
    ends = _step_ends(scene)
    peak_step = bisect_right(ends, scene.time)
    number: dict[LineKey, int] = {}
    for block in sorted(scene.alive, key=lambda block: block.start):
        if block.start < 0:
            continue
        block_origin = origin_of(device, block)
        key = place_of_origin(block_origin, root)
        if key not in extra or number.get(key, 0) == MAX_BLOCKS:
            continue
        number[key] = number.get(key, 0) + 1
        step = bisect_right(ends, block.time)
        yield _Candidate(
            key=key,
            line=block_origin.line,
            category=block_origin.category,
            nbytes=block.size,
            number=allocations[block.start + 1],
            requested=events[block.start]["size"],
            step=step + 1 if step < len(ends) else None,
            current=step == peak_step,
            last_moment=bisect_right(device.recording.moments, block.end_time),
        )


def _allocations(scene: Scene) -> list[int]:
    """Return how many blocks had been allocated before the first event, and after each."""
    events = scene.device.recording.events[scene.device.index]
    return list(accumulate((event["action"] == "alloc" for event in events), initial=0))


def _step_ends(scene: Scene) -> list[float]:
    """Return the end of each step of training: of the optimizer that stepped first."""
    steps = scene.passes("optimizer")
    first: Iterable[int] = steps[0].fresh if steps else ()
    lead = next(iter(first), None)
    return [step.end for step in steps if lead in step.fresh]


def _name_of(memory: Kept, candidate: _Candidate, recording: Recording) -> _Name | None:
    """Return the name of a block's keeper, in words; None where none has a name."""
    if memory.is_gradient and not memory.root:
        lines = ", ".join(map(_file_and_line, recording.zeroed_gradients))
        since = f", since zero_grad(set_to_none=False) at {lines}" if lines else ""
        return _Name(f".grad of the parameters{since}", direct=not candidate.current)
    keeper = memory.keeper()
    if not keeper.root:
        return None
    way = f" ({', '.join(keeper.way)})" if keeper.way else ""
    name = f"{keeper.root}{way}"
    if keeper is memory:
        return _Name(name, direct=True)
    description = f"the graph of {name}"
    line = recording.retained_graphs.get(keeper.sequence)
    if line is not None:
        description += f", which backward(retain_graph=True) did not free ({_file_and_line(line)})"
    return _Name(description, direct=False)


def _file_and_line(line: Line) -> str:
    return f"{PurePath(line.filename).name}:{line.line}"
