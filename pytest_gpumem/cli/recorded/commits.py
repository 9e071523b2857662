"""Read the history of baselines from git: the changes of each commit in their folder.

Only first parents are followed: a merge is one step that contains all changes of the merged branch.
The working tree's changes are the newest step.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.baselines.file_format import decode
from pytest_gpumem.baselines.paths import ENDING, Key, baseline_path, read_file
from pytest_gpumem.cli.recorded.changes import ChangeKind, EntryChange, pair_entries
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.files.git import (
    GitError,
    blob_contents,
    folder_blobs,
    path_in_repository,
    repository_root,
    run_git,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpumem.measurement import BaselineEntry

_FORMAT: Final = "%H%x00%ct%x00%an%x00%s"
"""git's format for a commit, separated by NUL, which no name or subject can contain"""
SHALLOW: Final = "this clone is shallow; git fetch --unshallow gets the earlier commits"


class Commit(NamedTuple):
    """A commit, or the working tree."""

    name: str
    """the full hash; "" for the working tree"""
    date: str
    """the commit's date, UTC: "2026-11-22"; "" for the working tree"""
    author: str
    subject: str

    @property
    def short(self) -> str:
        """The abbreviated hash for reports."""
        return self.name[:9] or "not committed"


WORKING_TREE: Final = Commit("", "", "", "")


@dataclass(frozen=True)
class Step:
    """The changes of one commit."""

    commit: Commit
    changes: tuple[EntryChange, ...]
    """tests and parts whose figures or provenance changed, the largest change first"""
    errors: tuple[BaselineError, ...] = ()
    """files that could not be read before or after the commit"""


@dataclass(frozen=True)
class BaselineHistory:
    """The history of a folder's baselines."""

    steps: tuple[Step, ...] = ()
    """newest first"""
    remarks: tuple[str, ...] = ()
    """sentences on gaps in the history"""

    @property
    def keys(self) -> list[Key]:
        """All tests and parts in the history, sorted."""
        return sorted({change.key for step in self.steps for change in step.changes})

    def of(self, key: Key) -> list[tuple[Commit, EntryChange]]:
        """Return the commits that changed a test or part, the newest first."""
        return [
            (step.commit, change)
            for step in self.steps
            for change in step.changes
            if change.key == key
        ]


def read_history(
    directory: Path,
    *,
    limit: int | None = None,
    accept: Callable[[Key], bool] = lambda _key: True,
    module: str = "",
) -> BaselineHistory:
    """Read the changes of each commit in a folder of baselines.

    The folder may be missing from the working tree. ``limit`` is the number of newest commits to
    read (None: all), ``module`` the only test file whose baselines are read ("": all). ``accept``
    selects the tests and parts.

    Raises:
        GitError: git or the repository is missing.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    root = repository_root(existing)
    folder, ending = path_in_repository(directory, root), ENDING
    if module:
        # The path of the module's file within the folder of any device.
        ending = baseline_path(Path(), "device", module).as_posix().removeprefix("device")
    log = commits_of(root, folder, ending)
    current = working_files(root, folder, ending)

    @cache
    def files_of(commit: Commit) -> dict[Path, str]:
        if commit == WORKING_TREE:
            return current
        blobs = folder_blobs(root, commit.name, folder)
        return {path: blob for path, blob in blobs.items() if blob and _ends(path, ending)}

    if current != (files_of(log[0]) if log else {}):
        log.insert(0, WORKING_TREE)
    remarks = []
    read = log if limit is None else log[: limit + 1]
    versions = [files_of(commit) for commit in read]
    if limit is not None and len(log) > limit:
        remarks.append(f"the newest {limit} of {len(log)} commits that changed baselines")
    else:
        versions.append({})  # the state before the first commit
    pairs = [(old, new) for new, old in pairwise(versions)]
    names = {blob for old, new in pairs for _, blob in old.items() ^ new.items()}
    contents = {
        blob: read_file(root / path) or b"" for path, blob in current.items() if blob in names
    }
    committed = sorted(names - contents.keys())
    contents |= zip(committed, blob_contents(root, committed), strict=True)

    @cache
    def entries_of(path: Path, blob: str | None) -> dict[Key, BaselineEntry]:
        if blob is None:
            return {}
        file = decode(path, contents[blob])
        keyed = (
            (Key(file.device.key, file.module, test, part), entry)
            for test, parts in file.tests.items()
            for part, entry in parts.items()
        )
        return {key: entry for key, entry in keyed if accept(key)}

    steps = [step_of(commit, *pair, entries_of) for commit, pair in zip(log, pairs, strict=False)]
    if run_git("-C", str(root), "rev-parse", "--is-shallow-repository").strip() == b"true":
        remarks.append(SHALLOW)
    moved = tuple(step for step in steps if step.changes or step.errors)
    return BaselineHistory(moved, tuple(remarks))


def step_of(
    commit: Commit,
    old: Mapping[Path, str],
    new: Mapping[Path, str],
    entries_of: Callable[[Path, str | None], dict[Key, BaselineEntry]],
) -> Step:
    """Return a commit's changes, from the blobs of the files before and after it."""
    earlier: dict[Key, BaselineEntry] = {}
    later: dict[Key, BaselineEntry] = {}
    errors = []
    for path in sorted({path for path, _ in old.items() ^ new.items()}):
        try:
            entries = entries_of(path, old.get(path)), entries_of(path, new.get(path))
        except BaselineError as error:
            name = f"{commit.short}:{error.given}"
            errors.append(BaselineError(name, error.problem, error.remedy))
            continue
        earlier |= entries[0]
        later |= entries[1]
    moved = [
        change
        for change in pair_entries(earlier, later)
        if change.kind is not ChangeKind.SAME or toolchain_moved(change)
    ]
    return Step(commit, tuple(moved), tuple(errors))


def toolchain_moved(change: EntryChange) -> bool:
    """Return whether a baseline was made with another toolchain than its predecessor."""
    return (
        change.old is not None
        and change.new is not None
        and change.old.provenance != change.new.provenance
    )


# -- git --


def _ends(path: Path, ending: str) -> bool:
    return f"/{path.as_posix()}".endswith(ending)


def commits_of(root: Path, folder: str, ending: str) -> list[Commit]:
    """Return the commits that changed a folder's files whose paths end in ``ending``, newest first.

    Without a commit, the list is empty.
    """
    git = ("-C", str(root))
    try:
        run_git(*git, "rev-parse", "--verify", "--quiet", "HEAD")
    except GitError:
        return []
    pattern = re.sub(r"([\\*?\[])", r"\\\1", folder)
    log = run_git(
        *(*git, "-c", "log.showSignature=false", "log", "--first-parent", "--encoding=UTF-8"),
        *(f"--format={_FORMAT}", "--", f":(top,glob){pattern}{'/' * bool(folder)}**/*{ending}"),
    )
    commits = []
    for line in log.decode(errors="replace").splitlines():
        name, seconds, author, subject = line.split("\0")
        date = datetime.fromtimestamp(int(seconds), timezone.utc).date().isoformat()
        commits.append(Commit(name, date, author, subject))
    return commits


def working_files(root: Path, folder: str, ending: str) -> dict[Path, str]:
    """Map the working tree's files whose paths end in ``ending`` to their blob hashes."""
    git = ("-C", str(root))
    place = f":(top,literal){folder}" if folder else ":/"
    options = ("-z", "--cached", "--others", "--exclude-standard", "--", place)
    names = {os.fsdecode(name) for name in run_git(*git, "ls-files", *options).split(b"\0")}
    paths = [path for path in sorted(map(Path, names)) if (root / path).is_file()]
    paths = [path for path in paths if _ends(path, ending)]
    stdin = b"".join(os.fsencode(path) + b"\n" for path in paths)
    blobs = run_git(*git, "hash-object", "--stdin-paths", stdin=stdin)
    return dict(zip(paths, blobs.decode().split(), strict=True))
