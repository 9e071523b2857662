"""Ask git for the project's lines that changed since a baseline was committed."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.explain.causes import is_alike, without_comment
from pytest_gpumem.files.git import GitError, run_git
from pytest_gpumem.source_lines import docstring_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MAX_NEW_FILES: Final = 50
"""maximum number of untracked files to read; if there are more, none is read"""
_HUNK: Final = re.compile(r"@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class Edit:
    """A line of the project that changed since a baseline was committed."""

    path: str
    """the file's path, in the format of :class:`~pytest_gpumem.measurement.Site`"""
    line: int
    """current line number, from 1; for a removed line, that of the line now in its place"""
    old: str
    """the line before, without indent; "" if it is new"""
    new: str
    """the line now; "" if it was removed"""
    hunk: int = 0
    """number of the first line of the edit's hunk"""
    grows: bool = False
    """whether the line itself allocates or keeps memory that grew"""


class Edits(NamedTuple):
    """The edits since a baseline's commit; none if git cannot determine them."""

    commit: str = ""
    number: int = 0
    """the number of hunks"""
    lines: Sequence[Edit] = ()
    """all lines, or those linked to a growth, the closest first"""
    all_lines: Sequence[Edit] = ()
    """all lines, if ``lines`` has only those linked to a growth"""


def changed_lines(root: Path, baseline: Path) -> Edits:
    """Return the lines of Python files that changed since a baseline file's last commit.

    Uncommitted changes count; comments, docstrings and indents do not.

    Returns:
        no edits if git cannot determine them: without git, outside a repository, if the baseline
        has uncommitted changes, or if a shallow clone has no commit before the baseline's.
    """
    try:
        where, file = ("-C", str(root)), ("--", str(baseline))
        if run_git(*where, "status", "--porcelain", *file).strip():
            return Edits()
        line = run_git(*where, "log", "-1", "--format=%H %P", *file).decode().split()
        shallow = run_git(*where, "rev-parse", "--is-shallow-repository").strip() == b"true"
        # In the last commit of a shallow clone every file looks newly added.
        if not line or (shallow and len(line) == 1):
            return Edits()
        patch = run_git(
            *(*where, "-c", "core.quotePath=false", "diff", "--no-color", "--no-ext-diff"),
            *("--no-textconv", "--relative", "-w", "-U0", "--src-prefix=a/", "--dst-prefix=b/"),
            *(line[0], "--", "*.py"),
        )
        names = run_git(*(*where, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py"))
    except GitError:
        return Edits()
    edits = list(edits_of_patch(patch.decode(errors="replace")))
    files = [name for name in names.decode(errors="replace").split("\0") if name]
    for name in files if len(files) <= MAX_NEW_FILES else ():
        with suppress(OSError):
            lines = (root / name).read_text(encoding="utf-8", errors="replace").splitlines()
            edits += _edits_of_hunk(name, 1, [], lines)
    texts = {path: docstring_lines(str(root / path)) for path in {edit.path for edit in edits}}
    edits = [edit for edit in edits if not edit.new or edit.line not in texts[edit.path]]
    return Edits(line[0], len({(edit.path, edit.hunk) for edit in edits}), edits)


def edits_of_patch(patch: str) -> Iterator[Edit]:
    """Yield the edits of a patch that has no context lines."""
    path, first = "", 0
    old: list[str] = []
    new: list[str] = []
    for line in patch.splitlines():
        hunk = _HUNK.match(line)
        header = hunk is None and not old and not new
        if header and line.startswith("+++ "):
            path = line[4:].split("\t")[0].removeprefix("b/")
        if hunk is not None or line.startswith("diff --git "):
            yield from _edits_of_hunk(path, first, old, new)
            old, new = [], []
            if hunk is None:
                path, first = "", 0
            else:
                # For removed lines git gives the number of the line before.
                first = int(hunk[1]) + (hunk[2] == "0")
        elif first and line.startswith("-"):
            old.append(line[1:])
        elif first and line.startswith("+"):
            new.append(line[1:])
    yield from _edits_of_hunk(path, first, old, new)


def _edits_of_hunk(path: str, first: int, old: Sequence[str], new: Sequence[str]) -> Iterator[Edit]:
    """Match the new lines of a hunk with the old ones, and yield its edits."""
    old_codes = [line.strip() for line in old]
    waiting = 0
    for offset, line in enumerate(new):
        code = line.strip()
        if _is_nothing(code):
            continue
        earlier = next(
            (at for at in range(waiting, len(old_codes)) if is_alike(old_codes[at], code)),
            None,
        )
        if earlier is None:
            yield Edit(path, first + offset, "", code, first)
            continue
        for gone in _codes(old_codes[waiting:earlier]):
            yield Edit(path, first + offset, gone, "", first)
        waiting = earlier + 1
        if without_comment(old_codes[earlier]) != without_comment(code):
            yield Edit(path, first + offset, old_codes[earlier], code, first)
    for gone in _codes(old_codes[waiting:]):
        yield Edit(path, first + len(new), gone, "", first)


def _codes(lines: Sequence[str]) -> Iterator[str]:
    return (code for code in lines if not _is_nothing(code))


def _is_nothing(code: str) -> bool:
    """Return whether a line contains no code, without looking at the lines around it."""
    return not code or code.startswith("#") or not code.strip("()[]{},:'\"")
