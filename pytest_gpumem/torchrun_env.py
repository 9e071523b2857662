"""The rank of this process under torchrun.

Every rank runs the whole pytest session. Rank 0 writes the report; the other ranks write their
results as JSON to a folder in the temporary directory, and wait until rank 0 is done, because
torchrun stops all ranks when one fails.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class TorchrunRank(NamedTuple):
    """This process's rank among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    """rank among the ranks on this machine"""
    local_size: int
    key: str
    """identifies the run: equal in all its ranks, different for every run"""

    @property
    def reports(self) -> bool:
        """Whether this rank writes the report."""
        return self.rank == 0

    @property
    def launcher(self) -> tuple[str, ...]:
        """The command that starts pytest in all ranks; empty if they are on several machines."""
        if self.local_size != self.size:
            return ()
        return ("torchrun", "--standalone", f"--nproc-per-node={self.size}", "-m", "pytest")

    @property
    def peers(self) -> range:
        """The other ranks on the machine of the rank that writes the report."""
        return range(1, self.local_size)

    @property
    def elsewhere(self) -> range:
        """The ranks on other machines than the rank that writes the report."""
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
