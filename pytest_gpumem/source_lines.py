"""Source lines: whether they are the user's, and their names in reports and baselines."""

from __future__ import annotations

import ast
import functools
import importlib.util
import linecache
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

_GENERATED: Final = re.compile(r"/(\w\w)/c\1[a-z2-7]{49}\.py$")
"""matches the names of files that torch.compile generates, in any folder: they are hashes"""
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")
OWN_FOLDER: Final = f"{Path(__file__).parent}/"
_PACKAGES: Final = re.compile(r"(?:^|[/\\])(?:site|dist)-packages([/\\])")
"""a folder of installed packages in a file name; the group is the path separator"""
_LINKED: Final = "__editable__"
"""prefix of the name of a folder in which setuptools links to a project's sources"""
_CACHE_TAG: Final = "CACHEDIR.TAG"
"""file that marks a cache folder (https://bford.info/cachedir/)"""
_STARRED_ARGUMENT: Final = re.compile(r"[(,]\s*\*")
"""an argument like *args; a line without one forwards no call, so its file need not be parsed"""
_FOREIGN: Final = ("torch", "pytest", "_pytest", "pluggy")
"""packages whose lines do not help to find the user's own code"""
MAX_CODE_LENGTH: Final = 120
"""maximum number of characters of a source line in reports; longer lines are truncated"""


class Line(NamedTuple):
    """A line of Python in a stack."""

    filename: str
    line: int
    function: str


def source_code(filename: str, line: int) -> str:
    """Return a source line without its indent, truncated."""
    return linecache.getline(filename, line).strip()[:MAX_CODE_LENGTH]


def users_line(frame: FrameType | None) -> Line | None:
    """Return the innermost line of user code in a stack; None if there is none.

    A decorator's line that only forwards the call is returned only if there is no other line.
    """
    innermost = None
    while frame is not None:
        code, number = frame.f_code, frame.f_lineno
        if is_users(code.co_filename):
            line = Line(code.co_filename, number, code.co_name)
            if not only_forwards_call(code.co_filename, number):
                return line
            innermost = innermost or line
        frame = frame.f_back
    return innermost


@functools.cache
def is_users(filename: str) -> bool:
    """Return whether a file belongs to the user, or to a library that uses torch.

    Files of torch, pytest, this package and Python itself do not, nor does generated code.
    """
    if filename.startswith("<") or _GENERATED.search(filename):
        return False
    if filename.startswith(foreign_folders()):
        return False
    library = f"{sysconfig.get_path('stdlib')}/"
    # Packages are installed below the standard library's folder.
    return not filename.startswith(library) or any(part in filename for part in _INSTALLED)


@functools.cache
def foreign_folders() -> tuple[str, ...]:
    """Return the folders of the packages in ``_FOREIGN``, and of this package."""
    specs = (importlib.util.find_spec(name) for name in _FOREIGN)
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return (OWN_FOLDER, *(f"{Path(file).parent}/" for file in files))


@functools.cache
def shown_path(filename: str, root: Path) -> str:
    """Return a file's name for reports and baselines, which is the same on every machine.

    A project's file is relative to the project's folder. The name of an installed package's file
    begins with the package, wherever the environment is, even inside the project. Any other file is
    relative to the folder that Python imports it from, or just its name.
    """
    path = Path(filename)
    own_name = _name_in_project(path, root)
    if not own_name and root.exists():  # an editable install or the project may be behind a link
        real, real_root = Path(os.path.realpath(path)), Path(os.path.realpath(root))
        folders = (each for each in real.parents if each != real_root)
        inside = (each for each in folders if each.is_relative_to(real_root))
        # Files in a tagged cache folder inside the project (uv's may be) are not the project's.
        if not any(Path(folder, _CACHE_TAG).exists() for folder in inside):
            own_name = _name_in_project(real, real_root)
    if own_name:
        return own_name
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else filename
    package = package_path(name)
    if package != name:
        return package
    for folder in import_folders():
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name


def _name_in_project(path: Path, root: Path) -> str:
    """Return a file's path relative to the project's folder; "" if it is not the project's.

    The file system's root is not a project's folder, and an environment inside a project is not its
    source.
    """
    if root == root.parent or not path.is_relative_to(root):
        return ""
    environments = {Path(sys.prefix), Path(sys.base_prefix)} - {root}
    if any(path.is_relative_to(folder) and folder.is_relative_to(root) for folder in environments):
        return ""
    name = path.relative_to(root).as_posix()
    return "" if _PACKAGES.search(name) or _LINKED in name else name


def package_path(name: str) -> str:
    """Remove everything up to site-packages or dist-packages from a file's name.

    ".venv/lib/python3.11/site-packages/torchvision/models/resnet.py" becomes
    "torchvision/models/resnet.py". The folder of an egg, which has a version in its name, is also
    removed. Other names are returned unchanged.
    """
    folders = list(_PACKAGES.finditer(name)) if "-packages" in name else []
    if not folders:
        return name
    separator = folders[-1][1]
    first, *parts = name[folders[-1].end() :].split(separator)
    return "/".join(parts if parts and first.endswith(".egg") else [first, *parts])


@functools.cache
def import_folders() -> tuple[Path, ...]:
    """Return the folders and archives that packages are imported from, the deepest first."""
    folders = {Path(entry).absolute() for entry in sys.path if entry and Path(entry).exists()}
    return tuple(sorted(folders, key=lambda folder: -len(folder.parts)))


@functools.lru_cache(maxsize=4096)
def only_forwards_call(filename: str, line: int) -> bool:
    """Return whether a line of a decorator only calls the decorated function.

    It does if the called function is an argument of an enclosing function, and gets all arguments
    of the wrapper unchanged, including ``*args`` or ``**kwargs``. Such a line is the
    same for all decorated functions, and says nothing about any of them.
    """
    code = "".join(linecache.getlines(filename)[line - 1 : line + 2])  # a call may span lines
    return _STARRED_ARGUMENT.search(code) is not None and line in _forwarding_lines(filename)


def forget_changed_files() -> None:
    """Clear the caches if files were edited since this process read them."""
    cached = set(linecache.cache)
    linecache.checkcache()
    if not cached <= set(linecache.cache):
        for cached_function in (
            _functions,
            _forwarding_lines,
            only_forwards_call,
            _statements,
            _marker_lines,
        ):
            cached_function.cache_clear()


def qualified(filename: str, line: int) -> str:
    """Return the qualified name of the innermost function around a line; "" if there is none."""
    functions = _functions(filename)
    around = [(first, last, name) for first, last, name in functions if first <= line <= last]
    return max(around, default=(0, 0, ""))[2]  # the innermost function begins last


def statement_lines(filename: str, line: int) -> range:
    """Return the lines of the innermost statement at a line; for a block, those before its body."""
    for first, last in _statements(filename):
        if first <= line <= last:
            return range(first, last + 1)
    return range(line, line + 1)


def docstring_lines(filename: str) -> frozenset[int]:
    """Return the lines of a file's statements that are only a constant, such as docstrings."""
    return frozenset(
        line
        for node in _statement_nodes(_parsed_file(filename))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    )


def _statement_nodes(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield a file's statements without visiting expressions, which are most of the nodes."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            for child in getattr(node, field, ()):
                pending.append(child)
                if isinstance(child, ast.stmt):
                    yield child


@functools.lru_cache(maxsize=256)
def _statements(filename: str) -> tuple[tuple[int, int], ...]:
    """Return (first line, last line) of each statement in a file, the shortest first."""
    spans = []
    for node in _statement_nodes(_parsed_file(filename)):
        last = node.end_lineno or node.lineno
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            last = max(node.lineno, body[0].lineno - 1)
        spans.append((node.lineno, last))
    return tuple(sorted(spans, key=lambda span: span[1] - span[0]))


def marker_line(filename: str, first: int, marker: str) -> int:
    """Return the line of a test's marker: its own, its class's or its module's.

    If no line names the marker, return ``first``, the test's first line including decorators.
    """
    return _marker_lines(filename, marker).get(first, first)


@functools.lru_cache(maxsize=256)
def _marker_lines(filename: str, marker: str) -> dict[int, int]:
    """Map the first line of each function in a file to the line of its marker."""
    marker_lines: dict[int, int] = {}

    def walk(node: ast.Module | ast.ClassDef, inherited: int | None) -> None:
        marks = [
            child.value
            for child in node.body
            if isinstance(child, ast.Assign)
            for target in child.targets
            if isinstance(target, ast.Name) and target.id == "pytestmark"
        ]
        inherited = _mention(marks, marker) or inherited
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                walk(child, _mention(child.decorator_list, marker) or inherited)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min(part.lineno for part in (child, *child.decorator_list))
                line = _mention(child.decorator_list, marker) or inherited
                if line:
                    marker_lines[first] = line

    walk(_parsed_file(filename), None)
    return marker_lines


def _mention(nodes: Iterable[ast.AST], marker: str) -> int | None:
    """Return the line of the first mention of a marker in any of the nodes."""
    for root in nodes:
        for node in ast.walk(root):
            if isinstance(node, ast.Attribute) and node.attr == marker:
                return node.lineno
    return None


def _parsed_file(filename: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):  # a template, a NUL byte, deep nesting
        return ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=256)
def _functions(filename: str) -> tuple[tuple[int, int, str], ...]:
    """Return (first line, last line, qualified name) of each function in a file."""
    functions: list[tuple[int, int, str]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    functions.append((child.lineno, child.end_lineno or child.lineno, name))
                walk(child, f"{name}.")
            else:
                walk(child, prefix)

    walk(_parsed_file(filename), "")
    return tuple(functions)


@functools.lru_cache(maxsize=256)
def _forwarding_lines(filename: str) -> frozenset[int]:
    """Return the lines of statements that only call a decorated function with all arguments."""
    lines: set[int] = set()

    def walk(node: ast.AST, around: frozenset[str], own: ast.arguments | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = frozenset(argument.arg for argument in _named(own)) if own else frozenset()
                walk(child, around | names, child.args)
                continue
            if own is not None and isinstance(child, (ast.Return, ast.Assign, ast.Expr)):
                call = child.value.value if isinstance(child.value, ast.Await) else child.value
                if isinstance(call, ast.Call) and _forwards_all_arguments(call, own, around):
                    lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
            walk(child, around, own)

    walk(_parsed_file(filename), frozenset(), None)
    return frozenset(lines)


def _named(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _forwards_all_arguments(call: ast.Call, own: ast.arguments, around: frozenset[str]) -> bool:
    """Return whether a call passes all of ``own`` on to an argument of an enclosing function."""
    if not isinstance(call.func, ast.Name) or call.func.id not in around:
        return False
    if call.func.id in {argument.arg for argument in _named(own)} or not (own.vararg or own.kwarg):
        return False
    handed = [argument.arg for argument in (*own.posonlyargs, *own.args)]
    handed += [f"*{own.vararg.arg}"] if own.vararg else []
    by_name = {(argument.arg, argument.arg) for argument in own.kwonlyargs}
    by_name |= {("**", own.kwarg.arg)} if own.kwarg else set()
    return [ast.unparse(argument) for argument in call.args] == handed and by_name == {
        (argument.arg or "**", ast.unparse(argument.value)) for argument in call.keywords
    }
