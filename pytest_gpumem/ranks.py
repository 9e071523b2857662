"""Under torchrun: which rank this process is, and how ranks of one machine tell each other.

Every rank runs the whole pytest session. The first makes the report; the others leave their results
in a folder in the temporary directory, as JSON, and stay until the first has done, for torchrun
ends all ranks with the first that fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LONGEST_S: Final = 600.0
"""seconds that one rank waits for another that is alive"""
LATEST_S: Final = 30.0
"""seconds that it waits for one that was never seen"""
EVERY_S: Final = 0.05
_NUMBERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Rank(NamedTuple):
    """This process among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    """among those of this machine"""
    local_size: int
    key: str
    """the same in all ranks of a run, and in no others"""

    @property
    def reports(self) -> bool:
        """Whether it is the one that makes the report."""
        return self.rank == 0

    @property
    def peers(self) -> range:
        """The other ranks of this machine, of the one that reports."""
        return range(1, self.local_size)

    @property
    def elsewhere(self) -> range:
        """The ranks of other machines, of the one that reports."""
        return range(self.local_size, self.size)


def current_rank(environ: Mapping[str, str] = os.environ) -> Rank | None:
    """Return which rank of torchrun's this process is; None where it is the only one, or none."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    try:
        rank, size, local_rank, local_size = (int(environ[name]) for name in _NUMBERS)
    except (KeyError, ValueError):
        return None
    if size == 1:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    text = "\0".join(environ.get(name, "") for name in names)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Rank(rank, size, local_rank, local_size, key)


class Exchange:
    """What ranks of one machine leave for each other."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        user = getattr(os, "getuid", int)()
        name = f"pytest-gpumem-{user}-{rank.key}"
        self._folder = Path(tempfile.gettempdir()) / name

    def begin(self) -> None:
        """Say that this rank runs; forget what an earlier run with the same key left.

        Raises:
            OSError: the folder cannot be made, or is another user's.
        """
        with suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        if self._folder.is_symlink() or not os.access(self._folder, os.W_OK):
            raise PermissionError(f"{self._folder} is not this user's")
        self._file("result").unlink(missing_ok=True)
        if self.rank.reports:
            (self._folder / "done").unlink(missing_ok=True)
        self._write(self._file("began"), {"pid": os.getpid()})

    def give(self, data: dict[str, Any]) -> None:
        """Leave this rank's results, plain data."""
        self._write(self._file("result"), data)

    def take(self) -> dict[int, dict[str, Any] | None]:
        """Wait for the results of the other ranks of this machine; None of one that gave none."""
        return {rank: self._awaited(rank) for rank in self.rank.peers}

    def _awaited(self, rank: int) -> dict[str, Any] | None:
        path = self._file("result", rank)
        self._wait(path.exists, rank)
        found = _read(path)
        path.unlink(missing_ok=True)
        return found

    def done(self) -> None:
        """Say that the report is made."""
        self._write(self._folder / "done", {})

    def wait_until_done(self) -> None:
        """Wait for that, where somebody of this machine makes it."""
        if self.rank.rank < self.rank.local_size:
            self._wait((self._folder / "done").exists, 0)
        self._file("began").unlink(missing_ok=True)

    def _wait(self, ready: Callable[[], bool], rank: int) -> None:
        """Wait until something is ready, for as long as the rank that it is up to lives."""
        began = time.monotonic()
        while not ready():
            waited = time.monotonic() - began
            process = _read(self._file("began", rank))
            limit = LATEST_S if process is None else LONGEST_S
            if waited > limit or (process is not None and not _lives(process.get("pid"))):
                return
            time.sleep(EVERY_S)

    def _file(self, what: str, rank: int | None = None) -> Path:
        return self._folder / f"{what}-{self.rank.rank if rank is None else rank}.json"

    @staticmethod
    def _write(path: Path, data: dict[str, Any]) -> None:
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _lives(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
