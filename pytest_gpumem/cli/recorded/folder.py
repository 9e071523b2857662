"""Read all baselines of a folder, of every device and module, whether or not tests use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.file_format import decode
from pytest_gpumem.baselines.paths import Key, baseline_files, baseline_path, read_file
from pytest_gpumem.errors import BaselineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from pytest_gpumem.measurement import BaselineEntry


@dataclass
class Figures:
    """Entries by key, and the files that could not be read."""

    entries: dict[Key, BaselineEntry] = field(default_factory=dict)
    errors: list[BaselineError] = field(default_factory=list)
    """one per file; all other files' entries are in ``entries``"""
    unread: set[Path] = field(default_factory=set)
    """paths of the files that could not be read, relative to the folder"""
    files: int = 0
    """number of files, readable or not"""


def read_folder(directory: Path) -> Figures:
    """Read every baseline in a folder; a missing folder has none."""
    return read_contents(((path, read_file) for path in baseline_files(directory)), directory)


def read_contents(
    files: Iterable[tuple[Path, Callable[[Path], bytes | None]]], directory: Path
) -> Figures:
    """Read baseline files that are, or would be, in ``directory``.

    ``files`` pairs each path with a function that returns a path's content.
    """
    figures = Figures()
    for path, read in files:
        figures.files += 1
        try:
            content = read(path)
            if content is not None:  # None: deleted since the folder was listed
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
