"""Out-of-memory errors of PyTorch's allocator: the bytes requested, the bytes held, the line.

Such an error is recognized by its class, ``torch.OutOfMemoryError``, or by its message if an
accelerator other than CUDA raises another class. An observer attached to the allocator provides the
figures. If it was not called, only the requested bytes are known, rounded, from the message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.errors import SpecError
from pytest_gpumem.meter.reading import current
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.sizes import parse_size
from pytest_gpumem.source_lines import is_users, shown_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from pytest_gpumem.meter.peaks import Held

_TRIED = re.compile(r"(?:Tried|Failed) to allocate ([0-9.]{1,20} \w{1,5})\b")
_DEVICE = re.compile(r"\b(?:GPU|device) ([0-9]{1,3})\b")


@dataclass(frozen=True)
class Refusal:
    """An allocation that failed for lack of memory."""

    device: int
    requested: int | None
    held: Held | None
    """the step's memory at that moment; None if the observer did not run"""


class OutOfMemoryWatch:
    """Observes every out-of-memory error of this process after the first ``start``."""

    observes = False
    """whether PyTorch calls an observer for each error; if not, figures come from messages"""
    names_device = True
    """whether the last error that was read named its device"""
    _refusals: list[Refusal]
    _own: Callable[[Held, int], Held]

    def __init__(self) -> None:
        self._refusals = []

    def start(self, own: Callable[[Held, int], Held] = lambda held, _device: held) -> None:
        """Forget earlier errors; ``own`` returns the step's part of a device's memory."""

        def observe(device: int, requested: int, _limit: int, _free: int) -> None:
            self._refusals.append(Refusal(device, requested, self._own(current(device), device)))

        self._refusals.clear()
        self._own = own
        # PyTorch cannot detach an observer: attach one for the life of the process.
        if not self.observes:
            self.observes = VIEW.backend.observe_refusals(observe)

    @property
    def count(self) -> int:
        """The number of errors since ``start``, caught ones included."""
        return len(self._refusals)

    def forget(self, count: int) -> None:
        """Forget all errors but the first ``count``."""
        del self._refusals[count:]

    def last(self, error: BaseException) -> Refusal:
        """Return the refusal behind an error: the last observed, else one made from its message."""
        if self._refusals:
            return self._refusals[-1]
        message = str(error)
        tried, device = _TRIED.search(message), _DEVICE.search(message)
        self.names_device = device is not None
        try:
            requested = parse_size(tried.group(1).replace("bytes", "B")) if tried else None
        except SpecError:
            requested = None
        return Refusal(int(device.group(1)) if device else 0, requested, None)


WATCH = OutOfMemoryWatch()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error is the out-of-memory error of the measured backend."""
    return VIEW.backend.is_out_of_memory(error)


def find_out_of_memory(
    error: BaseException | None, handled: BaseException | None = None
) -> BaseException | None:
    """Return the out-of-memory error in the chain of an error's causes and contexts, or None.

    The search stops at ``handled``, an unrelated error that was being handled when this one was
    raised.
    """
    visited: set[int] = {id(handled)} if handled is not None else set()
    while error is not None and id(error) not in visited:
        if is_out_of_memory(error):
            return error
        visited.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


class UserLine(NamedTuple):
    """A line of the user's code; as text "examples/test_mlp.py:31 in step", or "" for none."""

    path: str = ""
    """relative to the project's folder if the file is inside it"""
    line: int = 0
    """the line's number, from 1; 0 if unknown"""
    function: str = ""

    def __str__(self) -> str:
        """Return the line's name in reports."""
        return f"{self.path}:{self.line} in {self.function}" if self.path else ""


def site_of(traceback: TracebackType | None, root: Path) -> UserLine:
    """Return a traceback's deepest line outside of torch, pytest and this package."""
    site = UserLine()
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_users(code.co_filename):
            path = shown_path(code.co_filename, root)
            site = UserLine(path, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return site
