"""Numbers that a program reads back from the virtual GPU and that no kernel computed.

They are like any other number, and tell when the program decides by them: when it compares or tests
them, or makes a size of them. Sums and products of them are such numbers too. To add them up, to
format and to log them tells nothing. What Python's code does not see of a whole number, as its use
for a size, is seen by elimination: one that was never computed with, shown or compared may have
been a size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

COMPARED: Final = ("eq", "ne", "lt", "le", "gt", "ge")
COMPUTED: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow"),
    *("neg", "pos", "abs", "trunc", "floor", "ceil", "round"),
    *("and", "or", "xor", "lshift", "rshift", "rand", "ror", "rxor"),
)
SHOWN: Final = ("repr", "str", "format", "float", "hash")


class UncertainRead(Protocol):
    """The read of a number that was not computed, or a number computed from such ones."""

    def tell(self) -> None:
        """Note that the program decides by the number."""

    def use(self) -> None:
        """Note that the program computes with the number, or shows it."""

    def derive(self, *, whole: bool) -> UncertainRead:
        """Return the read of a number that was computed from this one."""


class UncertainFloat(float):
    """A floating-point number that no kernel computed."""

    read: UncertainRead

    def __int__(self) -> int:
        """Return a whole number, of which no use is seen: it may become a size."""
        self.read.tell()
        return float.__int__(self)

    def __reduce_ex__(self, _protocol: object) -> tuple[type, tuple[float]]:
        """Be copied and pickled as a plain number."""
        return float, (float.__pos__(self),)


class UncertainInt(int):
    """A whole number that no kernel computed."""

    read: UncertainRead

    def __int__(self) -> int:
        """Return a whole number, of which no use is seen: it may become a size."""
        self.read.tell()
        return int.__int__(self)

    def __index__(self) -> int:
        """Return the number for a size or an index."""
        self.read.tell()
        return int.__index__(self)

    def __reduce_ex__(self, _protocol: object) -> tuple[type, tuple[int]]:
        """Be copied and pickled as a plain number."""
        return int, (int.__pos__(self),)


def uncertain(number: Any, read: UncertainRead) -> Any:  # noqa: ANN401 - a number of any type
    """Return a number that tells when the program decides by it; other objects as they are.

    Args:
        number: a plain one, or a nested list of them.
        read: the read that it is of.
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
    """Return the plain number of one that no kernel computed, for code that is compiled with it.

    A whole number tells: it may become a size there. Other objects: None.
    """
    if isinstance(number, UncertainFloat):
        number.read.use()
        return float.__pos__(number)
    if isinstance(number, UncertainInt):
        number.read.tell()
        return int.__pos__(number)
    return None


def decided_number(number: Any) -> Any:  # noqa: ANN401 - a number of any type
    """Return the plain number of one that no kernel computed, for code that decides by it.

    The number tells. Other objects: as they are.
    """
    if isinstance(number, (UncertainFloat, UncertainInt)):
        number.read.tell()
    plain = plain_number(number)
    return number if plain is None else plain


def _deciding(method: Callable[..., Any]) -> Callable[..., Any]:
    def decide(self: Any, *operands: Any) -> Any:  # noqa: ANN401 - a number's method
        result = method(self, *operands)
        if result is not NotImplemented:
            self.read.tell()
        return result

    return decide


def _computing_method(method: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: Any, *operands: Any) -> Any:  # noqa: ANN401 - a number's method
        result = method(self, *operands)
        if result is NotImplemented:
            return result
        self.read.use()
        return uncertain(result, self.read.derive(whole=type(result) is int))

    return compute


def _showing(method: Callable[..., Any]) -> Callable[..., Any]:
    def show(self: Any, *operands: Any) -> Any:  # noqa: ANN401 - a number's method
        self.read.use()
        return method(self, *operands)

    return show


for _kind, _plain in ((UncertainFloat, float), (UncertainInt, int)):
    for _names, _wrapped in (
        ((*COMPARED, "bool"), _deciding),
        (COMPUTED, _computing_method),
        (SHOWN, _showing),
    ):
        for _name in _names:
            if hasattr(_plain, f"__{_name}__"):
                setattr(_kind, f"__{_name}__", _wrapped(getattr(_plain, f"__{_name}__")))
