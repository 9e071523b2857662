"""The history of baselines: the changes of each commit in their folder, as git tells them.

Commits are those of the first parent's line: a merge is one step, with all that it brought. The
changes of the working tree are the last step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from pytest_gpumem.baselines.file_format import decode
from pytest_gpumem.baselines.paths import ENDING, Key, baseline_path, read_file
from pytest_gpumem.cli.recorded.changes import ChangeKind, EntryChange, pair_entries
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.files.git import (
    FILE_MODES,
    GitError,
    blob_contents,
    path_in_repository,
    repository_root,
    run_git,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.measurement import BaselineEntry

_FORMAT: Final = "%x00%H%x00%ct%x00%an%x00%s"
"""git's format of a commit: NUL parts its fields, as no name or subject can have one"""
SHALLOW: Final = "this clone is shallow; git fetch --unshallow gets the earlier commits"


class Commit(NamedTuple):
    """A commit, or the working tree."""

    name: str
    """its hash in full; "" of the working tree"""
    date: str
    """when it was committed, UTC: "2026-11-22"; "" of the working tree"""
    author: str
    subject: str

    @property
    def short(self) -> str:
        """The hash's beginning, as reports show it."""
        return self.name[:9] or "not committed"


WORKING_TREE: Final = Commit("", "", "", "")


class FileChange(NamedTuple):
    """A baseline file before a commit and after it: names of git's blobs, "" of none."""

    path: str
    """from the top of the repository"""
    old: str
    new: str


IN_WORKING_TREE: Final = "working tree"
"""stands for the blob of a file that is not committed"""
_Log: TypeAlias = "list[tuple[Commit, list[FileChange]]]"
"""commits with the files that they changed"""


@dataclass(frozen=True)
class Step:
    """The changes of one commit."""

    commit: Commit
    changes: tuple[EntryChange, ...]
    """of tests and parts: moved figures or provenance, the largest move first"""
    errors: tuple[BaselineError, ...] = ()
    """files that could not be read, before it or after it"""


@dataclass(frozen=True)
class BaselineHistory:
    """The history of a folder's baselines."""

    steps: tuple[Step, ...] = ()
    """the newest first"""
    remarks: tuple[str, ...] = ()
    """sentences about its gaps"""

    @property
    def keys(self) -> list[Key]:
        """All tests and parts in it, sorted."""
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
    accept: Callable[[Key], bool] | None = None,
    module: str = "",
) -> BaselineHistory:
    """Return the changes of each commit in a folder of baselines.

    The folder may be gone from the working tree. ``limit`` is the number of the newest commits to
    read (None: all), ``module`` the only file of tests with baselines to read ("": all).

    Raises:
        GitError: git or the repository is missing.
    """
    root, log = folder_log(directory)
    if module:
        # Below the folder of any device.
        ending = baseline_path(Path(), "device", module).as_posix().removeprefix("device")
        log = [
            (commit, [file for file in files if file.path.endswith(ending)])
            for commit, files in log
        ]
    log = [(commit, files) for commit, files in log if files]
    remarks = []
    if limit is not None and len(log) > limit:
        remarks.append(f"the newest {limit} of {len(log)} commits that changed baselines")
        log = log[:limit]
    versions = _Versions(root, log, accept)
    steps = [step for step in map(versions.step, log) if step.changes or step.errors]
    if run_git("-C", str(root), "rev-parse", "--is-shallow-repository").strip() == b"true":
        remarks.append(SHALLOW)
    return BaselineHistory(tuple(steps), tuple(remarks))


class _Content(msgspec.Struct):
    """A version of a baseline file of which no test is decoded: quickly."""

    format: int
    device: msgspec.Raw
    module: str
    provenance: msgspec.Raw
    tests: dict[str, msgspec.Raw]

    @property
    def head(self) -> tuple[int, bytes, str, bytes]:
        """The settings that bear on the figures of all tests."""
        return self.format, bytes(self.device), self.module, bytes(self.provenance)


_Version: TypeAlias = "_Content | bytes"
"""of a file: its bytes where these are no such content, or of an older form"""


def _tree_version(content: bytes) -> _Version:
    try:
        return msgspec.json.decode(content, type=_Content)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return content  # its strict reader names the fault


class _Versions:
    """The versions of baseline files, from the newest on: of each file the last one is kept."""

    def __init__(self, root: Path, log: _Log, accept: Callable[[Key], bool] | None) -> None:
        self._root = root
        self._accept = accept
        self._last: dict[str, tuple[str, _Version]] = {}
        blobs: list[str] = []
        last: dict[str, str] = {}
        for _, files in log:
            for file in files:
                blobs += [file.new] if file.new != last.get(file.path) else []
                blobs += [file.old] if file.old != file.new else []
                last[file.path] = file.old
        committed = (blob for blob in blobs if blob not in {"", IN_WORKING_TREE})
        self._contents = blob_contents(root, committed)

    def step(self, logged: tuple[Commit, Sequence[FileChange]]) -> Step:
        """Return a commit's changes; commits are asked for in the order of the log."""
        commit, files = logged
        earlier: dict[Key, BaselineEntry] = {}
        later: dict[Key, BaselineEntry] = {}
        errors = []
        for file in files:
            blob, new = self._last.pop(file.path, ("", b""))
            if blob != file.new or not blob:
                new = self._next(file.path, file.new)
            old = self._next(file.path, file.old) if file.old != file.new else new
            self._last[file.path] = file.old, old
            try:
                old_entries, new_entries = self._moved_entries(file.path, old, new)
            except BaselineError as error:
                name = f"{commit.short}:{error.given}"
                errors.append(BaselineError(name, error.problem, error.remedy))
                continue
            earlier |= old_entries
            later |= new_entries
        moved = [
            change
            for change in pair_entries(earlier, later)
            if change.kind is not ChangeKind.SAME or toolchain_moved(change)
        ]
        return Step(commit, tuple(moved), tuple(errors))

    def _next(self, path: str, blob: str) -> _Version:
        """Return a version of a file, the next one that git tells; b"" of none."""
        if blob == IN_WORKING_TREE:
            return _tree_version(read_file(self._root / path) or b"")
        return _tree_version(next(self._contents)) if blob else b""

    def _moved_entries(
        self, path: str, old: _Version, new: _Version
    ) -> tuple[dict[Key, BaselineEntry], dict[Key, BaselineEntry]]:
        """Return the entries before and after of the tests with another text."""
        if isinstance(old, _Content) and isinstance(new, _Content) and old.head == new.head:
            same = {
                name
                for name, content in old.tests.items()
                if name in new.tests and bytes(content) == bytes(new.tests[name])
            }
            old, new = (
                msgspec.structs.replace(
                    version,
                    tests={name: text for name, text in version.tests.items() if name not in same},
                )
                for version in (old, new)
            )
        return self._entries(path, old), self._entries(path, new)

    def _entries(self, path: str, version: _Version) -> dict[Key, BaselineEntry]:
        if version == b"":
            return {}
        content = msgspec.json.encode(version) if isinstance(version, _Content) else version
        file = decode(Path(path), content)
        keyed = (
            (Key(file.device.key, file.module, test, part), entry)
            for test, parts in file.tests.items()
            for part, entry in parts.items()
        )
        return {key: entry for key, entry in keyed if self._accept is None or self._accept(key)}


def toolchain_moved(change: EntryChange) -> bool:
    """Return whether a test's baseline was made with another toolchain than the one before."""
    return (
        change.old is not None
        and change.new is not None
        and change.old.provenance != change.new.provenance
    )


# -- git's log --


def folder_log(directory: Path) -> tuple[Path, _Log]:
    """Return the top of the repository, and the commits that changed the folder: newest first."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    root = repository_root(existing)
    folder = path_in_repository(directory, root) or os.curdir
    log = []
    uncommitted = list(uncommitted_files(root, folder))
    if uncommitted:
        log.append((WORKING_TREE, uncommitted))
    if _has_commits(root):
        output = run_git(
            *("-C", str(root), "-c", "log.showSignature=false", "log"),
            # The folder's name is not a pattern.
            *("--first-parent", "-m", "--raw", "-z", "--no-abbrev", "--no-renames"),
            *(f"--format={_FORMAT}", "--encoding=UTF-8", "--", f":(literal){folder}"),
        )
        log += parse_log(output)
    return root, log


def _has_commits(root: Path) -> bool:
    try:
        run_git("-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD")
    except GitError:
        return False
    return True


def parse_log(output: bytes) -> _Log:
    """Return the commits of ``git log --raw -z`` with the baseline files that each changed."""
    log: _Log = []
    words = iter(output.split(b"\0"))
    for word in words:
        change = word.lstrip(b"\n")
        if change.startswith(b":"):
            # ":100644 100644 OLD NEW M", and the path as the next word
            old_mode, mode, old, new, _ = change[1:].decode().split(" ")
            path = os.fsdecode(next(words))
            if path.endswith(ENDING):
                log[-1][1].append(
                    FileChange(
                        path,
                        old if old_mode in FILE_MODES else "",
                        new if mode in FILE_MODES else "",
                    )
                )
        elif not change:  # a commit begins with an empty word; the last word is one as well
            fields = [field.decode(errors="replace") for field in islice(words, 4)]
            if len(fields) == len(Commit._fields):
                name, seconds, author, subject = fields
                date = datetime.fromtimestamp(int(seconds), timezone.utc).date().isoformat()
                log.append((Commit(name, date, author, subject), []))
    return log


def uncommitted_files(root: Path, folder: str) -> Iterator[FileChange]:
    """Yield the files of the folder that differ from the last commit's."""
    git = ("-C", str(root))
    place = f":(literal){folder}"
    status = run_git(
        *git, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames", "--", place
    )
    # "XY PATH": two letters and a space
    paths = [line[3:] for line in status.split(b"\0") if line.endswith(ENDING.encode())]
    blobs: dict[bytes, str] = {}
    if paths and _has_commits(root):
        listing = run_git(*git, "ls-tree", "-r", "-z", "--full-tree", "HEAD")
        for line in filter(None, listing.split(b"\0")):
            fields, _, path = line.partition(b"\t")
            mode, *_, blob = fields.decode().split()
            blobs[path] = blob if mode in FILE_MODES else ""
    for path in paths:
        name = os.fsdecode(path)
        there = (root / name).is_file()
        yield FileChange(name, blobs.get(path, ""), IN_WORKING_TREE if there else "")
