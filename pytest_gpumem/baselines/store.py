"""Baselines: the committed record of each test's memory, one file per device and test module.

A file's path is ``<directory>/<device key>/<test module>.json``, for instance
``baselines/virtual-T4/examples/test_memory.json``. :mod:`~pytest_gpumem.baselines.file_format`
defines its content, :mod:`~pytest_gpumem.baselines.paths` its path and how it is replaced.
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
"""empty file in the baseline folder that writers lock; it is never removed"""
IGNORED = f".gitignore\n{LOCK_NAME}\n"
"""content of the folder's .gitignore, which hides the lock and itself from git"""


@dataclass(frozen=True)
class NewBaseline:
    """The new baseline of one test that ran and passed, on one device."""

    device: DeviceInfo
    module: str
    """the file part of the node ID: "examples/test_memory.py" """
    test: str
    """the node ID after the file: "TestX::test_y[a-1]" """
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
    """the file's entry; None if there was none"""
    new: BaselineEntry | None
    """the measured entry; None if the test no longer has this part"""


@dataclass(frozen=True)
class UpdateSummary:
    """All updates of a session; each group is sorted by file, test and part."""

    created: tuple[EntryUpdate, ...] = ()
    changed: tuple[EntryUpdate, ...] = ()
    unchanged: tuple[EntryUpdate, ...] = ()
    removed: tuple[EntryUpdate, ...] = ()
    """parts that a test no longer has"""
    errors: tuple[BaselineError, ...] = ()
    """why files could not be written; their content is unchanged"""
    files: tuple[Path, ...] = ()
    """the files that were written"""


class BaselineStore:
    """The baselines in one folder. Files are read on first use, and cached.

    Args:
        directory: the folder; the first write creates it.
        lock_timeout: seconds to wait for another process's lock.
        follow_provenance: also write an entry if only its provenance changed.
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
        """Return the path of the file for a module's tests on a device; it may not exist."""
        return baseline_path(self.directory, device_key, module)

    def get(
        self, device_key: str, module: str, test: str, part: str = WHOLE_TEST
    ) -> BaselineEntry | None:
        """Return the baseline of a test or of a part of it on a device; None without one.

        Raises:
            BaselineError: the file is not valid.
        """
        return self.parts(device_key, module, test).get(part)

    def parts(self, device_key: str, module: str, test: str) -> Mapping[str, BaselineEntry]:
        """Return a test's baselines on a device by part, "" for the whole test; {} without any."""
        key = device_key, module
        if key not in self._files:
            try:
                self._files[key] = self.read(device_key, module)
            except BaselineError as error:
                self._files[key] = error
        file = self._files[key]
        if isinstance(file, BaselineError):  # copy it, as raising it again extends its traceback
            raise BaselineError(file.given, file.problem, file.remedy)
        return file.tests.get(test, {}) if file else {}

    def other_devices(
        self, device_key: str, module: str, test: str, part: str = WHOLE_TEST
    ) -> tuple[str, ...]:
        """Return the keys of other devices that have a baseline for a test.

        Unreadable files are ignored.
        """
        keys = []
        for key in device_keys(self.directory):
            with suppress(BaselineError):
                if key != device_key and self.get(key, module, test, part) is not None:
                    keys.append(key)
        return tuple(keys)

    def update(self, baselines: Iterable[NewBaseline]) -> UpdateSummary:
        """Write the entries that changed; return all updates.

        Tests that are not in ``baselines`` keep their entries. A new baseline with the whole test
        has all of the test's parts: other parts in the file are removed. If a test occurs twice,
        the later baseline is merged into the earlier one and takes precedence.

        An entry with the same figures, batch size and rank counts as unchanged, unless it gets its
        first breakdown: it is not written, not even with a newer provenance or breakdown, and a
        file with only such entries is not touched. So a diff shows only figures that changed; with
        ``follow_provenance``, also toolchains.

        Files are read again under a lock, so that nothing is lost that another session has written
        in the meantime. Of one session, only one process may call this method. A bad file or a bad
        new baseline is skipped and reported in the summary's errors; nothing is raised.
        """
        # This creates thousands of objects and no garbage: collections would only cost time.
        with without_collections():
            log = _Log(self.same)
            by_file: dict[tuple[str, str], list[NewBaseline]] = {}
            for baseline in baselines:
                with log.errors_of_file():  # skip a baseline that cannot be written
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
                            # Merge again under the lock: another process may have written in
                            # the meantime.
                            file, entries, changed = self.revise(group)
                            key = group[-1].device.key, file.module
                            if changed:
                                replace_file(self.path(*key), encode(file))
                                log.files.append(self.path(*key))
                            log.entries += entries
            return log.summary()

    def remove(self, keys: Iterable[Key]) -> Sequence[BaselineError]:
        """Remove tests' baselines, and files that are then empty; return the errors."""
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
        """Read a file again; return None if it does not exist.

        Raises:
            BaselineError: the file is not valid.
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
        """Merge new baselines, all of one device and module, into their file's content.

        Returns:
            the new content, the update of each entry, and whether the file must be written.
        """
        # Use the latest device record: total memory may change with the driver.
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
        """Return whether an entry need not be written; see :meth:`update`."""
        if old is None or new is None:
            return old is new
        learned = bool(new.breakdowns) and not old.breakdowns
        remade = self._follow_provenance and old.provenance != new.provenance
        same = replace(old, provenance=new.provenance, breakdowns=new.breakdowns) == new
        return same and not learned and not remade

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other writing processes within the block.

        Raises:
            BaselineError: another process holds the lock, or the folder cannot be written.
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
    """Check that a new baseline could be read again; return its device and module.

    Raises:
        BaselineError: it could not.
    """
    check(f"{baseline.module}::{baseline.test}", baseline.device, baseline.parts)
    return baseline.device.key, baseline.module


@dataclass
class _Log:
    """Collects the updates of entries, the errors, and the files written."""

    same: Callable[[BaselineEntry | None, BaselineEntry | None], bool]
    entries: list[EntryUpdate] = field(default_factory=list)
    errors: list[BaselineError] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @contextmanager
    def errors_of_file(self) -> Iterator[None]:
        """Collect a BaselineError instead of raising it."""
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
