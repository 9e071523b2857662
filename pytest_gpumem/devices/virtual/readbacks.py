"""Lines that read unknown values back from the virtual GPU: zeros, which shapes may depend on."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.source_lines import shown_path, users_line

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

    def clear(self) -> None:
        """Begin anew."""
        self._sites.clear()

    def seen(self, _size: int) -> None:
        """Note one copy; called by the native library, on any thread."""
        frame = sys._getframe().f_back
        if not asks_for_infinities(frame):
            line = users_line(frame)
            self._sites[(line.filename, line.line) if line else ("", 0)] += 1

    def notes(self, root: Path) -> list[str]:
        """Return the sentence about these copies, if any; files as seen from ``root``."""
        total = sum(self._sites.values())
        if not total:
            return []
        lines = [
            f"{shown_path(name, root)}:{line}"
            for (name, line), _ in self._sites.most_common()
            if name
        ]
        unnamed = len(lines) - MOST_SITES
        named = ", ".join(lines[:MOST_SITES]) + (f" and {unnamed} more" if unnamed > 0 else "")
        values = f"{total} values were" if total > 1 else "1 value was"
        where = f" ({named})" if named else ""
        consequence = "shapes that depend on them are not predicted"
        return [f"{values} read back from the virtual GPU{where}: {consequence}"]


def asks_for_infinities(frame: FrameType | None) -> bool:
    """Return whether GradScaler asks if gradients overflowed.

    Zero says that none did, as in a step that trains, and the optimizer steps. No shape depends on
    it.
    """
    while frame is not None and frame.f_code.co_filename.endswith(SCALER):
        if frame.f_code.co_name == "_maybe_opt_step":
            return True
        frame = frame.f_back
    return False
