"""Keys of baselines, paths of their folders and files, and reading and replacing files.

A file is replaced as a whole or not at all; its content is defined in
:mod:`pytest_gpumem.baselines.file_format`. If the folder's name contains ``{torch}``
(``baselines/torch-{torch}``), each version of torch has its own folder. The folder that contains
these (``baselines``) is searched last: it may have older baselines, which apply until they are
recorded again.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, unquote

from pytest_gpumem.errors import BaselineError
from pytest_gpumem.files.atomic_file import TEMPORARY, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDING: Final = ".json"
MAX_NAME_LENGTH = 180
"""A longer name is cut; with hash and ending it stays below the usual limit of 255 characters."""
MAX_PATH_LENGTH = 1000
"""A longer module path is cut to one name; well below Linux's PATH_MAX of 4096."""
TORCH: Final = "{torch}"
"""placeholder in the folder's name for torch's version, such as 2.15"""
_MAJOR: Final = 1000
"""number of minor versions that a major version counts as, when looking for the nearest version"""


def baseline_path(directory: Path, device_key: str, module: str) -> Path:
    """Return the path of the file with the baselines of one module's tests on one device.

    It is inside ``directory``, and unique for each pair of device and module: ASCII letters, digits
    and ``_.-`` stay, any other character is percent-encoded, and so are the dots of a name that
    would be hidden or would lead upwards (".." is "%2E%2E"). "~", which no encoded name contains,
    marks a name that was cut and has a hash, and a module that does not end in ".py".
    """
    ending = ".json" if module.endswith(".py") else "~.json"
    *folders, name = [_safe_name(part) for part in module.removesuffix(".py").split("/")]
    if sum(map(len, folders)) + len(folders) + len(name) > MAX_PATH_LENGTH:
        folders, name = [], _cut(name, MAX_NAME_LENGTH // 2, module)
    # The folder for "a.json/b.py" must not have the name of the file for "a.py".
    folders = [
        f"{folder[:-5]}%2E{folder[-4:]}" if folder.lower().endswith(".json") else folder
        for folder in folders
    ]
    return directory.joinpath(_safe_name(device_key), *folders, name + ending)


def module_at(directory: Path, path: Path) -> str | None:
    """Return the module of a baseline file from its path; None if only the content names it."""
    try:
        device, *folders, name = map(unquote, path.relative_to(directory).parts)
    except ValueError:  # it is not in a device's folder
        return None
    module = "/".join([*folders, f"{name.removesuffix('.json')}.py"])
    return module if baseline_path(directory, device, module) == path else None


def baseline_files(directory: Path) -> list[Path]:
    """Return all JSON files below a folder, sorted; each should be a baseline file."""
    paths = []
    for folder, _, names in os.walk(directory):
        paths += [Path(folder, name) for name in names if name.endswith(ENDING)]
    return sorted(paths)


def device_keys(directory: Path) -> tuple[str, ...]:
    """Return the keys of devices that have a folder in ``directory``, sorted."""
    try:
        return tuple(sorted(unquote(path.name) for path in directory.iterdir() if path.is_dir()))
    except OSError:
        return ()


def _safe_name(name: str) -> str:
    # "surrogatepass" gives a name that is not valid UTF-8 a unique encoding.
    encoded = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
    if name.startswith("."):
        encoded = encoded.replace(".", "%2E")
    return (
        _cut(encoded, MAX_NAME_LENGTH, name) if len(encoded) > MAX_NAME_LENGTH else encoded or "%2F"
    )


def _cut(encoded: str, length: int, whole: str) -> str:
    digest = hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{encoded[:length]}~{digest[:20]}"


def read_file(path: Path) -> bytes | None:
    """Return a file's content; None if it does not exist.

    Raises:
        BaselineError: the path is not a regular file, or cannot be read.
    """
    remedy = "move it away, or replace it by a file that you can read"
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading from a named pipe would block for ever
            raise BaselineError(str(path), "is not a regular file", remedy)
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BaselineError(str(path), f"cannot be read: {error.strerror}", remedy) from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content atomically.

    A reader always gets the whole old or the whole new content, even if this process is killed.
    Symbolic links are followed and stay links; the file keeps its mode, and a new file's mode
    follows the umask.

    Raises:
        BaselineError: it cannot be written; the old content is intact, and no temporary file is
            left.
    """
    with baseline_error_on_write(path):
        write_whole(path, content, TEMPORARY)


@contextmanager
def baseline_error_on_write(path: Path) -> Iterator[None]:
    """Turn an OSError on writing a file into a BaselineError."""
    try:
        yield
    except OSError as error:
        raise BaselineError(
            str(path),
            f"cannot be written, and was not changed: {error.strerror}",
            "free disk space or make the folder writable, then update the baselines again",
        ) from error


def remove_file(path: Path, directory: Path) -> None:
    """Remove a file, and its folders below ``directory`` that are then empty.

    Raises:
        BaselineError: the file cannot be removed, and is unchanged.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot be removed: {error.strerror}"
        raise BaselineError(str(path), problem, "make its folder writable") from error
    with suppress(OSError):  # stop at the first folder that is not empty
        for folder in path.parents:
            if folder == directory:
                break
            folder.rmdir()


class Key(NamedTuple):
    """Identifies a baseline: a test, or a part of it, on a device."""

    device: str
    """the device's key: "virtual-T4" """
    module: str
    """the file part of the node ID"""
    test: str
    """the node ID after the file"""
    part: str = ""
    """"" is the whole test"""

    @property
    def nodeid(self) -> str:
        """The node ID that ``module`` and ``test`` make up, without the part."""
        return f"{self.module}::{self.test}" if self.test else self.module

    @property
    def name(self) -> str:
        """The test without its file, with its part if it has one."""
        test = self.test or self.module
        return f"{test} ({self.part})" if self.part else test


def baseline_folders(root: Path, template: str) -> list[Path]:
    """Return the baselines' folder, then those of other torch versions, the nearest first.

    If the folder that contains them all exists, it is the last: it may have older baselines.
    """
    if TORCH not in template:
        return [root / template]
    try:
        number = version("torch")  # reads its metadata, and does not import torch
    except PackageNotFoundError:
        number = "0.0"
    own = minor_version(number) or (0, 0)
    prefix, _, suffix = str(root / template).partition(TORCH)
    versions: list[tuple[tuple[int, int], Path]] = []
    pattern = f"{glob.escape(prefix)}*{glob.escape(suffix)}"
    for path in map(Path, glob.glob(pattern)):  # noqa: PTH207 - Path.glob takes no absolute one
        folder_version = minor_version(str(path).removeprefix(prefix).removesuffix(suffix))
        if folder_version not in {None, own} and path.is_dir():
            versions.append((folder_version or own, path))

    def distance(version_and_path: tuple[tuple[int, int], Path]) -> tuple[int, bool]:
        (major, minor), _ = version_and_path
        # Of two equally near versions prefer the older.
        return abs((major - own[0]) * _MAJOR + minor - own[1]), (major, minor) > own

    nearest = [path for _, path in sorted(versions, key=distance)]
    common = Path(f"{prefix}x").parent  # "x", as the prefix may end in a slash
    if "/" not in suffix and common.is_dir():
        nearest.append(common)
    return [root / template.replace(TORCH, f"{own[0]}.{own[1]}"), *nearest]


def folder_of_torch(name: str) -> str:
    """Return the baseline folder of the installed torch, or of the nearest version with a folder.

    A folder that has neither ``{torch}`` in its name nor subfolders such as ``torch-2.15`` is
    returned unchanged.
    """
    template = name if TORCH in name else str(Path(name, f"torch-{TORCH}"))
    own, *neighbours = baseline_folders(Path(), template)
    folders = [folder for folder in (own, *neighbours) if folder.is_dir()]
    if TORCH in name:
        return str(folders[0] if folders else own)
    return str(folders[0]) if folders and folders[0] != Path(name) else name


def minor_version(number: str) -> tuple[int, int] | None:
    """Return a version's first two numbers, (2, 15) for "2.15.0+cu132"; None if it lacks them."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", number)
    return (int(match[1]), int(match[2])) if match else None
