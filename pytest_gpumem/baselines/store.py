"""Baselines: the committed record of what each test's step took, one file a device and test module.

``<directory>/<device key>/<test module>.json``, for instance
``baselines/virtual-T4/examples/test_memory.json``. :mod:`~pytest_gpumem.baselines.file_format`
says what is in a file, :mod:`~pytest_gpumem.baselines.paths` where it lies and how it is replaced.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from pytest_gpumem.baselines.file_format import WHOLE_TEST, BaselineFile, check, decode, encode
from pytest_gpumem.baselines.paths import (
    baseline_path,
    device_keys,
    read_file,
    remove_file,
    replace_file,
)
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_gpumem.measurement import BaselineEntry, DeviceInfo

__all__ = ["WHOLE_TEST", "BaselineStore", "EntryUpdate", "NewBaseline", "UpdateSummary"]

LOCK_NAME = ".gpumem.lock"
"""the file in the baseline folder that writers lock; it stays there, empty"""


@dataclass(frozen=True)
class NewBaseline:
    """What one test that ran and passed is to have as its baseline on one device."""

    device: DeviceInfo
    module: str
    """the file part of the test's nodeid: "examples/test_memory.py" """
    test: str
    """the rest of the nodeid: "TestX::test_y[a-1]" """
    parts: Mapping[str, BaselineEntry]
    """entries by the name of the part; "" is the whole test"""


@dataclass(frozen=True)
class EntryUpdate:
    """What became of one entry."""

    device_key: str
    module: str
    test: str
    part: str
    """"" is the whole test"""
    old: BaselineEntry | None
    """what the file had; None where it had nothing"""
    new: BaselineEntry | None
    """what was measured; None for a part that the test no longer has"""


@dataclass(frozen=True)
class UpdateSummary:
    """What an update did, each group in the order of its files, tests and parts."""

    created: tuple[EntryUpdate, ...] = ()
    changed: tuple[EntryUpdate, ...] = ()
    unchanged: tuple[EntryUpdate, ...] = ()
    removed: tuple[EntryUpdate, ...] = ()
    """parts that their test no longer has"""
    errors: tuple[BaselineError, ...] = ()
    """why files could not be written; what they hold is as it was"""
    files: tuple[Path, ...] = ()
    """the files that were written"""


class BaselineStore:
    """The baselines under one folder. Files are read when first asked for, and then remembered.

    Args:
        directory: the folder; it is made when there is something to write.
        lock_timeout: seconds to wait for another process that writes there.
        follow_provenance: an entry is written also where it only was made with something else.
    """

    def __init__(
        self, directory: Path, *, lock_timeout: float = 60.0, follow_provenance: bool = False
    ) -> None:
        self.directory = directory
        self._follow_provenance = follow_provenance
        self._lock_timeout = lock_timeout
        self._known: dict[tuple[str, str], BaselineFile | BaselineError | None] = {}
        self._decoded: dict[tuple[str, str], tuple[bytes, BaselineFile]] = {}

    def path(self, device_key: str, module: str) -> Path:
        """The file that has, or would have, the baselines of a module's tests on a device."""
        return baseline_path(self.directory, device_key, module)

    def get(
        self, device_key: str, module: str, test: str, part: str = WHOLE_TEST
    ) -> BaselineEntry | None:
        """The baseline of a test or of a part of it on a device; None where there is none.

        Raises:
            BaselineError: the file is there and cannot be understood.
        """
        key = device_key, module
        if key not in self._known:
            try:
                self._known[key] = self._read(device_key, module)
            except BaselineError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, BaselineError):  # a new one, as raising adds to its traceback
            raise BaselineError(known.given, known.problem, known.remedy)
        return known.tests.get(test, {}).get(part) if known else None

    def other_devices(
        self, device_key: str, module: str, test: str, part: str = WHOLE_TEST
    ) -> tuple[str, ...]:
        """The keys of other devices that have a baseline for a test.

        A file that cannot be read does not count, and raises nothing.
        """
        others = (key for key in device_keys(self.directory) if key != device_key)
        return tuple(key for key in others if self._has(key, module, test, part))

    def update(self, changes: Iterable[NewBaseline]) -> UpdateSummary:
        """Write what changed, and say what became of each entry. For the one process that writes.

        Tests that no change names are untouched. A change that has the whole test tells all its
        parts: others that the file has are removed. A later change of the same test adds to, and
        wins over, an earlier one.

        An entry whose figures, batch size and rank are the same is unchanged, unless it gets its
        first breakdown: it is not written, not even with its newer provenance or breakdown, and a
        file without any other is not touched. So a diff shows what moved, and nothing else; where
        ``follow_provenance`` is given, also what was made with something else.

        Files are read anew under a lock, so that nothing is lost of what another process has
        written meanwhile. What is wrong with a file is an error of that file alone, and what is
        wrong with a change of that change alone; nothing is raised.
        """
        with without_collections():
            return self._update(changes)

    def _update(self, changes: Iterable[NewBaseline]) -> UpdateSummary:
        log = _Log(self._same)
        pending = []
        for group in _by_file(changes, log):
            with log.errors_of_file():
                revision = self._revise(group)
                if revision.moved:
                    pending.append(group)
                else:
                    log.add(revision.entries)
        if pending:
            with log.errors_of_file(), self._lock():
                for group in pending:
                    with log.errors_of_file():
                        self._write(group, log)
        return log.summary()

    def remove(self, keys: Iterable[tuple[str, str, str]]) -> list[BaselineError]:
        """Remove tests' baselines, and the files that have no other; return why any stayed.

        Args:
            keys: device key, module and test of each; of any other nothing is touched.
        """
        log = _Log(self._same)
        groups: dict[tuple[str, str], set[str]] = {}
        for device_key, module, test in keys:
            groups.setdefault((device_key, module), set()).add(test)
        with log.errors_of_file(), self._lock():
            for (device_key, module), tests in sorted(groups.items()):
                with log.errors_of_file():
                    self._remove(device_key, module, tests)
        return log.errors

    def _remove(self, device_key: str, module: str, tests: set[str]) -> None:
        self._known.pop((device_key, module), None)
        file, path = self._read(device_key, module), self.path(device_key, module)
        if file is None or tests.isdisjoint(file.tests):
            return
        kept = {name: parts for name, parts in file.tests.items() if name not in tests}
        if kept:
            replace_file(path, encode(BaselineFile(file.device, module, kept, file.labels)))
        else:
            remove_file(path, self.directory)

    def _read(self, device_key: str, module: str) -> BaselineFile | None:
        path = self.path(device_key, module)
        content = read_file(path)
        if content is None:
            return None
        known, file = self._decoded.get((device_key, module), (None, None))
        if file is None or known != content:
            file = decode(path, content, device_key, module)
            self._decoded[device_key, module] = content, file
        return file

    def _has(self, device_key: str, module: str, test: str, part: str) -> bool:
        try:
            return self.get(device_key, module, test, part) is not None
        except BaselineError:
            return False

    def _revise(self, group: list[NewBaseline]) -> _Revision:
        device, module = group[-1].device, group[-1].module
        file = self._read(device.key, module) or BaselineFile(device, module)
        return _revise(file, group, self._same)

    def _same(self, old: BaselineEntry | None, new: BaselineEntry | None) -> bool:
        """Whether an entry needs not be written."""
        if old is None or new is None:
            return old is new
        learned = bool(new.breakdowns) and not old.breakdowns
        remade = self._follow_provenance and old.provenance != new.provenance
        same = replace(old, provenance=new.provenance, breakdowns=new.breakdowns) == new
        return same and not learned and not remade

    def _write(self, group: list[NewBaseline], log: _Log) -> None:
        revision = self._revise(group)  # once more: another process may have written meanwhile
        device, module = group[-1].device, group[-1].module
        self._known.pop((device.key, module), None)
        if revision.moved:
            path = self.path(device.key, module)
            replace_file(path, encode(revision.file))
            log.files.append(path)
        log.add(revision.entries)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        path = Path(os.path.realpath(self.directory)) / LOCK_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(str(path), timeout=self._lock_timeout)
            lock.acquire()
        except filelock.Timeout:
            problem = f"another process has held it for {self._lock_timeout:g} s"
            remedy = "wait for its update to end, and run this one again"
            raise BaselineError(str(path), problem, remedy) from None
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            remedy = "make the folder writable, or choose another with --gpumem-baseline-dir"
            raise BaselineError(str(path), f"cannot be locked: {reason}", remedy) from error
        try:
            yield
        finally:
            lock.release()


@dataclass
class _Log:
    """What an update did so far."""

    same: Callable[[BaselineEntry | None, BaselineEntry | None], bool]
    entries: list[EntryUpdate] = field(default_factory=list)
    errors: list[BaselineError] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def add(self, entries: Iterable[EntryUpdate]) -> None:
        self.entries.extend(entries)

    @contextmanager
    def errors_of_file(self) -> Iterator[None]:
        """Note an error rather than raise it."""
        try:
            yield
        except BaselineError as error:
            self.errors.append(error)

    def summary(self) -> UpdateSummary:
        groups: dict[str, list[EntryUpdate]] = {}
        for it in sorted(self.entries, key=lambda it: (it.device_key, it.module, it.test, it.part)):
            groups.setdefault(self._kind(it), []).append(it)
        return UpdateSummary(
            **{kind: tuple(entries) for kind, entries in groups.items()},
            errors=tuple(self.errors),
            files=tuple(self.files),
        )

    def _kind(self, entry: EntryUpdate) -> str:
        if entry.old is None:
            return "created"
        if entry.new is None:
            return "removed"
        return "unchanged" if self.same(entry.old, entry.new) else "changed"


def _by_file(changes: Iterable[NewBaseline], log: _Log) -> Iterable[list[NewBaseline]]:
    """The changes of each file, without those that cannot be written."""
    groups: dict[tuple[str, str], list[NewBaseline]] = {}
    for change in changes:
        with log.errors_of_file():
            check(f"{change.module}::{change.test}", change.device, change.parts)
            groups.setdefault((change.device.key, change.module), []).append(change)
    return [group for _, group in sorted(groups.items())]


@dataclass(frozen=True)
class _Revision:
    """A file's content after some changes, and what became of their entries."""

    file: BaselineFile
    entries: list[EntryUpdate]
    moved: bool


def _revise(
    file: BaselineFile,
    changes: list[NewBaseline],
    same: Callable[[BaselineEntry | None, BaselineEntry | None], bool],
) -> _Revision:
    """Apply the changes, all of this file's device and module, to what the file has."""
    measured: dict[str, dict[str, BaselineEntry]] = {}
    for change in changes:
        measured.setdefault(change.test, {}).update(change.parts)
    tests = dict(file.tests)
    entries: list[EntryUpdate] = []
    device = changes[-1].device
    device_key = device.key
    for test, new in measured.items():
        old = file.tests.get(test, {})
        gone = old.keys() - new.keys() if WHOLE_TEST in new else set()
        entries += [
            EntryUpdate(device_key, file.module, test, part, old.get(part), new.get(part))
            for part in (*new, *gone)
        ]
        kept = {part: it for part, it in old.items() if part not in gone}
        moved = {part: it for part, it in new.items() if not same(old.get(part), it)}
        if kept or moved:
            tests[test] = {**kept, **moved}
    anew = not all(same(it.old, it.new) for it in entries)
    return _Revision(BaselineFile(device, file.module, tests, file.labels), entries, anew)
