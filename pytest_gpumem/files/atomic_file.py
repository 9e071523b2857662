"""Replacing a file atomically: readers see the old content or the new."""

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
"""Name of the file with the new content, next to the old file until it replaces that file. In a
baseline folder one name is enough, as writers hold its lock; the next write replaces a file that a
killed process left. Elsewhere the name also has the writer's process id."""


def write_whole(path: Path, content: bytes, temporary_name: str) -> None:
    """Replace a file's content atomically: readers get the old content or the new one.

    No other process may write ``temporary_name`` in the same folder at the same time. The folder is
    created.

    Raises:
        OSError: it cannot be written; the old content is intact, and no temporary file is left.
    """
    new = NewContent(path, [content], temporary_name)
    try:
        new.replace()
    except BaseException:
        new.discard()
        raise


class NewContent:
    """A file's new content, in a temporary file next to it until it replaces the old content."""

    def __init__(self, path: Path, chunks: Iterable[bytes], temporary_name: str) -> None:
        """Write the content next to ``path``, under a name that no other process writes.

        The folder is created. After an OSError no temporary file is left.
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
        """Replace the file's content.

        Raises:
            OSError: it cannot be replaced; the old content is intact.
        """
        self._temporary.replace(self._target)
        # Make the rename survive a power failure, if the system can sync a folder.
        with suppress(OSError):
            descriptor = os.open(self._target.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def discard(self) -> None:
        """Delete the temporary file, unless it has replaced the old content."""
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)
