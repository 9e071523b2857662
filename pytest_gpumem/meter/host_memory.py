"""Measures this process's host memory: its resident set, and the part that PyTorch has pinned.

The resident set is Linux's (proc_pid_status(5)). Unlike a device's memory it is not reproducible to
the byte: it includes modules that a test imports, and memory that the C library caches.

The figure of pinned memory is ``allocated_bytes`` of ``torch.cuda.host_memory_stats``: all blocks
that PyTorch's allocator has pinned, including cached ones that no tensor uses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.errors import DeviceError
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from collections.abc import Callable

STATUS: Final = Path("/proc/self/status")
RESET: Final = Path("/proc/self/clear_refs")
"""writing 5 to this file resets the peak resident set size (VmHWM) to the current one"""


class HostWatch:
    """Measures the peak growth of the process's resident set."""

    def __init__(self, reset: Path = RESET) -> None:
        self._reset = reset
        self._began: int | None = None
        """resident bytes at the start; None if the system cannot reset the peak"""

    def start(self) -> None:
        """Reset the peak, and measure from here."""
        try:
            self._reset.write_text("5", encoding="ascii")
            self._began = _resident("VmRSS")
        except OSError:
            self._began = None

    def require(self, declared: str) -> None:
        """Refuse a ``declared`` limit that cannot be checked.

        Raises:
            DeviceError: the system does not report the peak resident set.
        """
        if self._began is None:
            raise DeviceError(
                declared,
                f"this system does not reset the highest memory of a process ({self._reset})",
                "run the test on Linux with a writable /proc, or leave out this limit",
            )

    def peak(self) -> int | None:
        """Return the resident set's peak growth in bytes; None if unknown."""
        if self._began is None:
            return None
        return max(0, _resident("VmHWM") - self._began)


def _resident(name: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes.

    Raises:
        OSError: the status has no such field.
    """
    for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{STATUS} has no {name}")


PINNED_EARLY: Final = Note(
    NoteKind.PINNED_COPIES,
    "pinned memory was free again before the program had waited for its copies; a GPU may keep "
    "this memory until the copies are done, so peak pinned may be higher",
)
LOOP: Final = Patch(
    "torch.utils.data._utils.pin_memory",
    "_pin_memory_loop",
    reason="DataLoader's threads that pin batches ahead of time are counted",
)


def require_pinned_stats(declared: str) -> None:
    """Refuse a ``declared`` limit that cannot be checked.

    Raises:
        DeviceError: PyTorch does not report pinned memory.
    """
    import torch

    if not VIEW.pinned_stats().owned:
        raise DeviceError(
            declared,
            f"torch {torch.__version__} does not report how much host memory is pinned for "
            f"{VIEW.backend.title}",
            "measure on CUDA with torch 2.10 or newer, or leave out this limit",
        )


def empty_pinned_cache() -> None:
    """Release cached pinned memory."""
    import torch

    owned = VIEW.pinned_stats().owned
    if owned and owned["current"]:
        torch._C._host_emptyCache()


class PinningLoops:
    """Counts DataLoader's pinning threads: with them, peak pinned memory depends on timing."""

    def __init__(self) -> None:
        self.begun = 0
        """threads started so far"""
        self._ended = 0
        self._watches = False

    @property
    def alive(self) -> int:
        """The number of running threads."""
        return self.begun - self._ended

    def watch(self) -> None:
        """Start counting, unless already counting or DataLoader's module is not imported."""
        if self._watches or LOOP.module not in sys.modules:
            return
        self._watches = True

        def counted(loop: Callable[..., Any]) -> Callable[..., Any]:
            def pin_memory_loop(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
                self.begun += 1
                try:
                    return loop(*args, **kwargs)
                finally:
                    self._ended += 1

            return pin_memory_loop

        LOOP.wrap(sys.modules[LOOP.module], counted)


LOOPS: Final = PinningLoops()
