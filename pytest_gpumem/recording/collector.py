"""Make Python's cyclic garbage collector run as if nothing were measured.

A collection starts after a number of allocated objects, and frees the tensors in reference cycles.
If this package's own objects counted too, the peak of a test that leaves tensors in cycles would
depend on whether a test before it has already made the objects that are made only once: with only a
full collection at the start, the peaks of 6 of 12 such tests changed by 1 to 8 MiB when the tests
ran in reverse order.

So inside :class:`Uncounted` no collection starts, and at its end the collector's count is what it
was at its start.
"""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, ClassVar, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

STOCK: Final = 20_000
"""spare objects at the start of a measurement; freeing one lowers the collector's count"""
MAX_TUPLE_LENGTH: Final = 20
"""freed tuples with fewer elements go to CPython's free lists, for reuse"""
REUSED: Final = 80
"""number of lists, of dicts, and of tuples of each length to free, for CPython's free lists: these
keep at least so many of each"""


class _Spare:
    """An object that the collector counts when it is made and uncounts when it is freed."""

    __slots__ = ("_unused",)


_spares: Final[list[_Spare]] = []


class Uncounted:
    """Runs this package's own code without the collector counting the objects that it makes.

    The test's code must not run inside: its collections would be delayed until the end.
    """

    __slots__ = ("_count", "_enabled")

    at_entering: ClassVar[int] = 0
    """change of the count as the block is entered: Python 3.11 frees the bound ``__enter__``"""

    def __enter__(self) -> None:
        """Stop collections, and remember the count."""
        self._enabled = gc.isenabled()
        gc.disable()
        self._count = gc.get_count()[0]

    def __exit__(self, *_error: object) -> None:
        """Restore the count: free a spare for each object that was made inside and stays."""
        made = self.made()
        if made > 0:
            del _spares[-made:]
        for _ in range(-made):
            _spares.append(_Spare())
        if self._enabled:
            gc.enable()

    def made(self) -> int:
        """Return the number of objects created inside so far, minus those freed."""
        return gc.get_count()[0] - self._count - self.at_entering


def _made_in_empty_block() -> int:
    block = Uncounted()
    with block:
        return block.made()


# Measure several times: the first empty blocks create objects that CPython reuses later.
Uncounted.at_entering = [_made_in_empty_block() for _ in range(4)][-1]


def uncounted(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it runs inside :class:`Uncounted`."""

    @functools.wraps(function)
    def counted_nothing(*args: P.args, **kwargs: P.kwargs) -> R:
        with Uncounted():
            return function(*args, **kwargs)

    return counted_nothing


def begin_count() -> None:
    """Collect all garbage, and restart the collector's counts from the same state each time."""
    gc.collect()
    begin_count_again()


def begin_count_again() -> None:
    """Restart the counts after a full collection, which clears the free lists."""
    enabled = gc.isenabled()
    gc.disable()  # a collection in here would be counted
    _spares.extend([_Spare() for _ in range(STOCK - len(_spares))])
    keep_for_reuse()
    gc.collect(1)  # resets the counts; unlike a full collection it leaves the free lists
    if enabled:
        gc.enable()


def keep_for_reuse() -> None:
    """Fill CPython's free lists with lists, dicts and tuples.

    A full collection clears them. Reused objects are not counted, but new ones are: the first ones
    made after a collection are mostly this package's.
    """
    for _ in range(REUSED):
        _reusable.append([{}, *map(_ELEMENTS.__getitem__, _SLICES)])
    _reusable.clear()


_reusable: Final[list[list[object]]] = []
_ELEMENTS: Final = tuple(range(MAX_TUPLE_LENGTH))
_SLICES: Final = tuple(map(slice, range(1, MAX_TUPLE_LENGTH)))
