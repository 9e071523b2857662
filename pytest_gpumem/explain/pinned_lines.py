"""The source lines that pin host memory, found in a run of their own."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.measurement import LinePeak
from pytest_gpumem.meter.host_memory import pinned_stats
from pytest_gpumem.source_lines import Line, qualified, shown_path, source_code, users_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

MAX_LINES: Final = 3
"""lines that are told"""
RETURNS: Final = frozenset({"c_return", "c_exception"})
"""events of a profile function after a function of C, as PyTorch's are"""


class PinWatch:
    """Notes which lines pin memory: PyTorch's allocator is asked after each function of C."""

    def __init__(self) -> None:
        self._bytes: Counter[Line | None] = Counter()
        self._total = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and threads that it starts."""
        self._total = self._pinned()
        outer = sys.getprofile()
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(outer)
            threading.setprofile(outer)

    @staticmethod
    def _pinned() -> int:
        return pinned_stats().owned.get("allocated", 0)

    def _see(self, frame: FrameType, event: str, _argument: Any) -> None:  # noqa: ANN401 - unused
        if event in RETURNS and (total := self._pinned()) != self._total:
            self._bytes[users_line(frame)] += total - self._total
            self._total = total

    def lines(self, root: Path) -> tuple[LinePeak, ...]:
        """Return the lines that pinned most, with the bytes that they pinned, the largest first."""
        return tuple(
            LinePeak(
                shown_path(line.filename, root),
                line.line,
                qualified(line.filename, line.line) or line.function,
                source_code(line.filename, line.line),
                nbytes,
            )
            for line, nbytes in self._bytes.most_common(MAX_LINES)
            if line is not None
        )
