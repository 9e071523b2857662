"""Who refers to a tensor: live CUDA tensors, and the way from a name in a program to each.

Python's collector knows which object refers to which. From a tensor it is climbed upwards, level by
level, until something with a name is reached: a global variable, a local one of a function that
runs, a class. Nothing here keeps a tensor alive, and little time is spent.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Mapping
from pathlib import PurePath
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

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
"""tensors whose holders are looked for, the largest first"""
MOST_OBJECTS: Final = 500
"""objects of one level that are climbed on from"""
MOST_HOLDERS: Final = 5
"""holders that are told"""
LONGEST_S: Final = 2.0
"""seconds after which no further level is begun"""
NOBODY: Final = "PyTorch itself, an autograd graph or a .grad"


def live_tensors() -> list[Tensor]:
    """Return the CUDA tensors that are Python objects; the list is to be let go of at once."""
    import torch

    found = [it for it in gc.get_objects() if issubclass(type(it), torch.Tensor) and it.is_cuda]
    return [it for it in found if place_of(it)[1]]


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Return the device of a tensor's storage and where it begins; address 0: it has none."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    try:
        return tensor.get_device(), tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return tensor.get_device(), 0


def holders(blocks: Mapping[Place, int]) -> tuple[Holder, ...]:
    """Return who refers to live tensors, the holders of most bytes first.

    Args:
        blocks: device and address of the memory that is asked for, and its bytes.
    """
    gc.unfreeze()  # the collector tells nothing of what is frozen
    try:
        return _grouped(_Climb(blocks).run())
    finally:
        gc.freeze()


def _grouped(found: Iterable[tuple[str, int]]) -> tuple[Holder, ...]:
    groups: dict[str, list[int]] = {}
    for text, size in found:
        groups.setdefault(text, []).append(size)
    made = [Holder(text, sum(sizes), len(sizes)) for text, sizes in groups.items()]
    return tuple(sorted(made, key=lambda it: (-it.nbytes, it.text)))[:MOST_HOLDERS]


class _Node:
    """An object on the way up from a tensor."""

    __slots__ = ("below", "place", "value", "words")

    def __init__(self, value: object, below: object, place: Place, words: tuple[str, ...]) -> None:
        self.value = value
        self.below = below
        """what it refers to, one level down"""
        self.place = place
        """the tensor's storage"""
        self.words = words
        """what was passed on the way up, the last first"""


class _Climb:
    """Climbs from tensors to names."""

    def __init__(self, blocks: Mapping[Place, int]) -> None:
        self._blocks = blocks
        self._graphs: dict[Place, str] = {}
        self._level = self._tensors()
        self._best: dict[Place, tuple[str, ...]] = {}
        self._named: dict[Place, str] = {}
        self._seen: set[int] = set()
        modules: list[Any] = list(sys.modules.values())  # some put other things there
        self._globals = {id(vars(it)): it for it in modules if isinstance(it, ModuleType)}
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
        nodes.sort(key=lambda it: -self._blocks[it.place])
        return nodes[:MOST_TENSORS]

    def run(self) -> Iterator[tuple[str, int]]:
        """Yield words and bytes for each tensor."""
        end = time.monotonic() + LONGEST_S
        self._look_at_locals(self._level)
        for _ in range(DEEPEST):
            if not self._level or time.monotonic() > end:
                break
            self._level = self._next(self._level)
            self._look_at_locals(self._level)
        self._level = []
        for place, size in self._blocks.items():
            text = self._named.get(place) or ", ".join(self._best.get(place, ())) or NOBODY
            graph = self._graphs.get(place)
            yield f"{text}, with its autograd graph ({graph})" if graph else text, size

    def _look_at_locals(self, level: Iterable[_Node]) -> None:
        for node in level:
            name = self._locals.get(id(node.value))
            if name is not None:
                self._name(node, name)

    def _name(self, node: _Node, root: str) -> None:
        """Note a tensor's name: its first is its shortest."""
        inner = [it for it in node.words if it]
        text = root if not inner else f"{root} ({', '.join(inner)})"
        self._named.setdefault(node.place, text)

    def _next(self, level: list[_Node]) -> list[_Node]:
        """Return what refers to the objects of a level, where these have no name."""
        nodes = [it for it in level if it.place not in self._named][:MOST_OBJECTS]
        below: dict[int, list[_Node]] = {}
        for node in nodes:
            below.setdefault(id(node.value), []).append(node)
        self._seen.update(below)
        found: list[_Node] = []
        targets = [group[0].value for group in below.values()]
        skipped = {id(it) for it in (targets, level, nodes, below, found)}
        for referrer in gc.get_referrers(*targets):
            if id(referrer) in skipped or id(referrer) in self._seen or _is_ours(referrer):
                continue
            for child in gc.get_referents(referrer):
                for node in below.get(id(child), ()):
                    self._visit(referrer, node, found)
        return found

    def _outermost(self, module: object) -> object:
        """Return the module that a module is in, and that is in no other."""
        for _ in range(DEEPEST_MODULE):  # a module may be in itself
            if id(module) not in self._parents:
                break
            module = self._parents[id(module)]
        return module

    def _visit(self, referrer: object, node: _Node, found: list[_Node]) -> None:
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
        said = tuple(filter(None, words))
        self._best[node.place] = max(self._best.get(node.place, ()), said, key=len)
        found.append(_Node(referrer, node.value, node.place, words))


def _words(referrer: object, node: _Node) -> tuple[str, ...]:
    """Return the words for the way down from an object that refers to a node's."""
    child, words = node.value, node.words
    if isinstance(referrer, FunctionType):
        return (_function_words(referrer, child), *_without_container(child, words))
    word = _word(referrer)
    if word is not None:
        return (word, *words)
    attributes = _dict_of(referrer)
    if attributes is child:  # its __dict__, which the last word was for
        return _attribute(referrer, _key_of(child, node.below), words[1:])
    key = _key_of(attributes, child) if attributes is not None else ""
    return _attribute(referrer, key, words)


def _word(referrer: object) -> str | None:
    """Return what a container or a callable is called; None for an object with attributes."""
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
    what = "closure" if child is function.__closure__ else "default argument"
    return f"{what} of {function.__qualname__}, {place}"


def _without_container(child: object, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return words without those for the tuple that a function has its cells or defaults in."""
    return words[1:] if isinstance(child, (tuple, dict)) else words


def _dict_of(owner: object) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _key_of(mapping: object, value: object) -> str:
    """Return the name under which a mapping has an object; "" where it has not."""
    if not isinstance(mapping, Mapping):
        return ""
    return next((str(key) for key, one in list(mapping.items()) if one is value), "")


def _file_of(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return PurePath(file).name if file else module.__name__


def _is_ours(referrer: object) -> bool:
    """Return whether an object is of this look alone."""
    if isinstance(referrer, (_Node, _Climb)):
        return True
    return isinstance(referrer, FrameType) and referrer.f_code.co_filename == __file__


def _parents() -> dict[int, object]:
    """Return the modules that others are in, by the ids of these."""
    import torch

    modules = [it for it in gc.get_objects() if issubclass(type(it), torch.nn.Module)]
    return {
        id(child): module
        for module in modules
        for child in vars(module).get("_modules", {}).values()
        if child is not None
    }


# -- local variables of functions that run: the collector does not know of them --


def _running() -> Iterator[tuple[int, str]]:
    """Yield the id of each local variable's value, of the user's functions that run, and words."""
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
    return next((words for known, words in _locals_of(frame) if known == id(value)), "")


def _local(frame: FrameType, name: str) -> str:
    code = frame.f_code
    place = f"{PurePath(code.co_filename).name}:{code.co_firstlineno}"
    return f"local variable {name} of {code.co_name}, {place}"
