"""The sources of ``gpumem compare``: a report, a folder of baselines, or a git revision of one."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.baselines.folder import ENDING, Figures, read_contents, read_folder
from pytest_gpumem.baselines.key import Key
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.judge.result import entry_of
from pytest_gpumem.nodeids import split_nodeid
from pytest_gpumem.report.json_report import read_report

if TYPE_CHECKING:
    from collections.abc import Sequence

_REMEDY: Final = "name a report (.json), a folder of baselines, or a git revision"
_FILES: Final = ("100644", "100755")
"""git's modes of a file; a link has another"""


@dataclass
class Source:
    """One side of a comparison."""

    name: str
    """as on the command line"""
    figures: Figures
    remarks: list[str] = field(default_factory=list)
    """sentences about figures that it lacks"""
    out_of_memory: frozenset[Key] = frozenset()
    """tests that ran out of memory, and so have no figures"""
    of_report: bool = False


class SourceError(BaselineError):
    """An argument that names neither a report nor baselines."""


def read_source(name: str, directory: Path) -> Source:
    """Read the figures that an argument names.

    Args:
        name: of a report or a folder, else of a git revision.
        directory: the baselines' folder, which is read in that revision.

    Raises:
        BaselineError: it is none of these, or cannot be read as a whole.
    """
    path = Path(name)
    try:
        folder, file = bool(name) and path.is_dir(), path.is_file()
    except OSError:  # it is too long for a name
        folder = file = False
    if folder:
        return read_directory(path, name)
    if file:
        return _read_report(name)
    if name.endswith(ENDING) or path.is_absolute():
        raise SourceError(name, "there is no such file or folder", _REMEDY)
    return _read_revision(name, directory)


def read_directory(directory: Path, name: str) -> Source:
    """Read the baselines of a folder, under a name."""
    figures = read_folder(directory)
    remarks = [] if figures.files else [f"{name} has no baselines"]
    return Source(name, figures, remarks)


def _read_report(path: str) -> Source:
    figures = Figures(files=1)
    out_of_memory = set()
    for result in read_report(path).results:
        if result.measurement is None:
            continue
        key = Key(result.device_key, *split_nodeid(result.nodeid), result.part)
        if result.measurement.out_of_memory is None:
            figures.entries[key] = entry_of(result)
        else:
            out_of_memory.add(key)
    remarks = []
    if out_of_memory:
        number = len(out_of_memory)
        measurements = "1 measurement" if number == 1 else f"{number} measurements"
        remarks = [f"{measurements} of {path} ran out of memory, without a peak to compare"]
    return Source(path, figures, remarks, frozenset(out_of_memory), of_report=True)


def _read_revision(revision: str, directory: Path) -> Source:
    if not revision or revision.startswith("-"):
        raise SourceError(revision or "''", "this is no git revision", _REMEDY)
    root = Path(os.fsdecode(_git(revision, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    try:
        answer = _git(revision, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except SourceError:
        problem = "there is no such file or folder, and git knows no such revision"
        raise SourceError(revision, problem, _REMEDY) from None
    commit = answer.decode().strip()
    folder = os.path.relpath(os.path.realpath(directory), os.path.realpath(root))
    if folder.startswith(os.pardir):
        problem = f"the folder {directory} is not in the repository {root}"
        raise SourceError(revision, problem, "name the baselines' folder with --baseline-dir")
    prefix = "" if folder == os.curdir else f"{folder}/"
    listing = _git(revision, "-C", str(root), "ls-tree", "-r", "-z", "--full-tree", commit, prefix)
    blobs: dict[Path, str] = {}
    """files, each with its object's name; "" of a link"""
    for line in filter(None, listing.split(b"\0")):
        # mode, kind, object, tab, path
        fields, _, name = line.partition(b"\t")
        mode, *_, blob = fields.decode().split()
        path = Path(os.fsdecode(name))
        if path.suffix == ENDING:
            blobs[path] = blob if mode in _FILES else ""
    # All contents from one process of git: there may be a thousand files.
    blob_contents = _contents(revision, root, [name for name in blobs.values() if name])
    paths = [path for path, name in blobs.items() if name]
    contents = dict(zip(paths, blob_contents, strict=True))

    def read(path: Path) -> bytes:
        if path not in contents:
            raise BaselineError(str(path), "is a link there, not a file", "commit the file itself")
        return contents[path]

    figures = read_contents(((path, read) for path in blobs), Path(folder))
    figures.errors = [
        BaselineError(f"{revision}:{error.given}", error.problem, error.remedy)
        for error in figures.errors
    ]
    remarks = [] if figures.files else [f"{revision} has no baselines in {folder}"]
    return Source(revision, figures, remarks)


def _contents(revision: str, root: Path, names: Sequence[str]) -> list[bytes]:
    """Return the contents of git's blobs, in their order."""
    if not names:
        return []
    request = "".join(f"{name}\n" for name in names).encode()
    answer = _git(revision, "-C", str(root), "cat-file", "--batch", stdin=request)
    contents, start = [], 0
    for name in names:
        end = answer.index(b"\n", start)
        *_, kind, size = answer[start:end].decode().split(" ")
        if kind != "blob":
            raise SourceError(revision, f"git has no content of {name}", "run git fsck")
        contents.append(answer[end + 1 : end + 1 + int(size)])
        start = end + 1 + int(size) + 1
    return contents


def _git(revision: str, *arguments: str, stdin: bytes | None = None) -> bytes:
    """Return the output of a git command.

    Raises:
        SourceError: git is not installed, or refuses.
    """
    try:
        process = subprocess.run(["git", *arguments], input=stdin, capture_output=True, check=False)  # noqa: S607 - the user's git
    except OSError as error:
        problem = f"there is no such file or folder, and git cannot be run ({error.strerror})"
        raise SourceError(revision, problem, _REMEDY) from error
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[0].removeprefix("fatal: ") if lines else f"status {process.returncode}"
        problem = f"there is no such file or folder, and git says: {reason}"
        raise SourceError(revision, problem, _REMEDY)
    return process.stdout
