"""What keeps objects alive: frames of a traceback, whose variables are a failed step's tensors."""

from __future__ import annotations

import gc
import inspect
import traceback
from contextlib import contextmanager, suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


_FRAMES = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
"""what each has its frame in, as long as it has not ended"""


def _clear(frame: FrameType) -> None:
    """Clear a frame, unless it runs or is to go on: clearing a coroutine that waits ends it.

    As of a runner in another task, which handed the error on.
    """
    if frame.f_code.co_flags & _SUSPENDABLE and any(
        getattr(it, _FRAMES.get(type(it), ""), None) is frame for it in gc.get_referrers(frame)
    ):
        return
    with suppress(RuntimeError):  # it runs
        frame.clear()


def _forget_locals(frames: TracebackType | None) -> None:
    """Empty what reading ``f_locals`` once left behind: a copy that clearing does not reach."""
    while frames is not None:
        _ = frames.tb_frame.f_locals  # reading it again brings the copy up to date
        frames = frames.tb_next


def clear(error: BaseException | None) -> None:
    """Clear the frames of an error and of all that it was raised from or in the course of."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        frames = [frame for frame, _ in traceback.walk_tb(one.__traceback__)]
        for frame in frames:
            _clear(frame)
        _forget_locals(one.__traceback__)
        for frame in frames:
            _clear_callers(frame)
        pending += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def _clear_callers(frame: FrameType) -> None:
    """Clear the frames that led to one of a traceback, up to the first that still runs.

    unittest catches a test's error deep below the frames that hold the test's instance.
    """
    caller = frame.f_back
    while caller is not None:
        if not caller.f_code.co_flags & _SUSPENDABLE:  # clearing one that waits would end it
            try:
                caller.clear()
            except RuntimeError:  # it runs, and so do those that called it
                return
        caller = caller.f_back


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python from looking for garbage, where thousands of objects are made and none is."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
