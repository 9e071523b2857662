"""The rank of this process under torchrun.

Every rank runs the whole pytest session. The first makes the report; the other ranks leave their
results in a folder in the temporary directory, as JSON, and stay until the first is done, as
torchrun ends all ranks with the first that fails.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class TorchrunRank(NamedTuple):
    """This process among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    """among those of this machine"""
    local_size: int
    key: str
    """the same in all ranks of a run, different in every other run"""

    @property
    def reports(self) -> bool:
        """Whether it is the one that makes the report."""
        return self.rank == 0

    @property
    def launcher(self) -> tuple[str, ...]:
        """The words by which one command starts pytest in all ranks; none of several machines."""
        if self.local_size != self.size:
            return ()
        return ("torchrun", "--standalone", f"--nproc-per-node={self.size}", "-m", "pytest")

    @property
    def peers(self) -> range:
        """The other ranks of this machine, of the one that reports."""
        return range(1, self.local_size)

    @property
    def elsewhere(self) -> range:
        """The ranks of other machines, of the one that reports."""
        return range(self.local_size, self.size)


def current_rank(environ: Mapping[str, str] = os.environ) -> TorchrunRank | None:
    """Return this process's rank; None without torchrun, or with a single rank."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    try:
        rank, size, local_rank, local_size = (int(environ[name]) for name in _NUMBERS)
    except (KeyError, ValueError):
        return None
    if size == 1:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    identity = "\0".join(environ.get(name, "") for name in names)
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return TorchrunRank(rank, size, local_rank, local_size, key)
