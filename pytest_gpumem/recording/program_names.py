"""Name a program's objects: variables of functions, modules and classes, and fixtures."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import sys
from contextvars import ContextVar
from itertools import pairwise
from pathlib import PurePath
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.recording.reference_graph import Name
from pytest_gpumem.source_lines import is_users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

_HARNESS: Final = frozenset({"_pytest", "pytest", "pluggy", "pytest_gpumem"})
"""packages whose references to a test's objects last only while the test runs"""
FIXTURE, SHARED, LOCAL = range(3)
"""values of ``Name.lifetime``; deeper frames add to LOCAL"""


def is_fixture(value: object) -> bool:
    """Return whether an object is pytest's FixtureDef, which caches the fixture's value."""
    kind = type(value)
    return kind.__name__ == "FixtureDef" and _package(kind.__module__) == "_pytest"


def is_harness(value: object) -> bool:
    """Return whether an object is pytest's or this package's: these do not count as holders."""
    if isinstance(value, FunctionType):
        return _package(value.__module__) in _HARNESS
    return _package(type(value).__module__) in _HARNESS


def _package(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


class ProgramNames:
    """The program's names at the time of construction."""

    def __init__(self) -> None:
        # Some libraries put objects that are not modules into sys.modules.
        entries: list[Any] = list(sys.modules.values())
        self._modules = {
            id(vars(module)): module for module in entries if isinstance(module, ModuleType)
        }
        self.locals: dict[int, Name] = {}
        """names of local variables, by the id of the object that each refers to"""
        for frame in sys._current_frames().values():
            frames = []
            inner: FrameType | None = frame
            while inner is not None:
                code = inner.f_code
                if is_users(code.co_filename) and code.co_flags & inspect.CO_OPTIMIZED:
                    frames.append(inner)
                inner = inner.f_back
            for depth, each in enumerate(reversed(frames)):
                for key, text in locals_of(each):
                    self.locals.setdefault(key, Name(False, LOCAL + depth, text))  # noqa: FBT003 - a record
            # No local variable may keep this frame: that cycle would keep all of the frame's
            # objects.
            frames.clear()
        frame = each = None  # type: ignore[assignment]

    def is_root(self, value: object) -> bool:
        """Return whether an object gives names to others, so that the search upwards ends there."""
        return (
            id(value) in self._modules
            or isinstance(value, type)
            or is_fixture(value)
            or type(value).__name__.startswith("hamt_")  # a node of a contextvars.Context
        )

    def names_of(self, root: object) -> Iterator[tuple[int, Name]]:
        """Yield the names that a root gives, with the id of each named object."""
        module = self._modules.get(id(root))
        if module is not None:
            file = getattr(module, "__file__", None)
            if _package(module.__name__) not in _HARNESS:
                place = PurePath(file).name if file else module.__name__
                for key, value in list(vars(module).items()):
                    text = f"global variable {key} of {place}"
                    yield id(value), Name(not (file and is_users(file)), SHARED, text)
        elif isinstance(root, type):
            if _package(root.__module__) not in _HARNESS:
                file = getattr(sys.modules.get(root.__module__), "__file__", None)
                for key, value in list(vars(root).items()):
                    text = f"class attribute {key} of {root.__qualname__}"
                    yield id(value), Name(not (file and is_users(file)), SHARED, text)
        elif is_fixture(root):
            text = f"fixture {getattr(root, 'argname', '')}"
            yield id(root), Name(False, FIXTURE, text)  # noqa: FBT003 - a record
        else:
            for value, key in pairwise(gc.get_referents(root)):  # each value precedes its key
                if isinstance(key, ContextVar):
                    yield id(value), Name(False, SHARED, f"context variable {key.name}")  # noqa: FBT003 - a record


# -- local variables: the collector does not see those of running functions --


def locals_of(frame: FrameType) -> Iterator[tuple[int, str]]:
    """Yield a frame's local variables, each with the id of its object."""
    values, code, current = frame.f_locals, frame.f_code, frame.f_lineno
    lines = assignments(code)
    file = PurePath(code.co_filename).name
    for name, value in list(values.items()):
        if not name.isidentifier():  # made by pytest's assertion rewriting, or a comprehension
            continue
        # The last assignment above the running line; in a loop it may be below.
        assigned = lines.get(name, ()) or (code.co_firstlineno,)
        above = [line for line in assigned if line <= (current or 0)]
        place = f"{file}:{max(above or assigned)}"
        yield id(value), f"local variable {name} of {code.co_name}, {place}"
    if isinstance(values, dict):  # a copy (before Python 3.13), which keeps the values alive
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
