"""Who reads unknown values back from the virtual GPU: zeros, which shapes may depend on."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

MOST_SITES: Final = 3
"""lines that a note names"""
SCALER: Final = str(Path("torch", "amp", "grad_scaler.py"))
"""PyTorch's file with torch.amp.GradScaler"""


class Readbacks:
    """Counts the copies of unknown values to the host, by the user's line that caused them."""

    def __init__(self) -> None:
        self._sites: Counter[tuple[str, int]] = Counter()
        self._foreign: dict[str, bool] = {}

    def clear(self) -> None:
        """Begin anew."""
        self._sites.clear()

    def seen(self, _size: int) -> None:
        """Note one copy; called by the native library, on any thread."""
        frame = sys._getframe(1)
        if not _asks_for_infinities(frame):
            self._sites[self._site(frame)] += 1

    def _site(self, frame: FrameType | None) -> tuple[str, int]:
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._foreign:
                self._foreign[name] = _is_foreign(name)
            if not self._foreign[name]:
                return name, frame.f_lineno
            frame = frame.f_back
        return "", 0

    def notes(self, root: Path) -> list[str]:
        """Return the sentence about them, if there were any; files as seen from ``root``."""
        total = sum(self._sites.values())
        if not total:
            return []
        lines = [
            f"{_shown(name, root)}:{line}" for (name, line), _ in self._sites.most_common() if name
        ]
        more = len(lines) - MOST_SITES
        named = ", ".join(lines[:MOST_SITES]) + (f" and {more} more" if more > 0 else "")
        values = f"{total} values were" if total > 1 else "1 value was"
        where = f" ({named})" if named else ""
        consequence = "shapes that depend on them are not predicted"
        return [f"{values} read back from the virtual GPU{where}: {consequence}"]


def _asks_for_infinities(frame: FrameType | None) -> bool:
    """Return whether GradScaler asks if gradients overflowed.

    Zero says that none did, which is what it is told in a step that trains, and the optimizer
    steps. No shape depends on it.
    """
    while frame is not None and frame.f_code.co_filename.endswith(SCALER):
        if frame.f_code.co_name == "_maybe_opt_step":
            return True
        frame = frame.f_back
    return False


def _is_foreign(filename: str) -> bool:
    """Return whether a file is torch's, this package's or Python's own, not the user's."""
    if filename.startswith("<"):
        return True
    import torch

    path = Path(filename)
    folders = (Path(torch.__file__ or "").parent, Path(__file__).parent.parent)
    return any(path.is_relative_to(folder) for folder in folders)


def _shown(filename: str, root: Path) -> str:
    try:
        return Path(filename).relative_to(root).as_posix()
    except ValueError:
        return filename
