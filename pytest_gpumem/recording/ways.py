"""Describe the path from a name to a tensor by its objects, as "attribute log of Trainer"."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import PurePath
from types import (
    CellType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    TracebackType,
)
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.recording.program_names import is_fixture, locals_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CONTAINERS: Final[tuple[Any, ...]] = (dict, list, tuple, set, frozenset, deque)
_OF_FIXTURES: Final = (dict, list, tuple)
"""containers between pytest's FixtureDef and the value, or the fixture's function"""


def words_of(path: Sequence[object]) -> tuple[str, ...]:
    """Return the words for the objects on a path; tensors, cells and tracebacks get none."""
    import torch

    words: list[str] = []
    at = 0
    while at < len(path):
        owner = path[at]
        kind = type(owner)
        if issubclass(kind, torch.Tensor) or isinstance(owner, (CellType, TracebackType)):
            at += 1
        elif is_fixture(owner):
            at = _behind_fixture(path, at)
        elif issubclass(kind, torch.nn.Module):
            at, step_words = _of_module(path, at)
            words += step_words
        elif isinstance(owner, FunctionType):
            at, step_words = _of_function(path, at)
            words += step_words
        elif isinstance(owner, FrameType):  # a frame of a traceback
            child = id(path[at + 1]) if at + 1 < len(path) else 0
            words += [name for key, name in locals_of(owner) if key == child][:1]
            at += 1
        elif isinstance(owner, (MethodType, GeneratorType)):
            words.append(f"{kind.__name__} {owner.__qualname__}")
            at += 1
        elif issubclass(kind, _CONTAINERS):
            base = next(base for base in _CONTAINERS if issubclass(kind, base))
            words.append(f"{kind.__name__} of {base.__len__(owner)}")
            at += 1
        elif issubclass(kind, Mapping):
            words.append(kind.__name__)
            at += 1
        else:
            at, key = _attribute(path, at)
            words.append(f"attribute {key} of {kind.__name__}" if key else kind.__name__)
    return tuple(words)


def shared_words(ways: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the common beginning of several paths (as words)."""
    shared: tuple[str, ...] | None = None
    for way in ways:
        if shared is None:
            shared = way
        else:
            pairs = zip(shared, way, strict=False)
            shared = tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not shared:
            break
    return shared or ()


def with_way(name: str, words: Sequence[str]) -> str:
    """Append the path to a name: "global variable CACHE of test_it.py (list of 5)"."""
    return f"{name} ({', '.join(words)})" if words else name


def attributes_of(owner: object) -> dict[str, object]:
    """Return an object's attributes without calling its class's own ``__getattribute__``."""
    attributes: Any = None
    with suppress(AttributeError):
        attributes = object.__getattribute__(owner, "__dict__")
    return attributes if isinstance(attributes, dict) else {}


def key_of(mapping: Mapping[Any, object], value: object) -> str:
    """Return the key of a value in a mapping; "" if it is not there."""
    return next((str(key) for key, member in list(mapping.items()) if member is value), "")


def _attribute(path: Sequence[object], at: int) -> tuple[int, str]:
    """Return the index in the path of an attribute's value, and the attribute's name or ""."""
    attributes, child = attributes_of(path[at]), at + 1
    if child < len(path) and path[child] is attributes:
        child += 1
    if child >= len(path):
        return child, ""
    return child, key_of(attributes, path[child])


def _of_module(path: Sequence[object], at: int) -> tuple[int, list[str]]:
    """Return the index of the object after a module and its submodules, and the modules' words."""
    import torch

    outer = inner = path[at]
    names: list[str] = []
    while True:
        child, key = _attribute(path, at)
        inside = path[child + 1] if child + 1 < len(path) else None
        if key != "_modules" or not issubclass(type(inside), torch.nn.Module):
            break
        names.append(key_of(path[child], inside))  # type: ignore[arg-type] # a dict of modules
        at, inner = child + 1, inside
    kind = type(outer).__name__
    if key in {"_parameters", "_buffers", "_modules"}:  # these dicts get no words
        return child + 1, [kind]
    if not key:
        return child, [kind]
    attribute = f"attribute {key} of {type(inner).__name__}"
    return child, [kind, f"{attribute} {'.'.join(names)}"] if names else [attribute]


def _of_function(path: Sequence[object], at: int) -> tuple[int, list[str]]:
    function: Any = path[at]
    code = function.__code__
    child = path[at + 1] if at + 1 < len(path) else None
    if child is not None and child is attributes_of(function):
        child_at, key = _attribute(path, at)
        return child_at, [f"attribute {key} of {function.__qualname__}"]
    kind = "closure" if child is function.__closure__ else "default argument"
    place = f"{PurePath(code.co_filename).name}:{code.co_firstlineno}"
    words = [f"{kind} of {function.__qualname__}, {place}"]
    # Skip the function's tuple of cells, or its tuple or dict of defaults.
    return at + 1 + isinstance(child, (tuple, dict)), words


def _behind_fixture(path: Sequence[object], at: int) -> int:
    """Return the index of a fixture's value, or of its suspended function."""
    value = attributes_of(path[at]).get("cached_result")
    child = at + 1
    while child < len(path):
        before = path[child - 1]
        if before is value and value is not None:
            break
        is_between = type(path[child]) in _OF_FIXTURES or type(path[child]).__name__ == "partial"
        if not is_between:
            break
        child += 1
    return child
