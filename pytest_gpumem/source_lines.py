"""Lines of source code: which are the user's, and how reports and baselines name them."""

from __future__ import annotations

import ast
import functools
import importlib.util
import linecache
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

GENERATED: Final = "torchinductor"
"""part of the names of files that torch.compile writes"""
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")
_FOREIGN: Final = ("torch", "pytest", "_pytest", "pluggy")
"""packages whose lines are nobody's business"""


class Line(NamedTuple):
    """A line of Python that runs."""

    filename: str
    line: int
    function: str


def users_line(frame: FrameType | None) -> Line | None:
    """Return the innermost line of a stack that is the user's; None where none is."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


@functools.cache
def is_users(filename: str) -> bool:
    """Return whether a file is the user's or a library's that uses torch.

    It is not where torch, pytest, this package or Python itself has it, nor what they generated.
    """
    if filename.startswith("<") or GENERATED in filename:
        return False
    if filename.startswith(_folders()):
        return False
    library = f"{sysconfig.get_path('stdlib')}/"
    return not filename.startswith(library) or any(part in filename for part in _INSTALLED)


@functools.cache
def _folders() -> tuple[str, ...]:
    """Return the folders of the packages whose lines are nobody's business, this one's too."""
    specs = (importlib.util.find_spec(name) for name in _FOREIGN)
    files = [it.origin for it in specs if it is not None and it.origin is not None]
    return tuple(f"{Path(file).parent}/" for file in (__file__, *files))


def shown_path(filename: str, root: Path) -> str:
    """Return a file's name as reports and baselines have it: the same on every machine.

    Relative to the project; of an installed package, from the package on; of others the name alone.
    """
    path = Path(filename)
    for folder in (root, *_import_folders()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name


@functools.cache
def _import_folders() -> tuple[Path, ...]:
    """Return the folders that packages are imported from, the deepest first."""
    folders = {Path(it).absolute() for it in sys.path if it and Path(it).is_dir()}
    return tuple(sorted(folders, key=lambda it: -len(it.parts)))


def qualified(filename: str, line: int) -> str:
    """Return the qualified name of the innermost function around a line; "" where there is none."""
    around = [it for it in _functions(filename) if it[0] <= line <= it[1]]
    return max(around, default=(0, 0, ""))[2]


def marker_line(filename: str, first: int, marker: str) -> int:
    """Return the line on which a test's marker stands: its own, its class's or its module's.

    Args:
        filename: the test's file.
        first: the first line of the test, decorators included; it is returned where no line in the
            file names the marker (one from a conftest file, say).
        marker: its name, as in ``pytest.mark.gpu_memory``.
    """
    return _marker_lines(filename, marker).get(first, first)


@functools.lru_cache(maxsize=256)
def _marker_lines(filename: str, marker: str) -> dict[int, int]:
    """Return the line of its marker for the first line of each function in a file."""
    found: dict[int, int] = {}

    def walk(node: ast.Module | ast.ClassDef, inherited: int | None) -> None:
        marks = [it.value for it in node.body if isinstance(it, ast.Assign) and _is_pytestmark(it)]
        inherited = _line_of(marks, marker) or inherited
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                walk(child, _line_of(child.decorator_list, marker) or inherited)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min(it.lineno for it in (child, *child.decorator_list))
                line = _line_of(child.decorator_list, marker) or inherited
                found.update({first: line} if line else {})

    tree = _parsed(filename)
    if tree is not None:
        walk(tree, None)
    return found


def _is_pytestmark(node: ast.Assign) -> bool:
    return any(isinstance(it, ast.Name) and it.id == "pytestmark" for it in node.targets)


def _line_of(nodes: Iterable[ast.AST], marker: str) -> int | None:
    """Return the line of the first mention of a marker in any of the nodes."""
    lines = [
        it.lineno
        for node in nodes
        for it in ast.walk(node)
        if isinstance(it, ast.Attribute) and it.attr == marker
    ]
    return lines[0] if lines else None


def _parsed(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=256)
def _functions(filename: str) -> tuple[tuple[int, int, str], ...]:
    """Return first line, last line and qualified name of each function in a file."""
    tree = _parsed(filename)
    if tree is None:
        return ()
    found: list[tuple[int, int, str]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    found.append((child.lineno, child.end_lineno or child.lineno, name))
                walk(child, f"{name}.")
            else:
                walk(child, prefix)

    walk(tree, "")
    return tuple(found)
