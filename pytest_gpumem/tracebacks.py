"""Clearing tracebacks: the variables of their frames keep a failed step's tensors alive."""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
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
    visited: set[int] = set()
    frames: dict[int, FrameType] = {}
    pending = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in visited:  # causes and contexts may form a circle
            continue
        visited.add(id(current))
        frames.update((id(frame), frame) for frame, _ in traceback.walk_tb(current.__traceback__))
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
    for frame in list(frames.values()):
        # Not one that is to go on: clearing a coroutine that waits ends it. Such a coroutine is a
        # runner in another task that handed the error on.
        waits = frame.f_code.co_flags & _SUSPENDABLE and any(
            getattr(owner, _FRAME_ATTRIBUTES.get(type(owner), ""), None) is frame
            for owner in gc.get_referrers(frame)
        )
        if not waits:
            try:
                frame.clear()
            except RuntimeError:  # it runs: its variables are its own, those of its closure too
                del frames[id(frame)]
    for frame in frames.values():
        # Before Python 3.13 f_locals is a copy that an earlier reader (a debugger, a report) made
        # and the frame keeps: clearing does not reach it, reading it again updates it.
        _ = frame.f_locals
    for frame in list(frames.values()):
        frames.update((id(caller), caller) for caller in _cleared_callers(frame))
    _empty_cells(frames.values())


def _cleared_callers(frame: FrameType) -> Iterator[FrameType]:
    """Clear and yield the frames that called one of a traceback, up to the first that still runs.

    unittest catches a test's error deep below the frames that hold the test's instance.
    """
    caller = frame.f_back
    while caller is not None:
        if not caller.f_code.co_flags & _SUSPENDABLE:  # clearing a frame that waits would end it
            try:
                caller.clear()
            except RuntimeError:  # it runs, and so do its callers
                return
            yield caller
        caller = caller.f_back


def _empty_cells(frames: Iterable[FrameType]) -> None:
    """Empty the cells of closures that nothing but cleared frames can reach.

    From Python 3.11 on a frame keeps its function, and that its closure, which clearing does not
    reach. ``Module.__call__`` runs hooks in such a function, with the arguments and the result in
    cells. A function that anything else refers to (a decorated one, a hook that was registered) is
    left alone, and so is a cell that a running frame shares.
    """
    calls: Counter[int] = Counter()
    """of each function, the number of its frames"""
    functions: list[FunctionType] = []
    for frame in frames:
        for referent in gc.get_referents(frame):
            if isinstance(referent, FunctionType) and referent.__code__ is frame.f_code:
                calls[id(referent)] += 1
                if calls[id(referent)] == 1:
                    functions.append(referent)
            del referent  # it would count as a reference
    # As a garbage collector does: drop from the lists all that has further references, until only
    # functions and cells are left that refer to each other alone.
    by_id = {id(cell): cell for function in functions for cell in function.__closure__ or ()}
    cells = list(by_id.values())
    del by_id
    number = -1
    while number != len(functions) + len(cells):
        number = len(functions) + len(cells)
        in_cells = Counter(id(content) for cell in cells for content in gc.get_referents(cell))
        of_functions = _reference_counts(functions)
        of_closures = _reference_counts([function.__closure__ for function in functions])
        functions = [
            function
            for function, count, of_closure in zip(
                functions, of_functions, of_closures, strict=True
            )
            if count <= calls[id(function)] + in_cells[id(function)]
            and (of_closure <= 1 or function.__closure__ is None)
        ]
        sharers = Counter(id(cell) for function in functions for cell in function.__closure__ or ())
        of_cells = _reference_counts(cells)
        cells = [
            cell for cell, count in zip(cells, of_cells, strict=True) if count <= sharers[id(cell)]
        ]
    for cell in cells:
        with suppress(ValueError):  # it is empty
            del cell.cell_contents


def _reference_counts(objects: list[Any]) -> list[int]:
    """Return the number of references to each object, besides the list's."""
    unshared = object()  # has as many as a member of the list without further references
    *counts, least = [sys.getrefcount(member) for member in [*objects, unshared]]
    return [count - least for count in counts]


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
