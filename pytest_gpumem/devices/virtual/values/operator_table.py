"""Tables of functions for single operators; each function is registered where it is defined."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from fractions import Fraction

    Answer = bytes | tuple[bytes, ...]
    """the bytes of a copy to the host; a tuple if versions of PyTorch copy them in different sizes:
    then the copy gets the bytes of its own size"""

TORCH: Final = tuple(map(int, torch.__version__.split(".")[:2]))
"""PyTorch's version, such as (2, 15)"""


Function = TypeVar("Function", bound="Callable[..., Any]")

EQUIVALENTS: Final[dict[str, Callable[..., Any]]] = {}
"""functions by the operator's name with its overload ("aten::mm.dtype"): each takes the operator's
arguments as CPU tensors, and returns the CUDA operator's results"""
COPIES: Final[dict[str, Callable[[Any, Arguments], Sequence[Answer]]]] = {}
"""functions by the operator's name: each returns the bytes that the operator reads back from the
device (data_dependent.py)"""
BOUNDED: Final[set[str]] = set()
"""operators in COPIES whose functions return an upper bound for unknown values: with a size of zero
every limit would hold. Operators with masks need no entry: they select the share of a mask that is
true"""


class Arguments:
    """An operator's arguments and defaults as attributes, by their names in the schema."""

    share: float | Fraction | None = None
    """assumed share of true elements in unknown masks; None: the values are known"""

    def __init__(self, operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Bind the arguments; ``operator`` is the operator's name with its overload."""
        names, defaults = _names_and_defaults(operator)
        self.__dict__.update(defaults, **dict(zip(names, args, strict=False)), **kwargs)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - of any type

    def get(self, name: str) -> Any:  # noqa: ANN401 - of any type
        """Return an argument; None if this overload or this version of PyTorch lacks it."""
        return self.__dict__.get(name)


@functools.cache
def _names_and_defaults(operator: str) -> tuple[Sequence[str], Mapping[str, Any]]:
    """Return the names of an operator's arguments, and their defaults."""
    name, _, overload = operator.partition(".")
    arguments = torch._C._get_schema(name, overload).arguments
    optional = [argument for argument in arguments if argument.has_default_value()]
    defaults = {argument.name: argument.default_value for argument in optional}
    return [argument.name for argument in arguments], defaults


def equivalent(*operators: str) -> Callable[[Function], Function]:
    """Register a function as the equivalent of operators; it takes their arguments."""

    def register(function: Function) -> Function:
        EQUIVALENTS.update(dict.fromkeys(operators, function))
        return function

    return register


def equivalent_of_arguments(*operators: str) -> Callable[[Function], Function]:
    """Register a function as the equivalent of operators; it takes :class:`Arguments`."""

    def register(function: Function) -> Function:
        def host_of(operator: str) -> Callable[..., Any]:
            def host(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the operator's
                return function(Arguments(operator, args, kwargs))

            return host

        EQUIVALENTS.update({operator: host_of(operator) for operator in operators})
        return function

    return register


def copies(*operators: str, bounded: bool = False) -> Callable[[Function], Function]:
    """Register a function in COPIES, and with ``bounded`` in BOUNDED."""

    def register(function: Function) -> Function:
        COPIES.update(dict.fromkeys(operators, function))
        BOUNDED.update(operators if bounded else ())
        return function

    return register
