"""Clearing tracebacks: the variables of their frames keep a failed step's tensors alive."""

from __future__ import annotations

import gc
import inspect
import traceback
from contextlib import contextmanager, suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


_FRAME_ATTRIBUTES = {
    GeneratorType: "gi_frame",
    CoroutineType: "cr_frame",
    AsyncGeneratorType: "ag_frame",
}
"""the attribute of each type that has its frame, as long as it has not ended"""


def clear(error: BaseException | None) -> None:
    """Clear the frames of an error, and of its causes, contexts and the members of its group."""
    cleared: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in cleared:  # causes and contexts may form a circle
            continue
        cleared.add(id(current))
        frames = [frame for frame, _ in traceback.walk_tb(current.__traceback__)]
        for frame in frames:
            _clear_frame(frame)
        for frame in frames:
            # Before Python 3.13 f_locals is a copy that an earlier reader (a debugger, a report)
            # made and the frame keeps: clearing does not reach it, reading it again updates it.
            _ = frame.f_locals
        for frame in frames:
            _clear_callers(frame)
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]


def _clear_frame(frame: FrameType) -> None:
    """Clear a frame, unless it runs or is to go on: clearing a coroutine that waits ends it.

    Such a coroutine is a runner in another task that handed the error on.
    """
    if frame.f_code.co_flags & _SUSPENDABLE and any(
        getattr(owner, _FRAME_ATTRIBUTES.get(type(owner), ""), None) is frame
        for owner in gc.get_referrers(frame)
    ):
        return
    with suppress(RuntimeError):  # it runs
        frame.clear()


def _clear_callers(frame: FrameType) -> None:
    """Clear the frames that called one of a traceback, up to the first that still runs.

    unittest catches a test's error deep below the frames that hold the test's instance.
    """
    caller = frame.f_back
    while caller is not None:
        if not caller.f_code.co_flags & _SUSPENDABLE:  # clearing a frame that waits would end it
            try:
                caller.clear()
            except RuntimeError:  # it runs, and so do its callers
                return
        caller = caller.f_back


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable Python's garbage collector, where thousands of objects are made and none is dropped.

    Each collection would walk over all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
