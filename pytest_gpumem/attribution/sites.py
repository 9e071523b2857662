"""Source lines: which of a block's frames is shown, and what is written of it."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.measurement import Site
from pytest_gpumem.source_lines import is_users, qualified, shown_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pytest_gpumem.measurement import Category
    from pytest_gpumem.source_lines import Line

LONGEST_CODE: Final = 120
"""characters of a line that are kept"""


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


def users_frame(frames: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the innermost frame outside of torch and this package."""
    return next((frame for frame in frames if is_users(frame["filename"])), None)


def origin(
    frames: Sequence[dict[str, Any]],
    line: Line | None,
    *,
    module: str,
    category: Category,
    nbytes: int,
) -> Origin:
    """Return where a block comes from: its own frames, else the line that the pass began with."""
    frame = users_frame(frames)
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
