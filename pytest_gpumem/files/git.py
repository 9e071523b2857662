"""Read committed files with git: run commands, read blobs, find the repository.

This runs the user's ``git``, and only commands that change nothing.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FILE_MODES: Final = ("100644", "100755")
"""git's modes of regular files; a link has another mode"""


class GitError(Exception):
    """A git command failed, or git cannot be run; the message is the reason."""


class OutsideRepositoryError(GitError):
    """The folder is not in the repository."""


def run_git(*arguments: str, stdin: bytes | None = None) -> bytes:
    """Return the output of a git command.

    Raises:
        GitError: git is not installed, or the command fails.
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
    """Return the top folder of the repository that contains ``folder``, or the working folder."""
    where = () if folder is None else ("-C", str(folder))
    return Path(os.fsdecode(run_git(*where, "rev-parse", "--show-toplevel").rstrip(b"\n")))


def path_in_repository(folder: Path, root: Path) -> str:
    """Return a folder's path relative to the top of the repository; "" is the top itself.

    Raises:
        OutsideRepositoryError: the folder is not in the repository.
    """
    path = os.path.relpath(os.path.realpath(folder), os.path.realpath(root))
    if path.startswith(os.pardir):
        raise OutsideRepositoryError(f"the folder {folder} is not in the repository {root}")
    return "" if path == os.curdir else path


def folder_blobs(root: Path, commit: str, folder: str) -> dict[Path, str]:
    """Map the path of each file in a commit to its blob name, or to "" if it is a link.

    ``folder`` selects the files of one folder; "" selects all. Paths are relative to the top of the
    repository.
    """
    place = [f"{folder}/"] if folder else []
    listing = run_git("-C", str(root), "ls-tree", "-r", "-z", "--full-tree", commit, *place)
    blobs = {}
    for line in filter(None, listing.split(b"\0")):
        # mode, kind, object, tab, path
        fields, _, name = line.partition(b"\t")
        mode, *_, blob = fields.decode().split()
        blobs[Path(os.fsdecode(name))] = blob if mode in FILE_MODES else ""
    return blobs


def blob_contents(root: Path, names: Iterable[str]) -> Iterator[bytes]:
    """Yield the contents of git blobs, in order, with one git process for all of them.

    Raises:
        GitError: git has no such blob, or cannot be run.
    """
    with tempfile.TemporaryFile() as request:  # a pipe could fill up before git's output is read
        request.writelines(f"{name}\n".encode() for name in names)
        if not request.tell():
            return
        request.seek(0)
        command = ["git", "-C", str(root), "cat-file", "--batch"]
        try:
            process = subprocess.Popen(
                command, stdin=request, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise GitError(f"git cannot be run ({error.strerror})") from error
        with process:
            try:
                stream = process.stdout
                assert stream is not None  # noqa: S101 - for the type checker
                # "NAME blob SIZE", the content, a line's end; or "NAME missing"
                while header := stream.readline().decode():
                    name, kind, *size = header.split()
                    if kind != "blob":
                        raise GitError(f"git has no content of {name}")
                    yield stream.read(int(size[0]))
                    stream.read(1)
            finally:
                process.kill()  # nobody reads its output any more
