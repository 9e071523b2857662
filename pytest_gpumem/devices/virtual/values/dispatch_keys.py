"""The dispatch key that intercepts operators: below autograd, and unused by PyTorch."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload

KEY: Final = "Fake"
NUMBER: Final = int(torch._C._dispatch_key_parse(KEY))  # type: ignore[call-overload] # an enum of C++'s
PYTHON: Final = torch._C.DispatchKey.Python
"""dispatch key of modes and subclasses: above ours, or below it in older versions of torch"""
IS_ABOVE_PYTHON: Final = int(PYTHON) < NUMBER  # type: ignore[call-overload] # likewise
LOWER_KEY: Final = "FPGA"
"""another key that PyTorch does not use, below the Python key: it intercepts the operators that a
mode or a subclass calls, if KEY is above the Python key, which excludes all keys above itself"""
NAMES: Final = (KEY, LOWER_KEY) if IS_ABOVE_PYTHON else (KEY,)
INCLUDED: Final = (*map(torch._C._dispatch_key_parse, NAMES),)
KEYS: Final = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, INCLUDED))
KEYS_BELOW: Final = torch._C._dispatch_keyset_full_after(INCLUDED[0])
Without: Final = torch._C._ExcludeDispatchKeyGuard


def present_operator(name: str) -> OpOverload:
    """Look up an operator by its full name, and return it."""
    namespace, _, operator = name.partition("::")
    packet, _, overload = operator.partition(".")
    op: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return op


operator_named: Final = functools.cache(present_operator)
"""``present_operator``, cached: it returns the same operator even if another is registered under
the name later"""


def keys_of(tensors: Sequence[torch.Tensor]) -> torch._C.DispatchKeySet:
    """Return the union of the tensors' dispatch keys."""
    return functools.reduce(operator.or_, map(torch._C._dispatch_keys, tensors))


def numbers_as_tensors(op: OpOverload, args: Sequence[Any]) -> list[Any]:
    """Replace numbers passed for parameters of type Tensor by tensors, as PyTorch's C++ does.

    None stays: it means a missing tensor, such as attention's seed before torch 2.7.
    """
    with torch._C._DisableTorchDispatch(), Without(KEYS):
        return [
            argument
            if argument is None
            or isinstance(argument, torch.Tensor)
            or str(declared.type) != "Tensor"
            else torch.tensor(argument, device="cpu")
            for argument, declared in zip(args, op._schema.arguments, strict=False)
        ]
