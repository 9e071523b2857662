"""Locks of GPUs that processes share: on each GPU one test is measured at a time.

Each GPU has a file in a folder of the user. The operating system opens the locks of a process that
ends, however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@contextmanager
def locked(gpus: Iterable[str]) -> Iterator[None]:
    """Wait until no other process of the user has one of some GPUs, and have them in the block.

    Args:
        gpus: the identities of the GPUs: their UUIDs, or the names of MIG instances.
    """
    folder = lock_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        # All processes lock in this order, so no two of them wait for each other.
        for gpu in sorted(gpus):
            file_name = gpu.replace("/", "-")  # older drivers name "MIG-GPU-<UUID>/1/0"
            stack.enter_context(FileLock(folder / f"{file_name}.lock"))
        yield


def lock_folder() -> Path:
    """Return the folder of the user's locks."""
    user = getattr(os, "getuid", int)()  # 0 on Windows, whose temporary folder is the user's own
    return Path(tempfile.gettempdir()) / f"pytest-gpumem-{user}"
