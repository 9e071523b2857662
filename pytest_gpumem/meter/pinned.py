"""Pinned host memory: the blocks of its allocator, and the threads that pin as they like.

The figure is ``allocated_bytes`` of ``torch.cuda.host_memory_stats``: all blocks that the allocator
has pinned, those included that no tensor has at the moment. It counts for the whole process.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from collections.abc import Callable

LOOP: Final = Patch(
    "torch.utils.data._utils.pin_memory",
    "_pin_memory_loop",
    reason="DataLoader's threads that pin batches ahead of time are counted",
)


class PinnedStats(NamedTuple):
    """Statistics of PyTorch's allocator of pinned host memory, in bytes; empty of an old torch."""

    owned: dict[str, int]
    """blocks that it has pinned, with those that no tensor has: of ``"allocated_bytes"``"""
    active: dict[str, int]
    """blocks of tensors, and of copies that are under way: of ``"active_bytes"``"""


def pinned_stats() -> PinnedStats:
    """Return the statistics of now; those of versions before 2.10 have other names and peaks."""
    stats = VIEW.pinned_stats()
    if "active_bytes" not in stats:
        return PinnedStats({}, {})
    return PinnedStats(stats["allocated_bytes"], stats["active_bytes"])


def require_pinned_stats(declared: str) -> None:
    """Refuse a limit that cannot be held.

    Args:
        declared: the limit as it was declared.

    Raises:
        DeviceError: PyTorch does not tell how much memory is pinned.
    """
    import torch

    if not pinned_stats().owned:
        raise DeviceError(
            declared,
            f"torch {torch.__version__} does not tell how much host memory is pinned",
            "install torch 2.10 or newer, or leave out this limit",
        )


def empty_pinned_cache() -> None:
    """Have the allocator give back memory that no tensor has."""
    import torch

    owned = pinned_stats().owned
    if owned and owned["current"]:
        torch._C._host_emptyCache()


class PinningLoops:
    """DataLoader's threads that pin batches before they are asked for: how many depends on time."""

    def __init__(self) -> None:
        self.begun = 0
        """threads that have begun to pin"""
        self._ended = 0
        self._watches = False

    @property
    def alive(self) -> int:
        """The number of those at work."""
        return self.begun - self._ended

    def watch(self) -> None:
        """Count them from now on; nothing where that is done, or no DataLoader can exist."""
        if not self._watches and LOOP.module in sys.modules:
            self._watches = True
            LOOP.wrap(sys.modules[LOOP.module], self._counted)

    def _counted(self, loop: Callable[..., Any]) -> Callable[..., Any]:
        def pin_memory_loop(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
            self.begun += 1
            try:
                return loop(*args, **kwargs)
            finally:
                self._ended += 1

        return pin_memory_loop


LOOPS: Final = PinningLoops()
"""those of this process"""
