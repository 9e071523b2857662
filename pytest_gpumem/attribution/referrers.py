"""Referrers of live CUDA tensors: the way to each from a name in the program.

Python's collector knows the references between objects. From a tensor the search climbs upwards,
level by level, until it reaches a name: a global variable, a local variable of a function that
runs, a class. Nothing here keeps a tensor alive, and little time is spent.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Mapping
from pathlib import PurePath
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.attribution.plain_tensors import place_of
from pytest_gpumem.measurement import Holder
from pytest_gpumem.source_lines import is_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    Place = tuple[int, int]
    """device and address of a storage"""

DEEPEST: Final = 12
"""objects between a tensor and a name; modules in modules count as one"""
DEEPEST_MODULE: Final = 100
MOST_TENSORS: Final = 200
"""tensors to find holders for, the largest first"""
MOST_OBJECTS: Final = 500
"""objects of one level from which the search climbs on"""
MOST_HOLDERS: Final = 5
"""holders that are reported"""
MOST_VISITED: Final = 2000
"""objects after which no further level is begun: a number, for a slow machine finds the same"""
UNNAMED: Final = "PyTorch itself, an autograd graph or a .grad"


def live_tensors() -> list[Tensor]:
    """Return the CUDA tensors that are Python objects; callers drop the list at once."""
    import torch

    # type(), not isinstance: that asks __class__, which a lazy object answers by waking up.
    tensors = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.Tensor) and candidate.is_cuda
    ]
    return [tensor for tensor in tensors if place_of(tensor)[1]]


def holders(blocks: Mapping[Place, int]) -> tuple[Holder, ...]:
    """Return the holders of live tensors, the largest first.

    Args:
        blocks: device and address of each block in question, and its bytes.
    """
    gc.unfreeze()  # the collector tells nothing of frozen objects
    try:
        sizes: dict[str, list[int]] = {}
        for text, size in _Climb(blocks).run():
            sizes.setdefault(text, []).append(size)
    finally:
        gc.freeze()
    merged = [Holder(text, sum(of_holder), len(of_holder)) for text, of_holder in sizes.items()]
    return tuple(sorted(merged, key=lambda holder: (-holder.nbytes, holder.text)))[:MOST_HOLDERS]


class _Node:
    """An object on the way up from a tensor."""

    __slots__ = ("below", "place", "value", "words")

    def __init__(self, value: object, below: object, place: Place, words: tuple[str, ...]) -> None:
        self.value = value
        self.below = below
        """the object that this one refers to, one level down"""
        self.place = place
        """the tensor's storage"""
        self.words = words
        """names of the objects on the way down to the tensor"""


class _Climb:
    """Climbs from tensors to names."""

    def __init__(self, blocks: Mapping[Place, int]) -> None:
        self._blocks = blocks
        self._graphs: dict[Place, str] = {}
        self._level = self._tensors()
        self._longest_way: dict[Place, tuple[str, ...]] = {}
        """of tensors without a name"""
        self._named: dict[Place, str] = {}
        self._visited: set[int] = set()
        # Some libraries put objects into sys.modules that are no modules.
        entries: list[Any] = list(sys.modules.values())
        self._globals = {
            id(vars(module)): module for module in entries if isinstance(module, ModuleType)
        }
        self._locals = dict(_running())
        self._parents = _parents()

    def _tensors(self) -> list[_Node]:
        """Return a node for each tensor whose memory it is, the largest first."""
        nodes = []
        for tensor in live_tensors():
            place = place_of(tensor)
            if place in self._blocks:
                nodes.append(_Node(tensor, None, place, ()))
                graph: Any = tensor.grad_fn
                if graph is not None:
                    self._graphs[place] = graph.name()
        nodes.sort(key=lambda node: -self._blocks[node.place])
        return nodes[:MOST_TENSORS]

    def run(self) -> Iterator[tuple[str, int]]:
        """Yield the holder's description and the bytes of each tensor."""
        self._look_at_locals(self._level)
        for _ in range(DEEPEST):
            if not self._level or len(self._visited) > MOST_VISITED:
                break
            self._level = self._next(self._level)
            self._look_at_locals(self._level)
        self._level = []
        for place, size in self._blocks.items():
            way = self._longest_way.get(place, ())
            holder = self._named.get(place) or ", ".join(way) or UNNAMED
            graph = self._graphs.get(place)
            yield f"{holder}, with its autograd graph ({graph})" if graph else holder, size

    def _look_at_locals(self, level: Iterable[_Node]) -> None:
        for node in level:
            name = self._locals.get(id(node.value))
            if name is not None:
                self._name(node, name)

    def _name(self, node: _Node, root: str) -> None:
        """Note a tensor's name: the first is the shortest."""
        way = ", ".join(filter(None, node.words))
        self._named.setdefault(node.place, f"{root} ({way})" if way else root)

    def _next(self, level: list[_Node]) -> list[_Node]:
        """Return the referrers of the objects of a level, where these have no name."""
        nodes = [node for node in level if node.place not in self._named][:MOST_OBJECTS]
        below: dict[int, list[_Node]] = {}
        for node in nodes:
            below.setdefault(id(node.value), []).append(node)
        self._visited.update(below)
        above: list[_Node] = []
        targets = [group[0].value for group in below.values()]
        skipped = {id(container) for container in (targets, level, nodes, below, above)}
        for referrer in gc.get_referrers(*targets):
            if id(referrer) in skipped or id(referrer) in self._visited or _is_ours(referrer):
                continue
            for child in gc.get_referents(referrer):
                for node in below.get(id(child), ()):
                    self._visit(referrer, node, above)
        return above

    def _outermost(self, module: object) -> object:
        """Return the outermost of the modules around a module."""
        for _ in range(DEEPEST_MODULE):  # a module may be in itself
            if id(module) not in self._parents:
                break
            module = self._parents[id(module)]
        return module

    def _visit(self, referrer: object, node: _Node, above: list[_Node]) -> None:
        module = self._globals.get(id(referrer))
        if module is not None:
            key = _key_of(referrer, node.value)
            self._name(node, f"global variable {key} of {_file_of(module)}")
            return
        if isinstance(referrer, FrameType):
            name = _local_name(referrer, node.value)
            if name:
                self._name(node, name)
            return
        if isinstance(referrer, type):
            key = _key_of(
                vars(referrer), node.below if isinstance(node.value, dict) else node.value
            )
            words = node.words[1:] if isinstance(node.value, dict) else node.words
            named = _Node(node.value, None, node.place, words)
            self._name(named, f"class attribute {key} of {referrer.__qualname__}")
            return
        words = _words(referrer, node)
        if id(referrer) in self._parents:
            referrer = self._outermost(referrer)
            words = (type(referrer).__name__,)
        way = tuple(filter(None, words))
        self._longest_way[node.place] = max(self._longest_way.get(node.place, ()), way, key=len)
        above.append(_Node(referrer, node.value, node.place, words))


def _words(referrer: object, node: _Node) -> tuple[str, ...]:
    """Return the names on the way down from a referrer of a node's object."""
    child, words = node.value, node.words
    if isinstance(referrer, FunctionType):
        return (_function_words(referrer, child), *_without_container(child, words))
    word = _word(referrer)
    if word is not None:
        return (word, *words)
    attributes = _dict_of(referrer)
    if attributes is child:  # its __dict__, which the first word stands for
        return _attribute(referrer, _key_of(child, node.below), words[1:])
    key = _key_of(attributes, child) if attributes is not None else ""
    return _attribute(referrer, key, words)


def _word(referrer: object) -> str | None:
    """Return the description of a container or a callable; None for an object with attributes."""
    if isinstance(referrer, (Mapping, list, tuple, set, frozenset)):
        return f"{type(referrer).__name__} of {len(referrer)}"
    if isinstance(referrer, CellType):
        return ""
    if isinstance(referrer, (MethodType, GeneratorType)):
        return f"{type(referrer).__name__} {referrer.__qualname__}"
    return None


def _attribute(owner: object, key: str, words: tuple[str, ...]) -> tuple[str, ...]:
    kind = type(owner).__name__
    if key in {"_parameters", "_buffers", "_modules"}:  # a module's, without the dict
        return (kind, *words[1:])
    return (f"attribute {key} of {kind}" if key else kind, *words)


def _function_words(function: FunctionType, child: object) -> str:
    place = f"{PurePath(function.__code__.co_filename).name}:{function.__code__.co_firstlineno}"
    kind = "closure" if child is function.__closure__ else "default argument"
    return f"{kind} of {function.__qualname__}, {place}"


def _without_container(child: object, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return words without the word for the tuple of a function's cells or defaults."""
    return words[1:] if isinstance(child, (tuple, dict)) else words


def _dict_of(owner: object) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


def _key_of(mapping: object, value: object) -> str:
    """Return the key of an object in a mapping; "" where it is in none."""
    if not isinstance(mapping, Mapping):
        return ""
    return next((str(key) for key, member in list(mapping.items()) if member is value), "")


def _file_of(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return PurePath(file).name if file else module.__name__


def _is_ours(referrer: object) -> bool:
    """Return whether an object belongs to this search alone."""
    if isinstance(referrer, (_Node, _Climb)):
        return True
    return isinstance(referrer, FrameType) and referrer.f_code.co_filename == __file__


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


# -- local variables of functions that run: the collector does not know of them --


def _running() -> Iterator[tuple[int, str]]:
    """Yield id and name of the values of local variables of the user's functions that run."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if is_users(frame.f_code.co_filename) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                yield from _locals_of(frame)
            frame = frame.f_back


def _locals_of(frame: FrameType) -> Iterator[tuple[int, str]]:
    values = frame.f_locals
    for name, value in list(values.items()):
        yield id(value), _local(frame, name)
    if isinstance(values, dict):  # before Python 3.13 it is a copy, which would keep them alive
        values.clear()


def _local_name(frame: FrameType, value: object) -> str:
    return next((name for key, name in _locals_of(frame) if key == id(value)), "")


def _local(frame: FrameType, name: str) -> str:
    code = frame.f_code
    place = f"{PurePath(code.co_filename).name}:{code.co_firstlineno}"
    return f"local variable {name} of {code.co_name}, {place}"
