"""Join the sessions of torchrun's ranks: the first rank reports the results of all of them.

The ranks of one machine exchange files in a folder of the temporary directory.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.processes import is_running
from pytest_gpumem.torchrun_env import TorchrunRank, current_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.session.results import SessionResults


def open_rank_session() -> Exchange | None:
    """Return this rank's exchange; None if torchrun started no other ranks.

    Raises:
        GpuMemError: the ranks cannot exchange files.
    """
    rank = current_rank()
    if rank is None:
        return None
    exchange = Exchange(rank)
    try:
        exchange.begin()
    except OSError as error:
        raise GpuMemError(
            "torchrun's ranks",
            f"they cannot exchange results: {error}",
            "set TMPDIR to a writable folder",
        ) from error
    return exchange


LIVE_RANK_S: Final = 600.0
"""maximum seconds that one rank waits for another that is alive"""
UNSEEN_RANK_S: Final = 30.0
"""maximum seconds that one rank waits for another that has not announced itself"""
POLL_S: Final = 0.05


# torch.distributed.FileStore would make each rank import torch, even in a session without marked
# tests, and wait for a dead rank until the time-out, as the store has no process ids. A lock of
# filelock shows that a rank is alive, but cannot transfer results.
class Exchange:
    """One rank's session, and the files through which the ranks of one machine communicate."""

    def __init__(self, rank: TorchrunRank) -> None:
        self.rank = rank
        user = getattr(os, "getuid", int)()
        name = f"pytest-gpumem-{user}-{rank.key}"
        self._folder = Path(tempfile.gettempdir()) / name

    def begin(self) -> None:
        """Announce this rank; remove the files of an earlier run with the same key.

        Raises:
            OSError: the folder cannot be created, or belongs to another user.
        """
        with suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        if self._folder.is_symlink() or not os.access(self._folder, os.W_OK):
            raise PermissionError(f"{self._folder} is not this user's")
        self._file("result").unlink(missing_ok=True)
        if self.rank.reports:
            (self._folder / "done").unlink(missing_ok=True)
        self._write(self._file("began"), {"pid": os.getpid()})

    @property
    def reports(self) -> bool:
        """Whether this rank writes the report."""
        return self.rank.reports

    def join(self, results: SessionResults, *, shrinkage_fails: bool) -> bool:
        """Send the results to the first rank, or, on the first rank, merge those of its peers.

        Returns:
            whether this rank has the results of all.
        """
        if not self.reports:
            self.send(results.to_plain())
            return False
        results.join(self.receive(), shrinkage_fails=shrinkage_fails)
        elsewhere = self.rank.elsewhere
        if elsewhere:
            results.problems.append(
                f"ranks {elsewhere[0]} to {elsewhere[-1]} ran on other machines: this "
                "report lacks their results, and no baselines are written"
            )
        return True

    def end(self) -> None:
        """Let the other ranks end, or wait until this rank may end.

        torchrun kills all ranks as soon as one fails, so none may end before the report is written.
        """
        if self.reports:
            self.done()
        else:
            self.wait_until_done()

    def send(self, data: dict[str, Any]) -> None:
        """Write this rank's results, as plain data, for the first rank."""
        self._write(self._file("result"), data)

    def receive(self) -> dict[int, dict[str, Any] | None]:
        """Wait for the results of this machine's other ranks; None for a rank that sent none."""
        results = {}
        for rank in self.rank.peers:
            path = self._file("result", rank)
            self._wait(path.exists, rank)
            results[rank] = _read_json(path)
            path.unlink(missing_ok=True)
        return results

    def done(self) -> None:
        """Signal that the report is written."""
        self._write(self._folder / "done", {})

    def wait_until_done(self) -> None:
        """Wait until the report is written, if a rank of this machine writes it."""
        if self.rank.rank < self.rank.local_size:
            self._wait((self._folder / "done").exists, 0)
        self._file("began").unlink(missing_ok=True)

    def _wait(self, ready: Callable[[], bool], rank: int) -> None:
        """Wait until ``ready()``, until ``rank`` has died, or until the time limit is over."""
        began = time.monotonic()
        while not ready():
            waited = time.monotonic() - began
            process = _read_json(self._file("began", rank))
            limit = UNSEEN_RANK_S if process is None else LIVE_RANK_S
            if waited > limit or (process is not None and not is_running(process.get("pid"))):
                return
            time.sleep(POLL_S)

    def _file(self, kind: str, rank: int | None = None) -> Path:
        return self._folder / f"{kind}-{self.rank.rank if rank is None else rank}.json"

    @staticmethod
    def _write(path: Path, data: dict[str, Any]) -> None:
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.replace(path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
