"""Progress of a long session that records baselines: tests done, and the time that is left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from pytest_gpumem.sizes import duration

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY_S: Final = 30.0
"""seconds from line to line, and before the first one"""


class RecordingProgress:
    """Counts finished tests, and tells every so often how far the session is.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._told = clock()
        self._done = 0

    def finish(self, number: int) -> str:
        """Note that a test has ended; return a line for the waiting user, most often ""."""
        self._done += 1
        time = self._clock()
        left = number - self._done
        if time - self._told < EVERY_S or left <= 0:
            return ""
        self._told = time
        remaining = duration((time - self._began) / self._done * left)
        return f"{self._done} of {number} tests done, about {remaining} left"
