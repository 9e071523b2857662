"""Read what ``gpumem compare`` compares: a report, a folder of baselines, or a revision of one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.baselines.paths import ENDING, Key
from pytest_gpumem.cli.recorded.folder import Figures, read_contents, read_folder
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.files.git import (
    GitError,
    OutsideRepositoryError,
    blob_contents,
    folder_blobs,
    path_in_repository,
    repository_root,
    run_git,
)
from pytest_gpumem.judge.result import entry_of
from pytest_gpumem.nodeids import split_nodeid
from pytest_gpumem.report.json_report import read_report

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import BaselineEntry

_REMEDY: Final = "name a report (.json), a folder of baselines, or a git revision"


@dataclass
class Source:
    """One side of a comparison."""

    name: str
    """as given on the command line"""
    figures: Figures
    remarks: list[str] = field(default_factory=list)
    """sentences on figures that this side lacks"""
    out_of_memory: frozenset[Key] = frozenset()
    """tests that ran out of memory, which have no figures"""
    of_report: bool = False


class SourceError(BaselineError):
    """An argument is neither a report nor baselines."""


def read_source(name: str, directory: Path) -> Source:
    """Read the figures that an argument names."""
    path = Path(name)
    try:
        folder, file = bool(name) and path.is_dir(), path.is_file()
    except OSError:  # too long for a file name
        folder = file = False
    if folder:
        return read_directory(path, name)
    if file:
        entries, out_of_memory = measured_entries(read_report(name).results)
        remarks = []
        if out_of_memory:
            number = len(out_of_memory)
            measurements = "1 measurement" if number == 1 else f"{number} measurements"
            remarks = [f"{measurements} of {name} ran out of memory, without a peak to compare"]
        figures = Figures(files=1, entries=entries)
        return Source(name, figures, remarks, out_of_memory, of_report=True)
    if name.endswith(ENDING) or path.is_absolute():
        raise SourceError(name, "there is no such file or folder", _REMEDY)
    return _read_revision(name, directory)


def read_directory(directory: Path, name: str) -> Source:
    """Read a folder's baselines; ``name`` is their name in the comparison."""
    figures = read_folder(directory)
    remarks = [] if figures.files else [f"{name} has no baselines"]
    return Source(name, figures, remarks)


def measured_entries(results: Iterable[Result]) -> tuple[dict[Key, BaselineEntry], frozenset[Key]]:
    """Return the figures of a report's results, and the tests that ran out of memory."""
    entries, out_of_memory = {}, set()
    for result in results:
        if result.measurement is None:
            continue
        key = Key(result.device_key, *split_nodeid(result.nodeid), result.part)
        if result.measurement.out_of_memory is None:
            entries[key] = entry_of(result)
        else:
            out_of_memory.add(key)
    return entries, frozenset(out_of_memory)


def _read_revision(revision: str, directory: Path) -> Source:
    if not revision or revision.startswith("-"):
        raise SourceError(revision or "''", "this is not a git revision", _REMEDY)
    try:
        root = repository_root()
        try:
            question = ("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
            commit = run_git(*question).decode().strip()
        except GitError:
            raise GitError("git has no such revision") from None
        folder = path_in_repository(directory, root)
        blobs = folder_blobs(root, commit, folder)
        blobs = {path: blob for path, blob in blobs.items() if path.suffix == ENDING}
        # One git process for all contents, as there may be a thousand files.
        contents_of_blobs = list(blob_contents(root, filter(None, blobs.values())))
    except OutsideRepositoryError as error:
        remedy = "name the baselines' folder with --baseline-dir"
        raise SourceError(revision, str(error), remedy) from error
    except GitError as error:
        problem = f"there is no such file or folder, and {error}"
        raise SourceError(revision, problem, _REMEDY) from error
    paths = [path for path, name in blobs.items() if name]
    contents = dict(zip(paths, contents_of_blobs, strict=True))

    def read(path: Path) -> bytes:
        if path not in contents:
            raise BaselineError(
                str(path), "is a link in this revision, not a file", "commit the file itself"
            )
        return contents[path]

    figures = read_contents(((path, read) for path in blobs), Path(folder))
    figures.errors = [
        BaselineError(f"{revision}:{error.given}", error.problem, error.remedy)
        for error in figures.errors
    ]
    remarks = [] if figures.files else [f"{revision} has no baselines in {folder or os.curdir}"]
    return Source(revision, figures, remarks)
