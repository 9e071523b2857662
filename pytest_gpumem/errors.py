"""The errors of pytest-gpumem: each says what was given, what is wrong, and what to do."""

from __future__ import annotations


class GpuMemError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        given: what was given, as the user would recognise it (a marker, a file, an option).
        problem: what is wrong with it.
        remedy: what to write or do instead.
    """

    def __init__(self, given: str, problem: str, remedy: str) -> None:
        super().__init__(given, problem, remedy)
        self.given = given
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.given}: {self.problem}; {self.remedy}"


class SpecError(GpuMemError, ValueError):
    """A marker, an option or a size that cannot be understood."""


class BaselineError(GpuMemError):
    """A baseline file that cannot be read or written."""


class ReportError(GpuMemError):
    """A report's file that cannot be read or written."""


class DeviceError(GpuMemError, RuntimeError):
    """A device that is not there, or that cannot do what a test asks of it."""


class TooSmallError(DeviceError):
    """This machine's GPUs are too few, or too small, for what a test asks."""
