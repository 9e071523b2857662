"""What ``gpumem compare`` takes: a report, a folder of baselines, or a git revision of one."""

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
    from collections.abc import Iterator, Sequence

_HOW: Final = "name a report (.json), a folder of baselines, or a git revision"
_FILES: Final = ("100644", "100755")
"""git's modes of a file; a link has another"""


@dataclass
class Source:
    """One side of a comparison."""

    name: str
    """as it was given"""
    figures: Figures
    remarks: list[str] = field(default_factory=list)
    """sentences on what it has not"""
    out_of_memory: frozenset[Key] = frozenset()
    """tests that ran out of memory, and so have no figures"""
    of_report: bool = False


class SourceError(BaselineError):
    """An argument that is nothing that can be compared."""


def read_source(given: str, directory: Path) -> Source:
    """Read what an argument names.

    Args:
        given: a report, a folder, else a git revision.
        directory: the baselines' folder, of which the revision is wanted.

    Raises:
        BaselineError: it is none of these, or cannot be read as a whole.
    """
    path = Path(given)
    try:
        folder, file = bool(given) and path.is_dir(), path.is_file()
    except OSError:  # it is too long for a name
        folder = file = False
    if folder:
        return read_directory(path, given)
    if file:
        return _read_report(given)
    if given.endswith(ENDING) or path.is_absolute():
        raise SourceError(given, "there is no such file or folder", _HOW)
    return _read_revision(given, directory)


def read_directory(directory: Path, name: str) -> Source:
    """Read the baselines of a folder, under a name."""
    figures = read_folder(directory)
    remarks = [] if figures.files else [f"{name} has no baselines"]
    return Source(name, figures, remarks)


def _read_report(given: str) -> Source:
    figures = Figures(files=1)
    short = set()
    for result in read_report(given).results:
        if result.measurement is None:
            continue
        key = Key(result.device_key, *split_nodeid(result.nodeid), result.part)
        if result.measurement.out_of_memory is None:
            figures.entries[key] = entry_of(result)
        else:
            short.add(key)
    number = "1 measurement" if len(short) == 1 else f"{len(short)} measurements"
    remarks = [f"{number} of {given} ran out of memory, without a peak to compare"] if short else []
    return Source(given, figures, remarks, frozenset(short), of_report=True)


def _read_revision(revision: str, directory: Path) -> Source:
    if not revision or revision.startswith("-"):
        raise SourceError(revision or "''", "this is no git revision", _HOW)
    root = Path(os.fsdecode(_git(revision, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    commit = _commit(revision)
    folder = os.path.relpath(os.path.realpath(directory), os.path.realpath(root))
    if folder.startswith(os.pardir):
        problem = f"the folder {directory} is not in the repository {root}"
        raise SourceError(revision, problem, "name the baselines' folder with --baseline-dir")
    where = "" if folder == os.curdir else f"{folder}/"
    listing = _git(revision, "-C", str(root), "ls-tree", "-r", "-z", "--full-tree", commit, where)
    blobs = dict(_blobs(listing))
    contents = _contents(revision, root, [name for name in blobs.values() if name])
    found = dict(zip([path for path, name in blobs.items() if name], contents, strict=True))

    def read(path: Path) -> bytes:
        if path not in found:
            raise BaselineError(str(path), "is a link there, no file", "commit the file itself")
        return found[path]

    figures = read_contents(((path, read) for path in blobs), Path(folder))
    figures.errors = [
        BaselineError(f"{revision}:{it.given}", it.problem, it.remedy) for it in figures.errors
    ]
    remarks = [] if figures.files else [f"{revision} has no baselines in {folder}"]
    return Source(revision, figures, remarks)


def _blobs(listing: bytes) -> Iterator[tuple[Path, str]]:
    """Yield the files that ``git ls-tree`` listed, each with its object's name, "" of a link."""
    for line in filter(None, listing.split(b"\0")):
        about, _, name = line.partition(b"\t")
        mode, _, rest = about.decode().partition(" ")
        path = Path(os.fsdecode(name))
        if path.suffix == ENDING:
            yield path, rest.split()[-1] if mode in _FILES else ""


def _commit(revision: str) -> str:
    try:
        found = _git(revision, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except SourceError:
        problem = "there is no such file or folder, and git knows no such revision"
        raise SourceError(revision, problem, _HOW) from None
    return found.decode().strip()


def _contents(revision: str, root: Path, names: Sequence[str]) -> list[bytes]:
    """Return the contents of git's blobs, in their order."""
    if not names:
        return []
    asked = "".join(f"{name}\n" for name in names).encode()
    answer = _git(revision, "-C", str(root), "cat-file", "--batch", given=asked)
    contents, start = [], 0
    for name in names:
        end = answer.index(b"\n", start)
        *_, kind, size = answer[start:end].decode().split(" ")
        if kind != "blob":
            raise SourceError(revision, f"git has no content of {name}", "run git fsck")
        contents.append(answer[end + 1 : end + 1 + int(size)])
        start = end + 1 + int(size) + 1
    return contents


def _git(revision: str, *arguments: str, given: bytes | None = None) -> bytes:
    """Return what a git command prints.

    Raises:
        SourceError: git is not there, or refuses.
    """
    try:
        done = subprocess.run(["git", *arguments], input=given, capture_output=True, check=False)  # noqa: S607 - the user's git
    except OSError as error:
        problem = f"there is no such file or folder, and git cannot be run ({error.strerror})"
        raise SourceError(revision, problem, _HOW) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[0].removeprefix("fatal: ") if said else f"status {done.returncode}"
        problem = f"there is no such file or folder, and git says: {reason}"
        raise SourceError(revision, problem, _HOW)
    return done.stdout
