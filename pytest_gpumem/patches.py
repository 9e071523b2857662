"""Values in the places of PyTorch's own: functions, methods, classes. The caller says the reason.

A patch lasts as long as a block does, or as the process. Where a guard of compiled code compares a
function, :mod:`pytest_gpumem.wrapped_functions` changes its code instead.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack


def patch(stack: ExitStack, owner: Any, name: str, value: object) -> None:  # noqa: ANN401 - PyTorch's
    """Put a value in an attribute's place until a stack is closed.

    Args:
        stack: is given the removal.
        owner: a module, or a class; one that only inherits the attribute inherits it again later.
        name: the attribute's.
        value: the new one.
    """
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:  # noqa: ANN401 - PyTorch's
    """Put a function around one of PyTorch's; nothing where this version of torch has none.

    Args:
        owner: a module, or a class with a method of its own; None: there is none.
        name: the function's.
        make: returns the new function; it is given the one that is there.
    """
    function = vars(owner).get(name) if owner is not None else None
    if callable(function):
        setattr(owner, name, functools.wraps(function)(make(function)))
