"""Baselines of several versions of torch side by side: ``baselines/torch-{torch}``.

A folder that had baselines before its name had the version in it (``baselines``) is the last of all
that are looked into: its baselines hold until they are recorded anew.
"""

from __future__ import annotations

import glob
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

TORCH: Final = "{torch}"
"""in the name of the folder, torch's version, as 2.15"""
_MAJOR: Final = 1000
"""minor versions that a major one counts for, where the nearest version is looked for"""


def baseline_folders(root: Path, template: str) -> list[Path]:
    """Return the folder of the baselines; after it those of other versions, the nearest first.

    The last one is the folder that all of these lie in.
    """
    if TORCH not in template:
        return [root / template]
    try:
        number = version("torch")  # of its metadata: torch is not imported, and no finder is asked
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
        # Of two that are as near the older one goes first: its figures were there before.
        return abs((major - own[0]) * _MAJOR + minor - own[1]), (major, minor) > own

    nearest = [path for _, path in sorted(versions, key=distance)]
    common = Path(f"{prefix}x").parent  # "x": the prefix may end in a slash
    if "/" not in suffix and common.is_dir():
        nearest.append(common)
    return [root / template.replace(TORCH, f"{own[0]}.{own[1]}"), *nearest]


def folder_of_torch(name: str) -> str:
    """Return the folder of the installed torch's baselines, or of the nearest version that has one.

    A name without such folders (``baselines/torch-2.15``) and without ``{torch}`` is returned as it
    is.
    """
    template = name if TORCH in name else str(Path(name, f"torch-{TORCH}"))
    own, *neighbours = baseline_folders(Path(), template)
    folders = [folder for folder in (own, *neighbours) if folder.is_dir()]
    if TORCH in name:
        return str(folders[0] if folders else own)
    return str(folders[0]) if folders and folders[0] != Path(name) else name


def minor_version(number: str) -> tuple[int, int] | None:
    """Return (2, 15) for "2.15.0+cu132" and "2.15"; None for any other text."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", number)
    return (int(match[1]), int(match[2])) if match else None
