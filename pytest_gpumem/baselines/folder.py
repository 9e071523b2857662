"""All baselines of a folder, of every device and module, whether or not a test asks for them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pytest_gpumem.baselines.file_format import decode
from pytest_gpumem.baselines.key import Key
from pytest_gpumem.baselines.paths import baseline_path, module_at, read_file
from pytest_gpumem.errors import BaselineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_gpumem.measurement import BaselineEntry

ENDING: Final = ".json"


@dataclass
class Figures:
    """Entries by their keys, and the files that could not be read."""

    entries: dict[Key, BaselineEntry] = field(default_factory=dict)
    errors: list[BaselineError] = field(default_factory=list)
    """one a file; the entries of all other files are in ``entries``"""
    unread: set[Path] = field(default_factory=set)
    """their paths, from the folder"""
    files: int = 0
    """number of files, readable or not"""


def read_folder(directory: Path) -> Figures:
    """Read every baseline in a folder; a missing folder has none."""
    return read_contents(((path, read_file) for path in baseline_files(directory)), directory)


def baseline_files(directory: Path) -> list[Path]:
    """Return the files in a folder that have, or should have, baselines: sorted."""
    paths = []
    for folder, _, names in os.walk(directory):
        paths += [Path(folder, name) for name in names if name.endswith(ENDING)]
    return sorted(paths)


def read_contents(
    files: Iterable[tuple[Path, Callable[[Path], bytes | None]]], directory: Path
) -> Figures:
    """Read baseline files that lie in ``directory``, or would.

    ``files`` has the path of each, and a function that returns the content of a path.
    """
    figures = Figures()
    for path, read in files:
        figures.files += 1
        try:
            content = read(path)
            if content is not None:  # else it is gone since the folder was listed
                figures.entries.update(_entries(path, content, directory))
        except BaselineError as error:
            figures.errors.append(error)
            figures.unread.add(path.relative_to(directory))
    return figures


def _entries(path: Path, content: bytes, directory: Path) -> Iterator[tuple[Key, BaselineEntry]]:
    file = decode(path, content)
    key = file.device.key
    right_path = baseline_path(directory, key, file.module)
    if right_path != path:
        problem = f"belongs to {file.module} on {key}, but no test reads a baseline from this place"
        raise BaselineError(str(path), problem, f"move the file to {right_path}, or delete it")
    for test, parts in file.tests.items():
        for part, entry in parts.items():
            yield Key(key, file.module, test, part), entry


class _DeviceName(msgspec.Struct):
    key: str


class _Names(msgspec.Struct):
    """A baseline file without its figures."""

    device: _DeviceName
    module: str
    tests: dict[str, msgspec.Raw]


def read_names(
    directory: Path, is_wanted: Callable[[str], bool] = lambda _module: True
) -> list[Key]:
    """Return the keys of tests with a baseline in a folder, without decoding figures: quickly.

    A file that cannot be read has none here; reading its figures raises the error.

    Files named after a module that ``is_wanted`` refuses are not read.
    """
    keys = []
    for path in baseline_files(directory):
        module = module_at(directory, path)
        if module is not None and not is_wanted(module):
            continue
        try:
            names = msgspec.json.decode(read_file(path) or b"", type=_Names)
        except (BaselineError, msgspec.DecodeError, UnicodeError, RecursionError):
            continue  # a RecursionError is of brackets in thousands
        if baseline_path(directory, names.device.key, names.module) == path:
            keys += [Key(names.device.key, names.module, test) for test in names.tests]
    return keys
