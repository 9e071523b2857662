"""Functions around those of PyTorch's compiler and of Triton."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


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
