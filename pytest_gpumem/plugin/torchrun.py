"""This session among those of torchrun's other ranks: where their results come together."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.torchrun_env import TorchrunRank, current_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.plugin.results import SessionResults


class Joining:
    """This rank's session."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def reports(self) -> bool:
        """Whether this is the rank that makes the report."""
        return self._exchange.rank.reports

    def join(self, results: SessionResults, *, shrinkage_fails: bool) -> bool:
        """Leave the results for the first rank; or, where that is this one, take the others'.

        Returns:
            whether they are all here.
        """
        if not self.reports:
            self._exchange.give(results.to_plain())
            return False
        results.join(self._exchange.take(), shrinkage_fails=shrinkage_fails)
        elsewhere = self._exchange.rank.elsewhere
        if elsewhere:
            results.problems.append(
                f"ranks {elsewhere[0]} to {elsewhere[-1]} ran on other machines: they are not told "
                "of here, and no baselines are written"
            )
        return True

    def end(self) -> None:
        """Let the others go, or wait to be let go: with the first to fail torchrun ends all."""
        if self.reports:
            self._exchange.done()
        else:
            self._exchange.wait_until_done()


def joining() -> Joining | None:
    """Return this rank's session; None where torchrun started no others.

    Raises:
        GpuMemError: ranks cannot tell each other.
    """
    rank = current_rank()
    if rank is None:
        return None
    exchange = Exchange(rank)
    try:
        exchange.begin()
    except OSError as error:
        raise GpuMemError(
            "torchrun's ranks", f"they cannot tell each other: {error}", "set TMPDIR to a folder"
        ) from error
    return Joining(exchange)


LONGEST_S: Final = 600.0
"""seconds that one rank waits for another that is alive"""


LATEST_S: Final = 30.0
"""seconds that it waits for one that was never seen"""


EVERY_S: Final = 0.05


class Exchange:
    """What ranks of one machine leave for each other."""

    def __init__(self, rank: TorchrunRank) -> None:
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
