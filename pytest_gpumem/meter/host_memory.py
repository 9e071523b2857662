"""The host memory of this process: its resident set, as Linux counts it (proc_pid_status(5)).

Unlike a device's memory it does not repeat to the byte: modules that a test imports are in it, and
memory that the C library keeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pytest_gpumem.errors import DeviceError

STATUS: Final = Path("/proc/self/status")
RESET: Final = Path("/proc/self/clear_refs")
"""writing 5 to this file resets the highest resident set to that of now"""


class HostWatch:
    """Measures how much the process's resident set grows at most."""

    def __init__(self) -> None:
        self._began: int | None = None
        """bytes when the measurement began; None where the system does not tell the highest"""

    def start(self) -> None:
        """Begin anew."""
        try:
            RESET.write_text("5", encoding="ascii")
            self._began = _resident("VmRSS")
        except OSError:
            self._began = None

    def require(self, declared: str) -> None:
        """Refuse a limit that cannot be held.

        Args:
            declared: the limit as it was declared.

        Raises:
            DeviceError: the system does not tell the highest resident set.
        """
        if self._began is None:
            raise DeviceError(
                declared,
                f"this system does not reset the highest memory of a process ({RESET})",
                "run the test on Linux with a writable /proc, or leave out this limit",
            )

    def peak(self) -> int | None:
        """Return the bytes that the highest resident set is above that of the beginning."""
        if self._began is None:
            return None
        return max(0, _resident("VmHWM") - self._began)


def _resident(name: str) -> int:
    """Return a figure of the process's status, in bytes.

    Raises:
        OSError: there is none.
    """
    for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{STATUS} has no {name}")
