"""Write the allocator's snapshots to files that https://pytorch.org/memory_viz opens."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.files.atomic_file import TEMPORARY, write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ENDING: Final = ".pickle"
VIEWER: Final = "https://pytorch.org/memory_viz"
MAX_NAME_LENGTH: Final = 180
"""maximum number of characters before the ending; file systems allow 255 bytes"""
_PLAIN = re.compile(r"\w[\w./]*(::\w+)+(\[[\w.,=+-]*\])?", re.ASCII)
"""nodeids that map to a unique file name without a hash"""


def snapshot_name(nodeid: str) -> str:
    """Return the file name of a test's snapshot, unique per nodeid and without a folder.

    "tests/test_a.py::Test::test_b[2]" becomes "tests-test_a.py--Test--test_b[2].pickle". A nodeid
    that is too long or has other characters is shortened and gets a hash.
    """
    name = nodeid.replace("::", "--").replace("/", "-")
    if _PLAIN.fullmatch(nodeid) and len(name) <= MAX_NAME_LENGTH:
        return name + ENDING
    digest = hashlib.sha256(nodeid.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    safe = re.sub(r"[^A-Za-z0-9_.,=+\[\]-]+", "-", name).lstrip(".-") or "test"
    return f"{safe[: MAX_NAME_LENGTH - len(digest) - 1]}-{digest}{ENDING}"


def write_snapshot(snapshot: Mapping[str, object], folder: Path, nodeid: str) -> Path:
    """Write a test's snapshot, as ``torch.cuda.memory._dump_snapshot`` does; return its path.

    The file is always complete, from this run or from an earlier one.

    Raises:
        GpuMemError: the file could not be written; an earlier file is intact.
    """
    path = folder / snapshot_name(nodeid)
    try:
        write_whole(path, pickle.dumps(snapshot), f"{TEMPORARY}-{os.getpid()}")
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        remedy = "write --gpumem-snapshots with a folder that can be written"
        raise GpuMemError(str(path), problem, remedy) from error
    return path
