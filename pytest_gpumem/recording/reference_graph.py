"""Find which objects keep blocks of memory alive: reachability in a graph of references.

The graph leads from the program's names through objects to blocks. A name keeps the blocks that are
reachable from its object. Releasing an object frees the blocks that no name reaches without it.

Nothing here reads the running program: the graph is data.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    Keys = AbstractSet["Key"]

MOST: Final = 0.9
"""If a child keeps at least this share of the bytes that its parent keeps, the child is the holder
rather than the parent."""
MAX_OTHERS: Final = 2
"""maximum number of holders that are named besides the first one"""
MAX_SEPARATE_PARTS: Final = 2
"""maximum number of an object's parts that are named one by one; if more keep the same blocks, the
object is named"""

Key = int | tuple[Any, int]
"""an object's id, a block's device and address, or any other key that the graph's builder uses"""


class Name(NamedTuple):
    """A program's name for an object; if there are several, the first in sort order is reported."""

    is_foreign: bool
    """whether the name is in a library, such as PyTorch, rather than in the user's code"""
    lifetime: int
    """0: fixture; 1: global variable; from 2 on: local variable, outermost frame first"""
    text: str

    @property
    def is_local(self) -> bool:
        """Whether it is a local variable, which ends when its function returns."""
        return self.lifetime > 1


@dataclass
class Group:
    """Blocks that one object keeps alive."""

    name: Name
    path: tuple[Key, ...]
    """the objects from the one with the name to the one that keeps the blocks"""
    blocks: Keys
    others: list[Group] = field(default_factory=list)
    """other holders of some of these blocks, which are freed only if all their holders release
    them"""

    @property
    def shared(self) -> Keys:
        """The blocks that other holders keep alive as well."""
        return frozenset().union(*(other.blocks for other in self.others))


@dataclass
class ReferenceGraph:
    """References from names to blocks."""

    below: dict[Key, dict[Key, None]]
    """the objects and blocks that each object refers to"""
    names: dict[Key, list[Name]]
    """the names of each object that has any"""
    sizes: Mapping[Any, int]
    """bytes of each block"""
    tensors: Keys = frozenset()
    """tensors and graph nodes: they cannot be emptied, so the holder is what refers to them"""
    whole: Keys = frozenset()
    """lists and the like: each is one holder, even if two of its elements keep the same blocks"""
    weak: AbstractSet[tuple[Key, Key]] = frozenset()
    """references from an autograd graph to its inputs and parameters: if anything else keeps such a
    tensor, that is its holder, not the graph"""

    def __post_init__(self) -> None:
        self._above: dict[Key, list[Key]] = {}
        for key, children in self.below.items():
            for child in children:
                self._above.setdefault(child, []).append(key)

    def groups(self, at_most: int | None = None) -> list[Group]:
        """Return the groups of blocks that names reach, the one with most bytes first."""
        graph = self._without_weak()
        reached = {key: graph.reached([key]) for key in self.names}
        remaining = graph.reached(self.names)
        groups: list[Group] = []
        while remaining and len(groups) != at_most:
            group = graph._largest(reached, remaining, frozenset())
            group.others = self._others(group)
            groups.append(group)
            remaining -= group.blocks
        return groups

    def _without_weak(self) -> ReferenceGraph:
        """Return the graph without weak references to objects that names reach in another way."""
        if not self.weak:
            return self
        strong = {
            key: {child: None for child in children if (key, child) not in self.weak}
            for key, children in self.below.items()
        }
        reached = replace(self, below=strong, weak=frozenset()).all_below(self.names)
        for key, child in self.weak:
            if key in strong and child not in reached:
                strong[key][child] = None
        return replace(self, below=strong, weak=frozenset())

    def outermost_above(self, block: Key) -> Key:
        """Return the object farthest above a block; the block itself if nothing refers to it."""
        level, seen = [block], {block}
        while True:
            above = [parent for key in level for parent in self._above.get(key, ())]
            above = [key for key in dict.fromkeys(above) if key not in seen]
            if not above:
                return level[0]
            seen.update(above)
            level = above

    def reached(self, starts: Iterable[Key], without: Collection[Key] = frozenset()) -> set[Key]:
        """Return the blocks that are reachable without passing through ``without``."""
        return {key for key in self.all_below(starts, without) if key in self.sizes}

    def all_below(self, starts: Iterable[Key], without: Collection[Key] = frozenset()) -> set[Key]:
        """Return ``starts`` and all that they reach without passing through ``without``."""
        seen = {key for key in starts if key not in without}
        pending = [*seen]
        while pending:
            for child in self.below.get(pending.pop(), ()):
                if child not in seen and child not in without:
                    seen.add(child)
                    pending.append(child)
        return seen

    def _all_above(self, blocks: Iterable[Key]) -> set[Key]:
        """Return everything that leads to any of the blocks."""
        seen = {*blocks}
        pending = [*seen]
        while pending:
            for parent in self._above.get(pending.pop(), ()):
                if parent not in seen:
                    seen.add(parent)
                    pending.append(parent)
        return seen

    def path(
        self, start: Key, goals: Collection[Key], without: Collection[Key] = frozenset()
    ) -> tuple[Key, ...]:
        """Return the shortest path from an object to any of the goals; () if there is none."""
        return next(self.paths(start, goals, without), ())

    def paths(
        self, start: Key, goals: Collection[Key], without: Collection[Key] = frozenset()
    ) -> Iterator[tuple[Key, ...]]:
        """Yield the shortest path from an object to each of the goals, shortest first."""
        above: dict[Key, Key] = {start: start}
        level = [start]
        while level:
            for key in level:
                if key in goals:
                    path = [key]
                    while path[-1] != start:
                        path.append(above[path[-1]])
                    yield tuple(reversed(path))
            found = []
            for key in level:
                for child in self.below.get(key, ()):
                    if child not in above and child not in without:
                        above[child] = key
                        found.append(child)
            level = found

    def bytes_of(self, blocks: Iterable[Key]) -> int:
        """Add up the sizes of blocks."""
        return sum(map(self.sizes.__getitem__, blocks))

    def _largest(
        self,
        reached: Mapping[Key, Keys],
        among: Keys,
        without: Keys,
    ) -> Group:
        """Return the group of the name that keeps most bytes of ``among``."""
        kept = {key: self.bytes_of(blocks & among) for key, blocks in reached.items()}
        most = max(kept.values())
        keys = [key for key, nbytes in kept.items() if nbytes == most]
        if len(keys) > 1:  # what frees most, then the outermost, then the longest-lived name
            freed = {key: self._freed(among & reached[key], {*without, key}) for key in keys}
            inner = {key for outer in keys for key in self.all_below([outer], without) - {outer}}
            keys.sort(key=lambda key: (-freed[key], key in inner, min(self.names[key])))
        start = keys[0]
        holder, blocks = self._holder(start, reached[start] & among, without)
        name, path = self._way_to(holder, without)
        return Group(name, path, blocks)

    def _freed(self, blocks: Keys, without: Keys) -> int:
        """Return how many bytes of ``blocks`` are freed if the objects ``without`` release theirs.

        0 if one of these is a tensor or a graph node, which cannot be emptied.
        """
        if without & self.tensors:
            return 0
        return self.bytes_of(blocks - self.reached(self.names, without))

    def _holder(self, start: Key, blocks: Keys, without: Keys) -> tuple[Key, Keys]:
        """Return the innermost object that keeps most of the blocks, and the blocks it keeps."""
        passed = set(without)
        while True:
            start = self._last_on_all_ways(start, blocks, passed)
            passed.add(start)
            if start in self.tensors:
                return start, blocks
            at_most = 1 if start in self.whole else MAX_SEPARATE_PARTS
            most: list[tuple[Key, Keys]] = []
            for child in self.below.get(start, ()):
                if child in passed or child in self.sizes or child in self.tensors:
                    continue
                part = self.reached([child], passed) & blocks
                if self.bytes_of(part) >= MOST * self.bytes_of(blocks):
                    most.append((child, part))
                if len(most) > at_most:
                    break
            if not 0 < len(most) <= at_most:
                return start, blocks
            # If two qualify, the larger is the holder, and _others() names the other one.
            start, blocks = max(most, key=lambda entry: self.bytes_of(entry[1]))

    def _last_on_all_ways(self, start: Key, blocks: Keys, without: Keys) -> Key:
        """Return the innermost object on every path from ``start`` to the blocks."""
        path = self.path(start, blocks, without)
        for key in reversed(path):
            if key in self.sizes or key in self.tensors:
                continue
            if not blocks & self.reached([start], {*without, key}):
                return key
        return start

    def _way_to(self, holder: Key, without: Keys) -> tuple[Name, tuple[Key, ...]]:
        """Return the name nearest to a holder, and the path from it to the holder."""
        ways = []
        below: dict[Key, Key | None] = {holder: None}
        level: list[Key] = [holder]
        while level:
            found = []
            for key in level:
                if key in self.names:
                    path: list[Key] = []
                    at: Key | None = key
                    while at is not None:
                        path.append(at)
                        at = below[at]
                    ways.append((min(self.names[key]), tuple(path)))
                for parent in self._above.get(key, ()):
                    if parent not in below and parent not in without:
                        below[parent] = key
                        found.append(parent)
            level = found
        return min(ways, key=lambda way: (way[0].is_foreign, len(way[1]), way[0]))

    def _others(self, group: Group) -> list[Group]:
        """Return what would still keep some of a group's blocks if its holder released them."""
        others: list[Group] = []
        removed = {group.path[-1]}
        # Two kinds of local variables do not count as other holders, because they are released in
        # the next iteration or when their function returns: variables that refer to a part of what
        # the holder keeps, such as a loop variable to the last element, and variables that refer to
        # a tensor itself, such as the last loss.
        inner = self.all_below(removed)
        while len(others) < MAX_OTHERS:
            sources = [
                key
                for key, names in self.names.items()
                if key not in removed
                and not (min(names).is_local and (key in inner or key in self.tensors))
            ]
            left = self.reached(sources, removed) & group.blocks
            left -= {block for other in others for block in other.blocks}
            if not left:
                break
            leading = self._all_above(left)
            reached = {key: self.reached([key], removed) for key in sources if key in leading}
            other = self._largest(reached, left, removed)
            others.append(other)
            removed.add(other.path[-1])
            inner |= self.all_below([other.path[-1]])
        return others
