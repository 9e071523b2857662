"""Operators that the CPU has not in a tensor's type: they are computed in another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WIDER: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}
"""the type in which an operator is computed that the CPU has not in the first"""


def in_types_of_the_host(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:  # noqa: ANN401 - as the function
    """Call a function of host tensors; where the CPU has it not in their types, in wider ones.

    A GPU, too, computes in single precision and stores in half. Arguments that the function writes
    are written in their own types.
    """
    try:
        return function(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        wide: dict[int, tuple[Tensor, Tensor]] = {}

        def widened(argument: Any) -> Any:  # noqa: ANN401 - of any type
            if isinstance(argument, Tensor) and argument.dtype in WIDER:
                copy = argument.to(WIDER[argument.dtype])
                return wide.setdefault(id(argument), (argument, copy))[1]
            if isinstance(argument, (list, tuple)):
                return type(argument)(widened(part) for part in argument)
            if isinstance(argument, torch.dtype):
                return WIDER.get(argument, argument)
            return argument

        wide_args = [widened(argument) for argument in args]
        wide_kwargs = {name: widened(argument) for name, argument in kwargs.items()}
        if not wide:
            raise
        versions = {key: copy._version for key, (_, copy) in wide.items()}
        try:
            result = function(*wide_args, **wide_kwargs)
        except (RuntimeError, NotImplementedError):
            raise error from None
        for key, (argument, copy) in wide.items():
            if copy._version != versions[key]:
                argument.copy_(copy)
        return result
