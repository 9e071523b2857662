"""What the operators' own functions say of them: each is registered at its definition."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from fractions import Fraction

    Answer = bytes | tuple[bytes, ...]
    """what a copy brings; a tuple: its forms, of which the copy takes the one of its size"""

TORCH: Final = tuple(map(int, torch.__version__.split(".")[:2]))
"""PyTorch's version: (2, 15)"""


Function = TypeVar("Function", bound="Callable[..., Any]")

EQUIVALENTS: Final[dict[str, Callable[..., Any]]] = {}
"""by the operator's name with its overload ("aten::mm.dtype"): a function of the operator's
arguments as CPU tensors, which returns the CUDA operator's results"""
COPIES: Final[dict[str, Callable[[Any, Arguments], Sequence[Answer]]]] = {}
"""by the operator's name, if it reads back from the device: see data_dependent.py"""
BOUNDED: Final[set[str]] = set()
"""those of them that give the copies for unknown values too. A size of zero would hold every limit.
Operators with masks need not: they take the share of a mask that is true"""


class Arguments:
    """An operator's arguments, and their defaults, by the names that its schema gives them."""

    share: float | Fraction | None = None
    """of the elements of unknown masks, that is true; None: their values tell"""

    def __init__(self, operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Name them; ``operator`` is the name of one, with its overload."""
        names, defaults = _names_and_defaults(operator)
        self.__dict__.update(defaults, **dict(zip(names, args, strict=False)), **kwargs)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - of any type

    def get(self, name: str) -> Any:  # noqa: ANN401 - of any type
        """Return an argument that some versions of PyTorch, or some overloads, do not have."""
        return self.__dict__.get(name)


@functools.cache
def _names_and_defaults(operator: str) -> tuple[Sequence[str], Mapping[str, Any]]:
    """Return the names of an operator's arguments, and the defaults."""
    name, _, overload = operator.partition(".")
    arguments = torch._C._get_schema(name, overload).arguments
    optional = [argument for argument in arguments if argument.has_default_value()]
    defaults = {argument.name: argument.default_value for argument in optional}
    return [argument.name for argument in arguments], defaults


def equivalent(*operators: str) -> Callable[[Function], Function]:
    """Register a function as the equivalent of operators, whose arguments it takes."""

    def register(function: Function) -> Function:
        EQUIVALENTS.update(dict.fromkeys(operators, function))
        return function

    return register


def equivalent_of_arguments(*operators: str) -> Callable[[Function], Function]:
    """Register a function as the equivalent of operators, which takes :class:`Arguments`."""

    def register(function: Function) -> Function:
        def host_of(operator: str) -> Callable[..., Any]:
            def host(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the operator's
                return function(Arguments(operator, args, kwargs))

            return host

        EQUIVALENTS.update({operator: host_of(operator) for operator in operators})
        return function

    return register


def copies(*operators: str, bounded: bool = False) -> Callable[[Function], Function]:
    """Register a function of COPIES."""

    def register(function: Function) -> Function:
        COPIES.update(dict.fromkeys(operators, function))
        BOUNDED.update(operators if bounded else ())
        return function

    return register
