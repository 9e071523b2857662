"""What the operators' own functions say of them: each is registered at its definition."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Answer = bytes | tuple[bytes, ...]
    """what a copy brings; a tuple: its forms, of which the copy takes the one of its size"""

Function = TypeVar("Function", bound="Callable[..., Any]")

EQUIVALENTS: Final[dict[str, Callable[..., Any]]] = {}
"""by the operator's name with its overload ("aten::mm.dtype"): a function of the operator's
arguments as CPU tensors, which returns the CUDA operator's results"""
COPIES: Final[dict[str, Callable[..., Sequence[Answer]]]] = {}
"""by the operator's name, if it reads back from the device: a function of the host's result and the
CUDA call's arguments, which returns what its copies bring"""
BOUNDS: Final[dict[str, Callable[..., Sequence[Answer]]]] = {}
"""likewise where values are unknown: a function of the arguments, which returns the copies for the
most that the operator can take. A size of zero would hold every limit. Operators with masks have
none: they take the share of a mask that is true"""


class Arguments:
    """An operator's arguments, and their defaults, by the names that its schema gives them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - of any type

    def get(self, name: str) -> Any:  # noqa: ANN401 - of any type
        """Return an argument that some versions of PyTorch, or some overloads, do not have."""
        return self.__dict__.get(name)


@functools.cache
def _parameters(operator: str) -> tuple[Sequence[str], Mapping[str, Any]]:
    """Return the names of an operator's arguments, and the defaults."""
    name, _, overload = operator.partition(".")
    arguments = torch._C._get_schema(name, overload).arguments
    optional = [argument for argument in arguments if argument.has_default_value()]
    defaults = {argument.name: argument.default_value for argument in optional}
    return [argument.name for argument in arguments], defaults


def _registered(
    table: dict[str, Callable[..., Any]], operators: Sequence[str]
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        table.update(dict.fromkeys(operators, function))
        return function

    return register


def equivalent(*operators: str) -> Callable[[Function], Function]:
    """Register a function as the equivalent of operators, whose arguments it takes."""
    return _registered(EQUIVALENTS, operators)


def equivalent_of_arguments(*operators: str) -> Callable[[Function], Function]:
    """Register a function as the equivalent of operators, which takes :class:`Arguments`."""

    def register(function: Function) -> Function:
        def host_of(operator: str) -> Callable[..., Any]:
            def host(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the operator's
                names, defaults = _parameters(operator)
                given = dict(zip(names, args, strict=False))
                return function(Arguments({**defaults, **given, **kwargs}))

            return host

        EQUIVALENTS.update({operator: host_of(operator) for operator in operators})
        return function

    return register


def copies(*operators: str) -> Callable[[Function], Function]:
    """Register a function of COPIES."""
    return _registered(COPIES, operators)


def bound(*operators: str) -> Callable[[Function], Function]:
    """Register a function of BOUNDS."""
    return _registered(BOUNDS, operators)
