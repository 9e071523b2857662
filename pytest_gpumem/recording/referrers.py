"""Referrers of live CUDA tensors: the way to each from a name in the program.

Python's collector knows the references between objects. From a tensor the search climbs upwards,
level by level, until it reaches a name: a global variable, a local variable of a function that
runs, a class. Memory of an autograd graph counts for the tensor with that graph. Nothing here keeps
a tensor alive.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from itertools import pairwise
from pathlib import PurePath
from types import (
    CellType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.measurement import Holder
from pytest_gpumem.recording.graphs import graph_tensors
from pytest_gpumem.recording.plain_tensors import live_tensors, place_of
from pytest_gpumem.source_lines import is_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType

    from torch import Tensor

    Place = tuple[int, int]
    """device and address of a storage"""

MAX_DEPTH: Final = 12
"""objects between a tensor and a name; modules in modules count as one"""
MAX_MODULE_DEPTH: Final = 100
MAX_OBJECTS: Final = 200
"""objects of one level from which the search climbs on, those of the largest tensors first"""
MAX_VISITED: Final = 1_000
"""objects from which the search climbs in all: for each the collector looks at every reference of
the process. A number and not a time, so that the answer does not depend on the machine's speed"""
MAX_HOLDERS: Final = 5
"""holders that are reported"""
UNNAMED: Final = "PyTorch itself, an autograd graph or a .grad"


def holders(blocks: Mapping[Place, int]) -> tuple[Holder, ...]:
    """Return the holders of live memory, by the bytes that letting go of each frees, most first.

    ``blocks`` has the bytes of each block, by device and address.
    """
    memories = kept_memory(blocks).values()
    # Of several names that refer to a block, that counts which refers to most of all blocks: the
    # list of all outputs, and not the variable that has the last one as well.
    totals: Counter[str] = Counter()
    for memory in memories:
        totals.update(dict.fromkeys(memory.keepers(), memory.nbytes))
    groups: dict[str, list[tuple[Kept, Kept]]] = {}
    for memory in memories:
        keepers = memory.keepers()
        name = max(keepers, key=totals.__getitem__, default=", ".join(memory.way) or UNNAMED)
        groups.setdefault(name, []).append((keepers.get(name, memory), memory))
    merged = []
    for name, members in groups.items():
        description = name
        ways = [keeper.ways[name] for keeper, _ in members if name in keeper.ways]
        if ways:  # all that one name holds is described by the beginning that all ways share
            shared = min(ways, key=len)
            while any(way[: len(shared)] != shared for way in ways):
                shared = shared[:-1]
            description += f" ({', '.join(shared)})" if shared else ""
        graph = next((keeper.graph for keeper, _ in members if keeper.graph), "")
        description += f", with its autograd graph ({graph})" if graph else ""
        nbytes, number = (
            sum(memory.nbytes for _, memory in members),
            sum(memory.blocks for _, memory in members),
        )
        merged.append((name == UNNAMED, Holder(description, nbytes, number)))
    # What nothing of the program's refers to comes last: letting go of a name frees none of it.
    merged.sort(key=lambda entry: (entry[0], -entry[1].nbytes, entry[1].text))
    return tuple(holder for _, holder in merged[:MAX_HOLDERS])


def kept_memory(blocks: Mapping[Place, int]) -> dict[Place, Kept]:
    """Return the memory of all blocks, by device and address; those of one graph have an owner.

    Nothing of a search stays: no object of the program's, and no reference cycle. Objects that were
    frozen when the test began are not frozen again: the test's own garbage would be among them, and
    never be collected.

    ``blocks`` has the bytes of each block, by device and address.
    """
    gc.unfreeze()  # the collector tells nothing of frozen objects
    return _Climb(blocks).run()


class Kept:
    """Memory that one tensor keeps: its own, and that of its graph without a Python object."""

    __slots__ = (
        *("blocks", "graph", "graph_owner", "is_gradient", "nbytes", "owned"),
        *("longest_way", "sequence", "ways"),
    )

    def __init__(self) -> None:
        self.nbytes = 0
        self.owned = 0
        """bytes of other blocks that it keeps by its graph"""
        self.blocks = 0
        self.graph = ""
        """the node of autograd's that made the tensor"""
        self.sequence = -1
        """the number of that node"""
        self.graph_owner: Kept | None = None
        """memory of a tensor that keeps this one by its graph, or as its gradient"""
        self.is_gradient = False
        """whether it is the gradient of a live leaf"""
        self.ways: dict[str, tuple[str, ...]] = {}
        """of each name that refers to the tensor, the objects on the way; the shortest way first"""
        self.longest_way: tuple[str, ...] = ()
        """objects on the longest way that was found"""

    @property
    def root(self) -> str:
        """The name that refers to the tensor by the shortest way; "" where none does."""
        return next(iter(self.ways), "")

    @property
    def way(self) -> tuple[str, ...]:
        """Objects on the way from that name; without a name, on the longest way that was found."""
        return self.ways.get(self.root, self.longest_way)

    @property
    def weight(self) -> int:
        """Bytes that have a name once this has one: the search looks for the most first."""
        return self.nbytes + self.owned

    def note_graph(self, tensor: Tensor) -> None:
        """Note the node that made the tensor, if a node did."""
        if tensor.grad_fn is not None:
            self.graph = tensor.grad_fn.name()
            self.sequence = tensor.grad_fn._sequence_nr()

    def add(self, nbytes: int) -> None:
        """Add a block."""
        self.nbytes += nbytes
        self.blocks += 1

    def owners(self) -> Iterator[Kept]:
        """Yield this, and then each memory that keeps the one before by a graph."""
        kept: Kept | None = self
        while kept is not None:
            yield kept
            kept = kept.graph_owner

    def keepers(self) -> dict[str, Kept]:
        """Return all names that keep the memory, with the objects below them; the nearest first."""
        return {name: kept for kept in reversed([*self.owners()]) for name in kept.ways}

    def keeper(self) -> Kept:
        """Return this, or where it has no name, the first with a name that keeps it by a graph."""
        return next((kept for kept in self.owners() if kept.root), self)


class _Node:
    """An object on the way up from a tensor."""

    __slots__ = ("below", "memory", "value", "words")

    def __init__(self, value: object, below: object, memory: Kept, words: tuple[str, ...]) -> None:
        self.value = value
        self.below = below
        """the object that this one refers to, one level down"""
        self.memory = memory
        """the tensor's memory"""
        self.words = words
        """names of the objects on the way down to the tensor"""


class _Climb:
    """Climbs from tensors to names."""

    def __init__(self, blocks: Mapping[Place, int]) -> None:
        self._blocks = blocks
        self._kept: dict[Place, Kept] = {}
        self._memories: list[Kept] = []
        self._level = self._tensors()
        self._climbed: dict[int, _Node] = {}
        """of each object from which the search has climbed on, by its id: the first way to it"""
        self._crossings: list[tuple[Kept, _Node, tuple[str, ...]]] = []
        """memory with a way that has reached such an object, that, and the way down from it"""
        # Some libraries put objects into sys.modules that are no modules.
        entries: list[Any] = list(sys.modules.values())
        self._globals = {
            id(vars(module)): module for module in entries if isinstance(module, ModuleType)
        }
        self._locals: dict[int, str] = {}
        frames: list[FrameType | None] = [*sys._current_frames().values()]
        while frames:
            frame = frames.pop()
            if frame is not None:
                code = frame.f_code
                if is_users(code.co_filename) and code.co_flags & inspect.CO_OPTIMIZED:
                    self._locals.update(_locals_of(frame))
                frames.append(frame.f_back)
        # No variable may refer to this frame itself: it would be a cycle, with all that it has.
        self._parents = _parents()

    def _tensors(self) -> list[_Node]:
        """Return a node for each tensor that keeps any of the blocks, the largest first."""
        tensors = live_tensors()
        nodes: list[_Node] = []
        by_place: dict[Place, Kept] = {}
        for tensor in tensors:
            place = place_of(tensor)
            if place in self._blocks and place not in by_place:
                by_place[place] = Kept()
                by_place[place].add(self._blocks[place])
            if place in by_place:  # another view of the same memory may have the name
                nodes.append(_Node(tensor, None, by_place[place], ()))
        nodes += self._graph_nodes(tensors, by_place)
        self._kept = by_place
        return nodes

    def _graph_nodes(self, tensors: list[Tensor], by_place: dict[Place, Kept]) -> list[_Node]:
        """Give blocks the owners of their graphs; return nodes for owners without a block."""
        import torch

        nodes: list[_Node] = []
        visited: set[Any] = set()
        with torch._C.DisableTorchFunctionSubclass():
            graphs = [tensor for tensor in tensors if tensor.grad_fn is not None]
            # Of memory that several graphs share, the latest has all: a loss before its summands.
            # Autograd numbers its nodes: later ones have larger numbers.
            graphs.sort(key=lambda tensor: -tensor.grad_fn._sequence_nr())  # type: ignore[union-attr] # they have one
            graphs += [tensor for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
            for tensor in graphs:
                memory = by_place.get(place_of(tensor)) or Kept()
                memory.note_graph(tensor)
                keeps = memory.nbytes > 0
                for saved in graph_tensors(tensor, visited):
                    place = place_of(saved)
                    if place not in self._blocks:
                        continue
                    block = by_place.setdefault(place, Kept())
                    block.nbytes, block.blocks = self._blocks[place], 1
                    block.is_gradient |= tensor.is_leaf
                    if block.graph_owner is None and block not in memory.owners():
                        block.graph_owner = memory
                        memory.owned += block.nbytes
                        keeps = True
                if keeps and not memory.nbytes:
                    nodes.append(_Node(tensor, None, memory, ()))
        return nodes

    def run(self) -> dict[Place, Kept]:
        """Return the memory of all blocks, each with a name, or with the longest way to it."""
        self._look_at_locals(self._level)
        for _ in range(MAX_DEPTH):
            targets = self._targets()
            if not targets:
                break
            self._level = self._referrers(targets)
            self._look_at_locals(self._level)
        # A name may pass from one to the next by several crossings.
        while self._name_by_crossings():
            pass
        for place, size in self._blocks.items():
            if place not in self._kept:  # the driver's, a library's, or kept by C++ alone
                self._kept[place] = memory = Kept()
                memory.add(size)
        return self._kept

    def _targets(self) -> list[object]:
        """Return the objects of the level from which the search climbs on."""
        weights: dict[int, int] = {}
        values: dict[int, object] = {}
        for node in self._level:
            if not node.memory.ways:
                key = id(node.value)
                weights[key] = weights.get(key, 0) + node.memory.weight
                values[key] = node.value
        # Where a level has too many, the largest come first; ties as the collector has them.
        keys = sorted(weights, key=lambda key: -weights[key])
        return [values[key] for key in keys[: min(MAX_OBJECTS, MAX_VISITED - len(self._climbed))]]

    def _name_by_crossings(self) -> bool:
        """Give memory the names that another way has found; return whether any was given."""
        given = False
        for memory, node, words in self._crossings:
            if memory.ways or not node.memory.ways:
                continue
            # The other way's names are those above the crossing, and those below it.
            below = len(tuple(filter(None, node.words)))
            above = node.memory.way[: max(0, len(node.memory.way) - below)]
            memory.ways[node.memory.root] = (*above, *filter(None, words))
            given = True
        return given

    def _look_at_locals(self, level: Iterable[_Node]) -> None:
        for node in level:
            name = self._locals.get(id(node.value))
            if name is not None:
                _name(node, name)

    def _referrers(self, targets: list[object]) -> list[_Node]:
        """Return the referrers of some objects of the level, with all nodes that they refer to."""
        below: dict[int, list[_Node]] = {}
        for node in self._level:
            below.setdefault(id(node.value), []).append(node)
        for target in targets:
            self._climbed.setdefault(id(target), below[id(target)][0])
        above: list[_Node] = []
        skipped = {id(container) for container in (targets, self._level, below, above)}
        for referrer in gc.get_referrers(*targets):
            # This search's own containers, records and frames refer to the objects as well.
            if id(referrer) in skipped or isinstance(referrer, (_Node, _Climb, Kept)):
                continue
            if isinstance(referrer, FrameType) and referrer.f_code.co_filename == __file__:
                continue
            earlier = self._climbed.get(id(referrer))
            for child in gc.get_referents(referrer):
                for node in below.get(id(child), ()):
                    if earlier is None:
                        self._visit(referrer, node, above)
                    elif earlier.memory is not node.memory:
                        self._crossings.append((node.memory, earlier, _words(referrer, node)))
        referrer = None  # it may be this frame
        return above

    def _visit(self, referrer: object, node: _Node, above: list[_Node]) -> None:
        """Name a node by a referrer, or note the referrer as a node of the next level."""
        module = self._globals.get(id(referrer))
        if module is not None:
            file = getattr(module, "__file__", None)
            place = PurePath(file).name if file else module.__name__
            _name(node, f"global variable {_key_of(referrer, node.value)} of {place}")
            return
        if isinstance(referrer, type):
            in_namespace = isinstance(node.value, dict)
            key = _key_of(vars(referrer), node.below if in_namespace else node.value)
            words = node.words[1:] if in_namespace else node.words
            named = _Node(node.value, None, node.memory, words)
            _name(named, f"class attribute {key} of {referrer.__qualname__}")
            return
        if type(referrer).__name__.startswith("hamt_"):  # a part of a context: values before keys
            for value, key in pairwise(gc.get_referents(referrer)):
                if value is node.value and isinstance(key, ContextVar):
                    _name(node, f"context variable {key.name}")
                    return
        words = _words(referrer, node)
        for _ in range(MAX_MODULE_DEPTH):  # up to the outermost module; one may be in itself
            if id(referrer) not in self._parents:
                break
            referrer = self._parents[id(referrer)]
            words = (type(referrer).__name__,)
        way = tuple(filter(None, words))
        node.memory.longest_way = max(node.memory.longest_way, way, key=len)
        above.append(_Node(referrer, node.value, node.memory, words))


def _name(node: _Node, root: str) -> None:
    """Note a name of a tensor's memory: the first way to it is the shortest."""
    node.memory.ways.setdefault(root, tuple(filter(None, node.words)))


def _words(referrer: object, node: _Node) -> tuple[str, ...]:
    """Return the names on the way down from a referrer of a node's object."""
    child, words = node.value, node.words
    first: str | None = None
    if isinstance(referrer, FunctionType):
        kind = "closure" if child is referrer.__closure__ else "default argument"
        code = referrer.__code__
        place = f"{PurePath(code.co_filename).name}:{code.co_firstlineno}"
        first = f"{kind} of {referrer.__qualname__}, {place}"
        # Without the word for the tuple of a function's cells or defaults.
        words = words[1:] if isinstance(child, (tuple, dict)) else words
    elif isinstance(referrer, FrameType):  # it does not run: a traceback or a generator has it
        first = next((name for key, name in _locals_of(referrer) if key == id(child)), "")
    elif isinstance(referrer, (CellType, TracebackType)):
        first = ""
    elif isinstance(referrer, (Mapping, list, tuple, set, frozenset)):
        first = f"{type(referrer).__name__} of {len(referrer)}"
    elif isinstance(referrer, (MethodType, GeneratorType)):
        first = f"{type(referrer).__name__} {referrer.__qualname__}"
    return _of_attribute(referrer, node) if first is None else (first, *words)


def _of_attribute(owner: object, node: _Node) -> tuple[str, ...]:
    """Return the names on the way down from an object with attributes."""
    child, words = node.value, node.words
    attributes: Any = None
    with suppress(AttributeError):
        attributes = object.__getattribute__(owner, "__dict__")
    if attributes is child:  # its __dict__, which the first word stands for
        key, words = _key_of(child, node.below), words[1:]
    else:
        key = _key_of(attributes, child)
    kind = type(owner).__name__
    if key in {"_parameters", "_buffers", "_modules"}:  # a module's, without the dict
        return (kind, *words[1:])
    return (f"attribute {key} of {kind}" if key else kind, *words)


def _key_of(mapping: object, value: object) -> str:
    if not isinstance(mapping, Mapping):
        return ""
    return next((str(key) for key, member in list(mapping.items()) if member is value), "")


def _parents() -> dict[int, object]:
    """Return the parent of each module in another, by the id of the inner one."""
    import torch

    modules = [owner for owner in gc.get_objects() if issubclass(type(owner), torch.nn.Module)]
    return {
        id(child): module
        for module in modules
        for child in vars(module).get("_modules", {}).values()
        if child is not None
    }


# -- local variables: of functions that run the collector does not know them --


def _locals_of(frame: FrameType) -> Iterator[tuple[int, str]]:
    values, code, current = frame.f_locals, frame.f_code, frame.f_lineno
    lines = assignments(code)
    file = PurePath(code.co_filename).name
    for name, value in list(values.items()):
        # Of several assignments the last one above the line that runs; in a loop, maybe below it.
        assigned = lines.get(name, ()) or (code.co_firstlineno,)
        above = [line for line in assigned if line <= (current or 0)]
        place = f"{file}:{max(above or assigned)}"
        yield id(value), f"local variable {name} of {code.co_name}, {place}"
    if isinstance(values, dict):  # before Python 3.13 it is a copy, which would keep them alive
        values.clear()


@functools.lru_cache(maxsize=256)
def assignments(code: CodeType) -> dict[str, list[int]]:
    """Return the lines that assign to each local variable of a function."""
    lines: dict[str, list[int]] = {}
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.starts_line:
            line = getattr(instruction, "line_number", None) or instruction.starts_line
        if instruction.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            names = instruction.argval
            for name in names if isinstance(names, tuple) else (names,):
                lines.setdefault(name, []).append(line)
    return lines
