"""Clearing tracebacks, because variables in their frames keep a failed step's tensors alive."""

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
"""by type: the name of the attribute with a generator's frame, which is None once the generator has
ended"""


def clear(error: BaseException | None) -> None:
    """Clear the frames of an error, its causes, its contexts and the members of its group."""
    visited: set[int] = set()
    frames: dict[int, FrameType] = {}
    pending = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in visited:  # causes and contexts may form a cycle
            continue
        visited.add(id(current))
        frames.update((id(frame), frame) for frame, _ in traceback.walk_tb(current.__traceback__))
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
    for frame in list(frames.values()):
        # Skip suspended frames: clearing a waiting coroutine would end it. Such a coroutine is a
        # runner in another task that passed the error on.
        waits = frame.f_code.co_flags & _SUSPENDABLE and any(
            getattr(owner, _FRAME_ATTRIBUTES.get(type(owner), ""), None) is frame
            for owner in gc.get_referrers(frame)
        )
        if not waits:
            try:
                frame.clear()
            except RuntimeError:  # a running frame still needs its variables and closure
                del frames[id(frame)]
    for frame in frames.values():
        # Before Python 3.13 f_locals is a copy that the frame keeps once a reader (a debugger, a
        # report) made it: clearing does not update it, reading it again does.
        _ = frame.f_locals
    for frame in list(frames.values()):
        frames.update((id(caller), caller) for caller in _cleared_callers(frame))
    _empty_cells(frames.values())


def _cleared_callers(frame: FrameType) -> Iterator[FrameType]:
    """Clear and yield the callers of a traceback's frame, up to the first that is still running.

    unittest catches a test's error deep below the frames that hold the test's instance, so the
    traceback does not contain these frames.
    """
    caller = frame.f_back
    while caller is not None:
        if not caller.f_code.co_flags & _SUSPENDABLE:  # clearing a suspended frame would end it
            try:
                caller.clear()
            except RuntimeError:  # the frame is running, and so are its callers
                return
            yield caller
        caller = caller.f_back


def _empty_cells(frames: Iterable[FrameType]) -> None:
    """Empty the cells of closures that only cleared frames can reach.

    Since Python 3.11 a frame refers to its function, and the function to its closure, which
    clearing the frame does not empty. ``Module.__call__`` runs hooks in such a function, with the
    arguments and the result in cells. A function that anything else refers to (a decorated one, a
    registered hook) is left alone, and so is a cell that a running frame shares.
    """
    calls: Counter[int] = Counter()
    """number of frames per function id"""
    functions: list[FunctionType] = []
    for frame in frames:
        for referent in gc.get_referents(frame):
            if isinstance(referent, FunctionType) and referent.__code__ is frame.f_code:
                calls[id(referent)] += 1
                if calls[id(referent)] == 1:
                    functions.append(referent)
            del referent  # else this variable would count as a reference
    # Like a garbage collector: remove from the lists what is referenced from elsewhere, until only
    # functions and cells are left that nothing but each other refers to.
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
        with suppress(ValueError):  # the cell is already empty
            del cell.cell_contents


def _reference_counts(objects: list[Any]) -> list[int]:
    """Return the number of references to each object, except the reference from the list."""
    unshared = object()  # has as many references as a member that only the list refers to
    *counts, least = [sys.getrefcount(member) for member in [*objects, unshared]]
    return [count - least for count in counts]


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable Python's garbage collector while creating thousands of objects and no garbage.

    Each collection would traverse all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
