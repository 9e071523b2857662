"""Source lines: which of a block's frames is shown, and what is written of it."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.records import Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.recorder import Line
    from pytest_gpumem.records import Category

LONGEST_CODE: Final = 120
"""characters of a line that are kept"""
GENERATED: Final = "torchinductor"
"""part of the names of files that torch.compile writes"""


@dataclass(frozen=True)
class Origin:
    """Where one block comes from."""

    filename: str
    line: int
    function: str
    module: str
    """the path of the module that ran, or whose parameter it is"""
    category: Category
    nbytes: int


def users_frame(
    frames: Sequence[dict[str, Any]], foreign: tuple[str, ...]
) -> dict[str, Any] | None:
    """Return the innermost frame outside of torch and this package."""
    for frame in frames:
        filename = frame["filename"]
        if not filename.startswith(foreign) and GENERATED not in filename:
            return frame
    return None


def origin(  # noqa: PLR0913 - the last three are the block's
    frames: Sequence[dict[str, Any]],
    line: Line | None,
    foreign: tuple[str, ...],
    *,
    module: str,
    category: Category,
    nbytes: int,
) -> Origin:
    """Return where a block comes from: its own frames, else the line that the pass began with."""
    frame = users_frame(frames, foreign)
    if frame is not None:
        where = frame["filename"], frame["line"], frame["name"]
    else:
        where = (line.filename, line.line, line.function) if line else ("", 0, "")
    return Origin(*where, module, category, nbytes)


def sites(origins: Iterable[Origin], root: Path) -> tuple[Site, ...]:
    """Return the sites, one for each line and category, the largest first."""
    groups: dict[tuple[str, int, Category], list[Origin]] = {}
    for one in origins:
        groups.setdefault((one.filename, one.line, one.category), []).append(one)
    made = [_site(group, root) for group in groups.values()]
    return tuple(sorted(made, key=lambda it: (-it.nbytes, it.path, it.line, it.category)))


def _site(group: Sequence[Origin], root: Path) -> Site:
    first = group[0]
    return Site(
        path=shown_path(first.filename, root) if first.filename else "",
        line=first.line,
        function=qualified(first.filename, first.line) or first.function,
        code=linecache.getline(first.filename, first.line).strip()[:LONGEST_CODE],
        module=merged_paths(one.module for one in group),
        category=first.category,
        nbytes=sum(one.nbytes for one in group),
        blocks=len(group),
    )


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


@functools.lru_cache(maxsize=256)
def _functions(filename: str) -> tuple[tuple[int, int, str], ...]:
    """Return first line, last line and qualified name of each function in a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
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


def qualified(filename: str, line: int) -> str:
    """Return the qualified name of the innermost function around a line; "" where there is none."""
    around = [it for it in _functions(filename) if it[0] <= line <= it[1]]
    return max(around, default=(0, 0, ""))[2]


def merged_paths(paths: Iterable[str]) -> str:
    """Return what module paths have in common.

    "GPT2.h.0.attn" and "GPT2.h.1.attn" give "GPT2.h.*.attn".
    """
    split = [path.split(".") for path in dict.fromkeys(paths)]
    if len({len(parts) for parts in split}) == 1:
        columns = zip(*split, strict=True)
        return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join([*common, "*"]) if common else ""
