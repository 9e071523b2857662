"""Memory that reference cycles hold until Python's cyclic garbage collector runs.

The collector runs by the number of Python objects that were made, and that depends on the modules
and caches that earlier code loaded. So the moment at which such memory is freed, and with it a
peak, may differ between a test alone and the same test in a session.
"""

from __future__ import annotations

import gc
from operator import add, sub
from typing import TYPE_CHECKING, Final

from pytest_gpumem.recording.collector import Uncounted, keep_for_reuse
from pytest_gpumem.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FULL: Final = 2
"""the collector's oldest generation"""
MIN_SHARE: Final = 1000
"""garbage below this part of the peak, or below 1 MiB, is within the default tolerance"""


class GarbageWatch:
    """Sees how much device memory each collection frees."""

    def __init__(self, allocated: Callable[[], list[int]]) -> None:
        """Watch; ``allocated`` returns the bytes that are allocated now, one figure a device."""
        self._allocated = allocated
        self._at_start: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Forget the collections until now."""
        self.most = 0
        """bytes that the collection that freed most did free"""
        self.freed: list[int] = []
        """bytes that all collections freed, one figure a device; empty before the first one"""

    def start(self) -> None:
        """Watch from now on."""
        gc.callbacks.append(self._see)

    def stop(self) -> None:
        """Watch no longer."""
        if self._see in gc.callbacks:  # the step's code may have cleared the list
            gc.callbacks.remove(self._see)

    def _see(self, phase: str, info: dict[str, int]) -> None:
        with Uncounted():
            if phase == "start":
                self._at_start = self._allocated()
            else:
                freed = [*map(sub, self._at_start, self._allocated())]
                self.most = max(self.most, sum(freed))
                self.freed = [*map(add, self.freed or [0] * len(freed), freed)]
                if info["generation"] == FULL:
                    keep_for_reuse()

    def notes(self, peaks: Sequence[int]) -> list[str]:
        """Return a sentence about garbage that matters beside the peaks, in bytes."""
        if self.most < MIB or self.most * MIN_SHARE < max(peaks):
            return []
        sentence = (
            f"garbage in reference cycles kept {format_size(self.most)} until Python's "
            "garbage collector ran: the time of its run depends on all earlier code, so "
            "the peak may differ by this amount (break the cycle, or call gc.collect())"
        )
        return [sentence]
