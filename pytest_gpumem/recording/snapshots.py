"""Keeping the allocator's snapshots as files that https://pytorch.org/memory_viz opens."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.files.atomic_file import TEMPORARY, write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpumem.recording.recording import Recording

ENDING: Final = ".pickle"
VIEWER: Final = "https://pytorch.org/memory_viz"
MAX_NAME_LENGTH: Final = 180
"""characters before the ending; file systems take 255 bytes"""
_PLAIN = re.compile(r"\w[\w./]*(::\w+)+(\[[\w.,=+-]*\])?", re.ASCII)
"""nodeids from which a name can be made that no other nodeid has"""


def snapshot_name(nodeid: str) -> str:
    """Return the name of a test's snapshot: one name for each nodeid, without any folder.

    "tests/test_a.py::Test::test_b[2]" becomes "tests-test_a.py--Test--test_b[2].pickle". A nodeid
    that is long or has other characters loses them and gets a hash.
    """
    name = nodeid.replace("::", "--").replace("/", "-")
    if _PLAIN.fullmatch(nodeid) and len(name) <= MAX_NAME_LENGTH:
        return name + ENDING
    digest = hashlib.sha256(nodeid.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    safe = re.sub(r"[^A-Za-z0-9_.,=+\[\]-]+", "-", name).lstrip(".-") or "test"
    return f"{safe[: MAX_NAME_LENGTH - len(digest) - 1]}-{digest}{ENDING}"


def write_snapshot(recording: Recording, folder: Path, nodeid: str) -> Path:
    """Write a recording's snapshot, as ``torch.cuda.memory._dump_snapshot`` does; return its file.

    The file is always whole: of this run or of an earlier one.

    Raises:
        GpuMemError: it could not be written; nothing of it is left.
    """
    path = folder / snapshot_name(nodeid)
    try:
        write_whole(path, pickle.dumps(recording.snapshot), f"{TEMPORARY}-{os.getpid()}")
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        remedy = "write --gpumem-snapshots with a folder that can be written"
        raise GpuMemError(str(path), problem, remedy) from error
    return path
