"""Lines that read values back from the virtual GPU which no kernel computed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.virtual.decisions import decides
from pytest_gpumem.source_lines import shown_path, users_line

if TYPE_CHECKING:
    from types import FrameType

MOST_SITES: Final = 3
"""lines that a note names"""
SCALER: Final = str(Path("torch", "amp", "grad_scaler.py"))
"""PyTorch's file with torch.amp.GradScaler"""


class Readbacks:
    """Counts the values that a program decides by and that are unknown, or assumed, by its lines.

    A value that is only shown or logged is not counted: no figure depends on it.
    """

    def __init__(self) -> None:
        self._unknown: Counter[tuple[str, int]] = Counter()
        self._assumed: Counter[tuple[str, int]] = Counter()
        self.answered = False
        """whether the copies of the operator that runs are of known values"""

    def clear(self) -> None:
        """Begin anew."""
        self._unknown.clear()
        self._assumed.clear()

    @property
    def any_unknown(self) -> bool:
        """Whether the program decided by an unknown value."""
        return bool(self._unknown)

    def seen(self, size: int) -> None:
        """Note one copy of unknown bytes; called by the native library, on any thread."""
        if not self.answered:
            _note(sys._getframe().f_back, size, self._unknown)

    def seen_assumed(self, size: int) -> None:
        """Note that an assumed value of so many bytes is read."""
        _note(sys._getframe().f_back, size, self._assumed)

    def notes(self, root: Path) -> list[str]:
        """Return the sentences about these values; files as seen from ``root``."""
        sentences = []
        if self._unknown:
            total, where = self._unknown.total(), _where(self._unknown, root)
            values = f"{total} values were" if total > 1 else "1 value was"
            sentences.append(
                f"{values} read back from the virtual GPU{where}: shapes that depend on them are "
                "not predicted"
            )
        if self._assumed:
            total, where = self._assumed.total(), _where(self._assumed, root)
            values = f"{total} values were" if total > 1 else "1 value was"
            sentences.append(
                f"{values} assumed{where}: the figures hold for finite, evenly spread values"
            )
        return sentences


def _note(frame: FrameType | None, size: int, sites: Counter[tuple[str, int]]) -> None:
    if not asks_for_infinities(frame) and decides(frame, size):
        line = users_line(frame)
        sites[(line.filename, line.line) if line else ("", 0)] += 1


def _where(sites: Counter[tuple[str, int]], root: Path) -> str:
    lines = [f"{shown_path(name, root)}:{line}" for (name, line), _ in sites.most_common() if name]
    unnamed = len(lines) - MOST_SITES
    named = ", ".join(lines[:MOST_SITES]) + (f" and {unnamed} more" if unnamed > 0 else "")
    return f" ({named})" if named else ""


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
