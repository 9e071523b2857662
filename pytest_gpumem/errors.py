"""The errors of pytest-gpumem; each names the input, the problem and the remedy."""

from __future__ import annotations

from typing import Any


class GpuMemError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        given: the input, as the user wrote it (a marker, a file's name, an option).
        problem: a clause that follows ``given``: "is not a size".
        remedy: an instruction: "write 8GiB".
    """

    def __init__(self, given: str, problem: str, remedy: str) -> None:
        super().__init__(given, problem, remedy)
        self.given = given
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.given}: {self.problem}; {self.remedy}"


def is_own_error(excinfo: Any) -> bool:  # noqa: ANN401 - pytest's ExceptionInfo
    """Return whether an error is a GpuMemError: pytest then shows the test's line, not our frames.

    Modules that a test calls set ``__tracebackhide__`` to this function.
    """
    return bool(excinfo.errisinstance(GpuMemError))


class SpecError(GpuMemError, ValueError):
    """A marker, an option or a size that cannot be understood."""


class BaselineError(GpuMemError):
    """A baseline file that cannot be read or written."""


class ReportError(GpuMemError):
    """A report's file that cannot be read or written."""


class DeviceError(GpuMemError, RuntimeError):
    """A device that is missing, or lacks an ability that a test needs."""


class TooSmallError(DeviceError):
    """This machine has too few GPUs for a test, or their memory is too small."""
