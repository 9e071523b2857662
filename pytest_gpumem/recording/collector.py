"""Python's cyclic garbage collector, which runs as if nothing were measured.

It begins a pass when enough objects were made and not freed, and a pass frees the tensors that
reference cycles hold: so this package's own objects would move a step's peak. Inside of
:class:`Uncounted` no pass begins, and at its end the collector's count is that of its beginning.
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
"""spares at the beginning of a measurement"""
MAX_TUPLE_LENGTH: Final = 20
"""elements of the tuples that Python keeps for reuse"""
REUSED: Final = 80
"""freed lists, dicts, and tuples of each length, that Python keeps for reuse, at least"""


class _Spare:
    """An object that the collector counts when it is made, and no longer when it is freed."""

    __slots__ = ("_unused",)


_spares: Final[list[_Spare]] = []


class Uncounted:
    """A block of this package's own work, of which the collector counts nothing.

    No code of the test's may run inside: a pass of the collector's is put off until its end.
    """

    __slots__ = ("_count", "_enabled")

    at_entering: ClassVar[int] = 0
    """objects that an empty block makes: Python 3.11 frees the bound method that it called"""

    def __enter__(self) -> None:
        """Begin no pass from now on."""
        self._enabled = gc.isenabled()
        gc.disable()
        self._count = gc.get_count()[0]

    def __exit__(self, *_error: object) -> None:
        """Take the objects that were made inside, and are kept, out of the count."""
        made = self.made()
        if made > 0:
            del _spares[-made:]
        for _ in range(-made):
            _spares.append(_Spare())
        if self._enabled:
            gc.enable()

    def made(self) -> int:
        """Return how many objects were made inside until now, less those that were freed."""
        return gc.get_count()[0] - self._count - self.at_entering


def _made_in_empty_block() -> int:
    block = Uncounted()
    with block:
        return block.made()


# The first blocks make what Python keeps for reuse.
Uncounted.at_entering = [_made_in_empty_block() for _ in range(4)][-1]


def uncounted(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that works uncounted by the collector: see :class:`Uncounted`."""

    @functools.wraps(function)
    def counted_nothing(*args: P.args, **kwargs: P.kwargs) -> R:
        with Uncounted():
            return function(*args, **kwargs)

    return counted_nothing


def begin_count() -> None:
    """Collect all garbage, and begin the collector's counts anew, each time alike."""
    gc.collect()
    begin_count_again()


def begin_count_again() -> None:
    """Begin the counts anew after a full collection, which drops objects kept for reuse."""
    enabled = gc.isenabled()
    gc.disable()  # a pass in here would be counted
    _spares.extend([_Spare() for _ in range(STOCK - len(_spares))])
    keep_for_reuse()
    gc.collect(1)  # nothing to look at: what is kept for reuse stays
    if enabled:
        gc.enable()


def keep_for_reuse() -> None:
    """Have Python keep freed lists, dicts and tuples for reuse.

    A full collection drops those that it keeps, which are not counted: the first ones made
    afterwards would be, and most of them are this package's.
    """
    for _ in range(REUSED):
        _reusable.append([{}, *map(_ELEMENTS.__getitem__, _SLICES)])
    _reusable.clear()


_reusable: Final[list[list[object]]] = []
_ELEMENTS: Final = tuple(range(MAX_TUPLE_LENGTH))
_SLICES: Final = tuple(map(slice, range(1, MAX_TUPLE_LENGTH)))
