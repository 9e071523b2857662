"""Replacing a file as a whole: readers see the old content or the new."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".gpumem.tmp"
"""The name of the new file, beside the old one, until it replaces that. One name a folder is
enough, as writers hold the lock; and the next write replaces a file that a killed process left."""


def write_whole(path: Path, content: bytes, temporary_name: str) -> None:
    """Make ``content`` the content of a file, at once: readers get the old one or the new one.

    Args:
        path: the file; its folder is made.
        content: all of it.
        temporary_name: of a file beside it that no other process writes meanwhile.

    Raises:
        OSError: it could not be written; the old content is as it was, and nothing is left.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(temporary_name)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileNotFoundError):
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    # Have the new name survive a loss of power, where the system can do that for a folder.
    with suppress(OSError):
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
