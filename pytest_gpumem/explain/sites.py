"""Find the source line of each block, and group the blocks of each line into sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measurement import Site
from pytest_gpumem.source_lines import (
    is_users,
    only_forwards_call,
    qualified,
    shown_path,
    source_code,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pytest_gpumem.measurement import Category
    from pytest_gpumem.source_lines import Line


@dataclass(frozen=True)
class BlockOrigin:
    """The source line, module and category of one block."""

    filename: str
    line: int
    function: str
    module: str
    """the path of the module that ran, or that owns the parameter; "" if there is none"""
    category: Category
    nbytes: int


def users_frame(frames: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the innermost frame outside of torch and this package; None if there is none.

    A decorator's frame that only forwards the call counts only if there is no other.
    """
    users = [frame for frame in frames if is_users(frame["filename"])]
    own = (frame for frame in users if not only_forwards_call(frame["filename"], frame["line"]))
    return next(own, users[0] if users else None)


def origin(
    frames: Sequence[dict[str, Any]],
    line: Line | None,
    *,
    module: str,
    category: Category,
    nbytes: int,
) -> BlockOrigin:
    """Return a block's origin: the user's frame that allocated it, else ``line``.

    ``line`` called the running backward or optimizer pass: Autograd's threads, which run the
    backward, have no Python frames.
    """
    frame = users_frame(frames)
    if frame is not None:
        place = frame["filename"], frame["line"], frame["name"]
    else:
        place = (line.filename, line.line, line.function) if line else ("", 0, "")
    return BlockOrigin(*place, module, category, nbytes)


def sites(origins: Iterable[BlockOrigin], root: Path) -> tuple[Site, ...]:
    """Group blocks into sites, one per line and category, the largest first."""
    groups: dict[tuple[str, int, Category], list[BlockOrigin]] = {}
    for block_origin in origins:
        key = (block_origin.filename, block_origin.line, block_origin.category)
        groups.setdefault(key, []).append(block_origin)
    merged = []
    for group in groups.values():
        first = group[0]
        path, function, code = place_of_origin(first, root)
        merged.append(
            Site(
                path=path,
                line=first.line,
                function=function,
                code=code,
                module=merged_paths(member.module for member in group),
                category=first.category,
                nbytes=sum(member.nbytes for member in group),
                blocks=len(group),
            )
        )
    # Break ties by place, so that two runs give the same order.
    return tuple(
        sorted(merged, key=lambda site: (-site.nbytes, site.path, site.line, site.category))
    )


def place_of_origin(block_origin: BlockOrigin, root: Path) -> tuple[str, str, str]:
    """Return the file, function and code of a block's line, in a site's format."""
    filename, line = block_origin.filename, block_origin.line
    return (
        shown_path(filename, root) if filename else "",
        qualified(filename, line) or block_origin.function,
        source_code(filename, line),
    )


def merged_paths(paths: Iterable[str]) -> str:
    """Merge module paths into a common pattern.

    "GPT2.h.0.attn" and "GPT2.h.1.attn" become "GPT2.h.*.attn". Paths without a common beginning
    become "", unless they have the same number of parts.
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
