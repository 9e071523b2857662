"""The ledger of GPUs that processes share: the tests that run, and the bytes that each may take.

One a user, in the temporary folder. A process locks a file of its own for as long as it lives, and
the operating system opens that lock when the process ends, however it ends: an entry whose lock is
open is of a dead process, and counts no longer.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from filelock import FileLock, Timeout

from pytest_gpumem.atomic_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MAX_OVERTAKEN: Final = 8
"""tests that may begin before one that came earlier and waits for more room: \
benchmarks/scale/packing.py compares"""
EVERY_S: Final = 0.05
"""seconds between two looks at the ledger while a test waits, as filelock has it"""


@dataclass
class Turn:
    """A test's turn on its devices; it begins at once where no other process uses them."""

    nbytes: int | None = None
    """bytes of each device that it may take beside tests of other processes; None: it is alone"""

    def wait_alone(self) -> None:
        """Let the other tests end, and no other begin; the test's own memory should be freed."""


@dataclass
class LedgerEntry:
    """A process in the ledger: its test runs, waits for its turn, or none of its tests does."""

    process: str
    """the name of the file that it locks"""
    nbytes: dict[str, int]
    """bytes that it holds of each GPU, or that its test may hold, if more"""
    state: str = "idle"
    """"running", "waiting" or "idle" """
    alone: bool = True
    """whether its test runs beside no other test on its GPUs"""
    ticket: int = 0
    """the place in the queue: the lower one comes first"""
    overtaken: int = 0
    """how many tests have begun on its GPUs that came after it"""
    held: dict[str, int] = field(default_factory=dict)
    """bytes that the process holds of GPUs, those of earlier tests too: its contexts"""

    def taken(self, gpu: str) -> int:
        """Return the bytes of a GPU that no other test can have; a test that waits has none yet."""
        own = {} if self.state == "waiting" else self.nbytes
        return own.get(gpu, self.held.get(gpu, 0))

    def shares(self, gpus: Sequence[str], *states: str) -> bool:
        """Return whether it is in one of some states on one of some GPUs."""
        return self.state in states and not self.nbytes.keys().isdisjoint(gpus)


def admits(
    own: LedgerEntry, entries: Sequence[LedgerEntry], free: Mapping[str, tuple[int, int]]
) -> bool:
    """Return whether a test that waits may run now.

    A test that fits may overtake those that wait on its GPUs for more room, but each of these only
    so often: a large test does not wait for ever while small ones come and go. With no overtaking
    at all, all GPUs of a test of several stand idle until the last of them is free.

    Args:
        own: the entry of the test's process.
        entries: those of all other processes that live.
        free: for each GPU, the bytes that are free now and the bytes that it has.
    """
    gpus = list(own.nbytes)
    if any(entry.overtaken >= MAX_OVERTAKEN for entry in earlier(own, entries)):
        return False
    running = [entry for entry in entries if entry.shares(gpus, "running")]
    if not running:
        return True
    if own.alone or any(entry.alone for entry in running):
        return False
    for gpu, nbytes in own.nbytes.items():
        unused, total = free[gpu]
        # What is in use besides belongs to processes that know no ledger.
        taken = max(sum(entry.taken(gpu) for entry in entries), total - unused)
        if taken + nbytes > total:
            return False
    return True


def earlier(own: LedgerEntry, entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Return the entries that wait for one of a test's GPUs, and came before it."""
    gpus = list(own.nbytes)
    return [
        entry for entry in entries if entry.shares(gpus, "waiting") and entry.ticket < own.ticket
    ]


class GpuLedger:
    """This process's part in the ledger."""

    def __init__(self, folder: Path) -> None:
        """Take part in the ledger of a folder, which is made with the first entry."""
        self._folder = folder
        self._life: FileLock | None = None
        self._process = f"{uuid.uuid4().hex}.process"

    def enter(
        self,
        nbytes: Mapping[str, int],
        free: Callable[[], Mapping[str, tuple[int, int]]],
        *,
        alone: bool,
        held: Mapping[str, int] | None = None,
    ) -> None:
        """Wait until this process's test may run.

        Args:
            nbytes: the bytes of each GPU that this process may hold while the test runs.
            free: returns the last argument of :func:`admits`.
            alone: whether the test runs beside no other one.
            held: the bytes of each GPU that this process holds already.
        """
        with self._entries() as entries:
            ticket = 1 + max((entry.ticket for entry in entries), default=0)
            holds = dict(held or {})
            own = LedgerEntry(self._process, dict(nbytes), "waiting", alone, ticket, held=holds)
            self._replace(entries, own)
        try:
            while True:
                with self._entries() as entries:
                    neighbours = [entry for entry in entries if entry.process != self._process]
                    if admits(own, neighbours, free()):
                        for entry in earlier(own, neighbours):
                            entry.overtaken += 1
                        own.state = "running"
                        self._replace(entries, own)
                        return
                time.sleep(EVERY_S)
        except BaseException:  # an interruption
            self.leave(nbytes)
            raise

    def leave(self, held: Mapping[str, int]) -> None:
        """End this process's turn; ``held``: the bytes that it goes on to hold of each GPU."""
        with self._entries() as entries:
            self._replace(entries, LedgerEntry(self._process, dict(held)))

    def _replace(self, entries: list[LedgerEntry], own: LedgerEntry) -> None:
        entries[:] = [entry for entry in entries if entry.process != self._process]
        entries.append(own)

    @contextmanager
    def _entries(self) -> Iterator[list[LedgerEntry]]:
        """Give the entries of processes that live, to be changed; no other process does so now."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with FileLock(self._folder / "ledger.lock"):
            if self._life is None:
                self._life = FileLock(self._folder / self._process)
                self._life.acquire()
            path = self._folder / "ledger.json"
            written = b""
            with suppress(FileNotFoundError):
                written = path.read_bytes()
            # Replaced as a whole, it is never half written; another program's text is no ledger.
            entries: list[LedgerEntry] = []
            with suppress(ValueError, msgspec.DecodeError, RecursionError):
                entries = msgspec.json.decode(written, type=list[LedgerEntry])
            entries = [entry for entry in entries if self._lives(entry.process)]
            yield entries
            content = msgspec.json.encode(entries)
            if content != written:
                write_whole(path, content, "ledger.new")

    def _lives(self, process: str) -> bool:
        if process == self._process:
            return True
        path = self._folder / process
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            return True
        path.unlink(missing_ok=True)
        return False


def ledger_folder() -> Path:
    """Return the folder of the user's ledger."""
    user = getattr(os, "getuid", int)()  # 0 on Windows, whose temporary folder is the user's own
    return Path(tempfile.gettempdir()) / f"pytest-gpumem-{user}"
