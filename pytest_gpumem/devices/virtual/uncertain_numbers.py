"""Numbers that a program reads back from the virtual GPU although no kernel computed them.

They behave like any other number, but record when the program branches on them: when it compares or
tests them, or uses them as a size. Their sums and products are such numbers too. Adding, formatting
and logging record nothing. Python code does not see some uses of an integer, such as its use as a
size. These are found by elimination: an integer that was never computed with, shown or compared may
have been a size.

Simpler rules were tried. If floats never counted as branches, a loop that waits for a loss would
not end, and no note would say that the figures of a step that keeps its best weights may differ on
a GPU. If an integer counted when it is read, each test that counts right answers, or prints a
number, would get a note that its figures depend on values, and would be run again.

Output sizes of operators are plain integers: if one is an upper bound, ``Decisions.seen_bound``
records the line.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.virtual.decisions import site_of_read
from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.devices.virtual.decisions import Decisions, Guesses
    from pytest_gpumem.devices.virtual.library import NativeLibrary

NUMBERS: Final = Patch(
    "torch",
    *("Tensor.item", "Tensor.tolist"),
    reason="a number that was not computed records when the program branches on it",
)
FLOATS: Final = Patch(
    "torch", "Tensor.__float__", reason="a value that becomes a tensor again decides nothing"
)
SAVED: Final = Patch(
    "torch",
    "storage._StorageBase.cpu",
    reason="a storage that is saved, pickled or copied whole decides nothing",
)
TEXTS: Final = Patch(
    "torch",
    *("Tensor.__repr__", "Tensor.__format__"),
    reason="no figure depends on a value that is only shown",
)
PAIRS: Final = Patch(
    "torch",
    "testing._comparison.NumberPair.__init__",
    reason="torch.testing asks for the exact class of a number",
)
DECIDING: Final = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "index")
"""methods that count as branches; ``int()`` counts because its result may become a size
unnoticed"""
COMPUTED: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow"),
    *("neg", "pos", "abs", "trunc", "floor", "ceil", "round"),
    *("and", "or", "xor", "lshift", "rshift", "rand", "ror", "rxor"),
)
SHOWN: Final = ("repr", "str", "format", "float", "hash")


class NumberRead:
    """Records how a program uses a number that no kernel computed, or one derived from it."""

    __slots__ = ("_decisions", "_guesses")

    def __init__(self, decisions: Decisions, guesses: Guesses, *, whole: bool) -> None:
        self._decisions, self._guesses = decisions, guesses
        if whole:
            guesses.unseen[self] = site_of_read(sys._getframe(1))

    def decide(self) -> None:
        """Record that the program branches on the number."""
        self.use()
        if self._decisions.holds(self._guesses):
            self._decisions.decide(self._guesses)

    def use(self) -> None:
        """Record that the program computes with the number, or shows it."""
        self._guesses.unseen.pop(self, None)

    def derive(self, *, whole: bool) -> NumberRead:
        """Return the record of a number computed from this one."""
        return NumberRead(self._decisions, self._guesses, whole=whole)


def _as_plain(number: UncertainFloat | UncertainInt) -> float | int:
    return float.__pos__(number) if isinstance(number, float) else int.__pos__(number)


def _reduce_ex(self: Any, _protocol: object) -> tuple[type, tuple[float | int]]:  # noqa: ANN401 - a number
    """Copy and pickle as a plain number."""
    plain = _as_plain(self)
    return type(plain), (plain,)


class UncertainFloat(float):
    """A floating-point number that no kernel computed."""

    read: NumberRead
    __reduce_ex__ = _reduce_ex


class UncertainInt(int):
    """An integer that no kernel computed."""

    read: NumberRead
    __reduce_ex__ = _reduce_ex


def uncertain(number: Any, read: NumberRead) -> Any:  # noqa: ANN401 - a number of any type
    """Return a number that records branches on it; return other objects unchanged.

    Args:
        number: a plain number, or a nested list of numbers.
        read: records the use of the number, or of all numbers in the list.
    """
    if isinstance(number, list):
        return [uncertain(each, read) for each in number]
    result: Any = number
    if type(number) is float:
        result = UncertainFloat(number)
    elif type(number) is int:
        result = UncertainInt(number)
    if result is not number:
        result.read = read
    return result


def plain_number(number: object) -> float | int | None:
    """Convert an UncertainFloat or UncertainInt to a plain number, to compile code with it.

    For an integer a branch is recorded, because the compiled code may use the integer as a size.
    For other objects the result is None.
    """
    if isinstance(number, UncertainFloat):
        number.read.use()
    elif isinstance(number, UncertainInt):
        number.read.decide()
    else:
        return None
    return _as_plain(number)


def decided_number(number: Any) -> Any:  # noqa: ANN401 - a number of any type
    """Convert an UncertainFloat or UncertainInt to a plain number, to branch on it.

    The branch is recorded. Other objects are returned unchanged.
    """
    if not isinstance(number, (UncertainFloat, UncertainInt)):
        return number
    number.read.decide()
    return _as_plain(number)


def _telling(
    method: Callable[..., Any], *, decides: bool = False, computes: bool = False
) -> Callable[..., Any]:
    """Wrap a number's method to record that the program uses the number.

    Args:
        method: a method of ``float`` or ``int``.
        decides: whether its use counts as a branch.
        computes: whether its result is a number that records its use, too.
    """

    def call(self: Any, *operands: Any) -> Any:  # noqa: ANN401 - a number's method
        result, read = method(self, *operands), self.read
        if result is NotImplemented:
            return result
        (read.decide if decides else read.use)()
        return uncertain(result, read.derive(whole=type(result) is int)) if computes else result

    return call


for _kind, _plain in ((UncertainFloat, float), (UncertainInt, int)):
    for _names, _wrapped in (
        (DECIDING, partial(_telling, decides=True)),
        (COMPUTED, partial(_telling, computes=True)),
        (SHOWN, _telling),
    ):
        for _name in _names:
            if hasattr(_plain, f"__{_name}__"):
                setattr(_kind, f"__{_name}__", _wrapped(getattr(_plain, f"__{_name}__")))


# -- methods of tensors that return such numbers --


@contextmanager
def watching(decisions: Decisions, library: NativeLibrary) -> Iterator[None]:
    """Patch tensors' methods to return numbers that record their use, while the block runs."""
    import torch

    with ExitStack() as stack:
        NUMBERS.wrap(torch, partial(_returning, decisions), stack)
        FLOATS.wrap(torch, partial(_reading, decisions, "kept"), stack)
        SAVED.wrap(torch, partial(_reading, decisions, "kept"), stack)
        TEXTS.wrap(torch, partial(_reading, decisions, "shown"), stack)
        PAIRS.wrap(torch, _comparing, stack)
        library.on_readback(decisions.seen)
        stack.callback(library.on_readback, None)
        yield


def _returning(decisions: Decisions, method: Callable[..., Any]) -> Callable[..., Any]:
    here = decisions.here

    def read(tensor: object) -> Any:  # noqa: ANN401 - a number
        outer, here.guesses = (here.purpose, here.guesses), None
        here.purpose = outer[0] or "number"
        try:
            number = method(tensor)
            guesses = here.guesses
        finally:
            here.purpose, here.guesses = outer
        if guesses is None:
            return number
        first = number
        while isinstance(first, list) and first:
            first = first[0]
        if isinstance(first, bool):  # bool cannot be subclassed
            decisions.decide(guesses)
            return number
        return uncertain(number, NumberRead(decisions, guesses, whole=type(first) is int))

    return read


def _reading(decisions: Decisions, purpose: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the method
        with decisions.purpose(purpose):
            return method(*args, **kwargs)

    return read


def _comparing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the constructor of ``torch.testing``'s NumberPair to compare plain numbers.

    PyTorch checks the exact class of each number. The results of ``_process_inputs`` are converted,
    not the arguments, because in PyTorch's own tests subclasses read numbers from tensors in that
    method.
    """

    def __init__(self: Any, *numbers: Any, **options: Any) -> None:  # noqa: ANN401, N807 - PyTorch's
        process = self._process_inputs

        def decided(*inputs: Any, **names: Any) -> list[Any]:  # noqa: ANN401 - PyTorch's
            return [decided_number(number) for number in process(*inputs, **names)]

        self._process_inputs = decided
        try:
            method(self, *numbers, **options)
        finally:
            del self._process_inputs

    return __init__
