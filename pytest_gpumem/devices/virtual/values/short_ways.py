"""Calls of operators after which one large tensor is unknown, and nothing else is to be done.

A large tensor is one that neither operators nor copies make known: most tensors of a step are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gpumem.devices.virtual.library import LIMITS
from pytest_gpumem.devices.virtual.values.host_tensors import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    ShortWay = Callable[[Sequence[Any], Mapping[str, Any], int, Callable[[int], bool]], bool]
    """takes a call's arguments, the bytes of the largest tensor that is computed, and the function
    which tells whether the values at an address are known"""

MOST_FLOATS: Final = 1 << 16
"""elements of the largest tensor of floating-point numbers that is computed: losses, norms, the
router of a layer are no larger; weights and activations are"""
OF_CONSTANTS: Final = {
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like"),
    *("new_zeros", "new_ones", "new_full", "arange", "linspace", "eye"),
    *("where", "masked_fill", "triu", "tril"),
}
"""operators whose large results are noted though they are floating-point numbers: constants, and
masks that are added to scores. Other operators' depend on weights or on activations."""


def makes_new(*_call: object) -> bool:
    """Return True: whether the new tensor is large is seen afterwards."""
    return True


def makes_like(*_call: object) -> bool:
    """Return True: the values of the tensor that the new one is like do not matter."""
    return True


def makes_assumed(*_call: object) -> bool:
    """Return True: the new tensors that are small, of several, have assumed values afterwards."""
    return True


def moves_to_device(args: Sequence[Any], kwargs: Mapping[str, Any], *_limits: object) -> bool:
    """Return whether a copy is not to the host, and of floating-point numbers: no mask's."""
    device = kwargs.get("device")
    if args[0].layout is not torch.strided or not args[0].is_floating_point():
        return False
    return device is None or device.type != "cpu"


def stays_on_host(args: Sequence[Any], kwargs: Mapping[str, Any], *_limits: object) -> bool:
    """Return whether an operator of OF_CONSTANTS makes a tensor of the host."""
    if args and type(args[0]) in PLAIN and args[0].is_cuda:
        return False
    device = kwargs.get("device")
    return device is None or device.type == "cpu"


def writes_large(
    args: Sequence[Any],
    _kwargs: Mapping[str, Any],
    largest: int,
    could_know: Callable[[int], bool],
) -> bool:
    """Return whether the tensor that is written is too large, or large and unknown."""
    tensor = args[0]
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided  # a sparse tensor has no nbytes
        and tensor.is_cuda
        and (nbytes := tensor.nbytes) > LIMITS.small
        and (nbytes > largest or not could_know(tensor.data_ptr()))
    )


def overwrites_large(
    args: Sequence[Any],
    _kwargs: Mapping[str, Any],
    largest: int,
    could_know: Callable[[int], bool],
) -> bool:
    """Return whether what is written is too large, or large and a copy of unknown values."""
    tensor, source = args[0], args[1] if len(args) > 1 else None
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and tensor.is_cuda
        and (nbytes := tensor.nbytes) > LIMITS.small
        and (nbytes > largest or is_unknown(source, could_know))
    )


def is_unknown(tensor: Any, could_know: Callable[[int], bool]) -> bool:  # noqa: ANN401 - any argument
    """Return whether an argument is a tensor of the device whose values are not known."""
    return (
        type(tensor) in PLAIN
        and tensor.is_cuda
        and tensor.layout is torch.strided
        and not could_know(tensor.data_ptr())
    )


def any_unknown(args: Sequence[Any], could_know: Callable[[int], bool]) -> bool:
    """Return whether any argument, itself or the first of a list, is such a tensor."""
    for argument in args:
        first = argument[0] if type(argument) is list and argument else argument
        if is_unknown(first, could_know):
            return True
    return False


def reads_host(args: Sequence[Any], *_limits: object) -> bool:
    """Return whether the number that is read is the host's."""
    return not args[0].is_cuda


def short_way(  # noqa: PLR0913 - all that operators differ in
    name: str,
    written: Sequence[int],
    *,
    first_is_tensor: bool,
    copies: bool,
    overwrites: bool,
    reads_back: bool,
) -> ShortWay | None:
    """Return the test of an operator's calls for that; None: no call passes.

    Args:
        name: the operator's, without namespace and overload.
        written: places of the arguments that it writes.
        first_is_tensor: whether its first argument is one tensor.
        copies: whether it copies bytes.
        overwrites: whether the values of what it writes do not matter.
        reads_back: whether it returns a tensor's bytes to the host.
    """
    if reads_back:
        return reads_host
    if name in OF_CONSTANTS:
        return stays_on_host
    if written:
        in_place = list(written) == [0] and first_is_tensor and name != "zero_"
        large = overwrites_large if overwrites else writes_large
        return large if in_place else None
    if name.endswith("_like") or name.startswith(("new_", "empty")):
        return makes_like
    return moves_to_device if copies else makes_new
