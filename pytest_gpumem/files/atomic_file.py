"""Replacing a file as a whole: readers see the old content or the new."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

TEMPORARY = ".gpumem.tmp"
"""The name of the new file, beside the old one, until it replaces that. One name a folder is
enough, as writers hold the lock; and the next write replaces a file that a killed process left."""


def write_whole(path: Path, content: bytes, temporary_name: str) -> None:
    """Make ``content`` the content of a file, at once: readers get the old one or the new one.

    No other process may write ``temporary_name``, beside ``path``, meanwhile. The folder is made.

    Raises:
        OSError: it could not be written; the old content is as it was, and nothing is left.
    """
    new = NewContent(path, [content], temporary_name)
    try:
        new.replace()
    except BaseException:
        new.discard()
        raise


class NewContent:
    """A file's new content, which lies beside the file until it replaces the old content."""

    def __init__(self, path: Path, chunks: Iterable[bytes], temporary_name: str) -> None:
        """Write the content beside ``path``, under a name that no other process writes.

        The folder is made. After an OSError nothing is left.
        """
        self._target = Path(os.path.realpath(path))
        self._temporary = self._target.with_name(temporary_name)
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._temporary.unlink(missing_ok=True)
        if self._target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        try:
            with self._temporary.open("xb") as stream:
                stream.writelines(chunks)
                stream.flush()
                os.fsync(stream.fileno())
            with suppress(FileNotFoundError):
                self._temporary.chmod(stat.S_IMODE(self._target.stat().st_mode))
        except BaseException:
            self.discard()
            raise

    def replace(self) -> None:
        """Make it the file's content.

        Raises:
            OSError: that could not be done; the old content is as it was.
        """
        self._temporary.replace(self._target)
        # Have the new name survive a loss of power, where the system can do that for a folder.
        with suppress(OSError):
            descriptor = os.open(self._target.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def discard(self) -> None:
        """Delete it, unless it has replaced the old content."""
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)
