"""Baselines: the committed record of each test's memory, one file a device and test module.

``<directory>/<device key>/<test module>.json``, for instance
``baselines/virtual-T4/examples/test_memory.json``. :mod:`~pytest_gpumem.baselines.file_format`
has the content of a file, :mod:`~pytest_gpumem.baselines.paths` its path and how it is replaced.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
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
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo
from pytest_gpumem.tracebacks import without_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.baselines.paths import Key

__all__ = ["WHOLE_TEST", "BaselineStore", "EntryUpdate", "NewBaseline", "UpdateSummary"]

LOCK_NAME = ".gpumem.lock"
"""the file in the baseline folder that writers lock; it stays, empty"""
IGNORED = f".gitignore\n{LOCK_NAME}\n"
"""content of the folder's .gitignore, so that git shows neither the lock nor that file"""


@dataclass(frozen=True)
class NewBaseline:
    """The new baseline of one test that ran and passed, on one device."""

    device: DeviceInfo
    module: str
    """the file part of the test's nodeid: "examples/test_memory.py" """
    test: str
    """the nodeid after the file: "TestX::test_y[a-1]" """
    parts: Mapping[str, BaselineEntry]
    """entries by the name of the part; "" is the whole test"""


@dataclass(frozen=True)
class EntryUpdate:
    """The update of one entry of a file."""

    device_key: str
    module: str
    test: str
    part: str
    """"" is the whole test"""
    old: BaselineEntry | None
    """the file's entry; None of a new one"""
    new: BaselineEntry | None
    """the measured entry; None of a part that the test no longer has"""


@dataclass(frozen=True)
class UpdateSummary:
    """All updates of a session, each group in the order of its files, tests and parts."""

    created: tuple[EntryUpdate, ...] = ()
    changed: tuple[EntryUpdate, ...] = ()
    unchanged: tuple[EntryUpdate, ...] = ()
    removed: tuple[EntryUpdate, ...] = ()
    """parts that their test no longer has"""
    errors: tuple[BaselineError, ...] = ()
    """why files could not be written; their content is as it was"""
    files: tuple[Path, ...] = ()
    """the files that were written"""


class BaselineStore:
    """The baselines under one folder. Files are read when first asked for, and then remembered.

    Args:
        directory: the folder; the first write makes it.
        lock_timeout: seconds to wait for another process that writes into it.
        follow_provenance: an entry is written also where only its provenance changed.
    """

    def __init__(
        self, directory: Path, *, lock_timeout: float = 60.0, follow_provenance: bool = False
    ) -> None:
        self.directory = directory
        self._follow_provenance = follow_provenance
        self._lock_timeout = lock_timeout
        self._files: dict[tuple[str, str], BaselineFile | BaselineError | None] = {}
        self._decoded: dict[tuple[str, str], tuple[bytes, BaselineFile]] = {}

    def path(self, device_key: str, module: str) -> Path:
        """The file that has, or would have, the baselines of a module's tests on a device."""
        return baseline_path(self.directory, device_key, module)

    def get(
        self, device_key: str, module: str, test: str, part: str = WHOLE_TEST
    ) -> BaselineEntry | None:
        """The baseline of a test or of a part of it on a device; None without one.

        Raises:
            BaselineError: the file cannot be understood.
        """
        return self.parts(device_key, module, test).get(part)

    def parts(self, device_key: str, module: str, test: str) -> Mapping[str, BaselineEntry]:
        """The baselines of a test on a device, by its parts; "" is the whole test."""
        key = device_key, module
        if key not in self._files:
            try:
                self._files[key] = self.read(device_key, module)
            except BaselineError as error:
                self._files[key] = error
        file = self._files[key]
        if isinstance(file, BaselineError):  # a new one, as raising adds to its traceback
            raise BaselineError(file.given, file.problem, file.remedy)
        return file.tests.get(test, {}) if file else {}

    def other_devices(
        self, device_key: str, module: str, test: str, part: str = WHOLE_TEST
    ) -> tuple[str, ...]:
        """The keys of other devices that have a baseline for a test.

        A file that cannot be read does not count, and raises nothing.
        """
        keys = []
        for key in device_keys(self.directory):
            with suppress(BaselineError):
                if key != device_key and self.get(key, module, test, part) is not None:
                    keys.append(key)
        return tuple(keys)

    def update(self, baselines: Iterable[NewBaseline]) -> UpdateSummary:
        """Write the entries that changed; return the update of each. One process may call it.

        Tests that are not among ``baselines`` are untouched. A new baseline with the whole test has
        all its parts: any other part that the file has is removed. Of two of the same test the
        later adds to the earlier, and wins over it.

        An entry with the same figures, batch size and rank is unchanged, unless it gets its
        first breakdown: it is not written, not even with its newer provenance or breakdown, and a
        file without any other is not touched. So a diff shows only figures that changed; with
        ``follow_provenance``, also toolchains.

        Files are read anew under a lock, so that nothing is lost that another process has written
        meanwhile. A fault of a file is an error of that file alone, a fault of a new baseline one
        of that baseline alone; nothing is raised.
        """
        # Thousands of entries are made and none is garbage: collections would only cost time.
        with without_collections():
            log = _Log(self.same)
            by_file: dict[tuple[str, str], list[NewBaseline]] = {}
            for baseline in baselines:
                with log.errors_of_file():  # one that cannot be written is not written
                    by_file.setdefault(checked_file(baseline), []).append(baseline)
            pending = []
            for _, group in sorted(by_file.items()):
                with log.errors_of_file():
                    _, entries, changed = self.revise(group)
                    if changed:
                        pending.append(group)
                    else:
                        log.entries += entries
            if pending:
                with log.errors_of_file(), self.locked():
                    for group in pending:
                        with log.errors_of_file():
                            # Once more: another process may have written meanwhile.
                            file, entries, changed = self.revise(group)
                            key = group[-1].device.key, file.module
                            if changed:
                                replace_file(self.path(*key), encode(file))
                                log.files.append(self.path(*key))
                            log.entries += entries
            return log.summary()

    def remove(self, keys: Iterable[Key]) -> Sequence[BaselineError]:
        """Remove tests' baselines, and files that are then empty; return why any stayed."""
        log = _Log(self.same)
        groups: dict[tuple[str, str], set[str]] = {}
        for key in keys:
            groups.setdefault((key.device, key.module), set()).add(key.test)
        with log.errors_of_file(), self.locked():
            for place, tests in sorted(groups.items()):
                with log.errors_of_file():
                    file, path = self.read(*place), self.path(*place)
                    if file is None or tests.isdisjoint(file.tests):
                        continue
                    remaining = {
                        name: parts for name, parts in file.tests.items() if name not in tests
                    }
                    if remaining:
                        replace_file(path, encode(replace(file, tests=remaining)))
                    else:
                        remove_file(path, self.directory)
        return log.errors

    def read(self, device_key: str, module: str) -> BaselineFile | None:
        """Read a file anew; None of a missing one.

        Raises:
            BaselineError: the file cannot be understood.
        """
        self._files.pop((device_key, module), None)
        path = self.path(device_key, module)
        content = read_file(path)
        if content is None:
            return None
        old_content, file = self._decoded.get((device_key, module), (None, None))
        if file is None or old_content != content:
            file = decode(path, content, device_key, module)
            self._decoded[device_key, module] = content, file
        return file

    def revise(self, group: list[NewBaseline]) -> tuple[BaselineFile, list[EntryUpdate], bool]:
        """Put new baselines, all of one device and module, into their file's content.

        Returns:
            that content, the update of each of their entries, and whether the file has to be
            written.
        """
        # The newest device: its total memory may change with its driver.
        device, module = group[-1].device, group[-1].module
        file = self.read(device.key, module) or BaselineFile(device, module)
        measured: dict[str, dict[str, BaselineEntry]] = {}
        for baseline in group:
            measured.setdefault(baseline.test, {}).update(baseline.parts)
        tests = dict(file.tests)
        entries: list[EntryUpdate] = []
        for test, new in measured.items():
            old = file.tests.get(test, {})
            gone = old.keys() - new.keys() if WHOLE_TEST in new else set()
            entries += [
                EntryUpdate(device.key, module, test, part, old.get(part), new.get(part))
                for part in (*new, *gone)
            ]
            remaining = {part: entry for part, entry in old.items() if part not in gone}
            changed = {
                part: entry for part, entry in new.items() if not self.same(old.get(part), entry)
            }
            if remaining or changed:
                tests[test] = {**remaining, **changed}
        differs = not all(self.same(entry.old, entry.new) for entry in entries)
        return BaselineFile(device, module, tests, file.labels), entries, differs

    def same(self, old: BaselineEntry | None, new: BaselineEntry | None) -> bool:
        """Whether an entry needs not be written; see :meth:`update`."""
        if old is None or new is None:
            return old is new
        learned = bool(new.breakdowns) and not old.breakdowns
        remade = self._follow_provenance and old.provenance != new.provenance
        same = replace(old, provenance=new.provenance, breakdowns=new.breakdowns) == new
        return same and not learned and not remade

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process write into the folder, within a block.

        Raises:
            BaselineError: another process does, or the folder cannot be written.
        """
        path = Path(os.path.realpath(self.directory)) / LOCK_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            ignored = path.parent / ".gitignore"
            with suppress(OSError), ignored.open("x", encoding="utf-8") as stream:
                stream.write(IGNORED)
            lock = filelock.FileLock(str(path), timeout=self._lock_timeout)
            lock.acquire()
        except filelock.Timeout:
            problem = f"another process has held it for {self._lock_timeout:g} s"
            remedy = "wait until that process has finished, and run this command again"
            raise BaselineError(str(path), problem, remedy) from None
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            remedy = "make the folder writable, or choose another with --gpumem-baseline-dir"
            raise BaselineError(str(path), f"cannot be locked: {reason}", remedy) from error
        try:
            yield
        finally:
            lock.release()


def checked_file(baseline: NewBaseline) -> tuple[str, str]:
    """Return the device and the module of a new baseline, which has to be one that can be read.

    Raises:
        BaselineError: it is not.
    """
    check(f"{baseline.module}::{baseline.test}", baseline.device, baseline.parts)
    return baseline.device.key, baseline.module


@dataclass
class _Log:
    """The updates so far."""

    same: Callable[[BaselineEntry | None, BaselineEntry | None], bool]
    entries: list[EntryUpdate] = field(default_factory=list)
    errors: list[BaselineError] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @contextmanager
    def errors_of_file(self) -> Iterator[None]:
        """Note an error rather than raise it."""
        try:
            yield
        except BaselineError as error:
            self.errors.append(error)

    def summary(self) -> UpdateSummary:
        groups: dict[str, list[EntryUpdate]] = {}
        for entry in sorted(
            self.entries, key=lambda entry: (entry.device_key, entry.module, entry.test, entry.part)
        ):
            if entry.old is None:
                kind = "created"
            elif entry.new is None:
                kind = "removed"
            else:
                kind = "unchanged" if self.same(entry.old, entry.new) else "changed"
            groups.setdefault(kind, []).append(entry)
        return UpdateSummary(
            **{kind: tuple(entries) for kind, entries in groups.items()},
            errors=tuple(self.errors),
            files=tuple(self.files),
        )
