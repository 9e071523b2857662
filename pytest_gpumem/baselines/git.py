"""Git, as the readers of committed baselines use it: commands, contents of blobs, the repository.

Only the user's ``git`` is run, and only commands that change nothing.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

FILE_MODES: Final = ("100644", "100755")
"""git's modes of a file; a link has another"""


class GitError(Exception):
    """A command that git refused, or git that cannot be run; the text is the reason."""


class OutsideRepositoryError(GitError):
    """A folder that does not lie in the repository."""


def run_git(*arguments: str, stdin: bytes | None = None) -> bytes:
    """Return the output of a git command.

    Raises:
        GitError: git is not installed, or refuses.
    """
    try:
        process = subprocess.run(["git", *arguments], input=stdin, capture_output=True, check=False)  # noqa: S607 - the user's git
    except OSError as error:
        raise GitError(f"git cannot be run ({error.strerror})") from error
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[0].removeprefix("fatal: ") if lines else f"status {process.returncode}"
        raise GitError(f"git says: {reason}")
    return process.stdout


def repository_root(folder: Path | None = None) -> Path:
    """Return the top of the repository that a folder lies in, by default the working folder.

    Raises:
        GitError: it lies in none.
    """
    where = () if folder is None else ("-C", str(folder))
    return Path(os.fsdecode(run_git(*where, "rev-parse", "--show-toplevel").rstrip(b"\n")))


def path_in_repository(folder: Path, root: Path) -> str:
    """Return a folder's path from the top of the repository; "" is the top itself.

    Raises:
        OutsideRepositoryError: it is not in the repository.
    """
    path = os.path.relpath(os.path.realpath(folder), os.path.realpath(root))
    if path.startswith(os.pardir):
        raise OutsideRepositoryError(f"the folder {folder} is not in the repository {root}")
    return "" if path == os.curdir else path


def blob_contents(root: Path, names: Sequence[str]) -> list[bytes]:
    """Return the contents of git's blobs, in their order: one process of git for all of them.

    Raises:
        GitError: git has no such blob.
    """
    if not names:
        return []
    request = "".join(f"{name}\n" for name in names).encode()
    answer = run_git("-C", str(root), "cat-file", "--batch", stdin=request)
    contents, start = [], 0
    for name in names:
        end = answer.index(b"\n", start)
        *_, kind, size = answer[start:end].decode().split(" ")
        if kind != "blob":
            raise GitError(f"git has no content of {name}")
        contents.append(answer[end + 1 : end + 1 + int(size)])
        start = end + 1 + int(size) + 1
    return contents
