"""Tracks known and assumed values, and writes them to device memory.

A value is known, unknown, or assumed: a plausible guess, marked as such. Two states are not
enough. If values were assumed only when they are read, by their dtype alone, all tokens of a
mixture of experts would go to expert 0, ``isfinite`` of a large tensor would be true or false by
chance, and a mask and its opposite would have sizes that do not add up. So the results of some
operators on unknown values are assumed at once, and values computed from them are assumed too. If
these counted as known, there would be no note that a figure depends on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.values.host_tensors import over_device_memory, span
from pytest_gpumem.devices.virtual.values.operators import FALSE_FOR, INDICES, TRUE_FOR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.values.operators import OperatorCall

SEED: Final = 2_147_483_647
MAX_CHOICES: Final = 256
"""maximum number of choices, such as experts, among which assumed indices are distinct: among more,
repetitions are rare"""


class KnownValues:
    """The values stored by the native library, and which of them are assumed.

    The library stores, by address, which bytes are known. It treats assumed bytes as known; their
    storages are recorded here, by address and size.
    """

    def __init__(
        self, library: NativeLibrary, put: Callable[[Tensor, Tensor], bool | None]
    ) -> None:
        self._library = library
        self._put = put
        self._assumed: dict[int, int] = {}
        self.refused = 0
        """bytes that were not written because the host has no memory for them"""

    def drop_stale(self) -> None:
        """Forget assumed ranges that have since been overwritten."""
        self._assumed = {
            address: nbytes
            for address, nbytes in self._assumed.items()
            if self._library.is_known(address, nbytes)
        }
        self._library.tell_assumed(bool(self._assumed))

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether all values of a tensor are known or assumed; True for a host tensor."""
        if not tensor.is_cuda:
            return True
        nbytes = span(tensor)
        return not nbytes or self._library.is_known(tensor.data_ptr(), nbytes)

    def write(
        self, tensor: Tensor, values: Tensor, *, assumed: bool = False, whole: bool = False
    ) -> bool:
        """Write values to a tensor; False if a limit prevents it, so that they become unknown.

        Args:
            tensor: a device tensor or a host tensor.
            values: a host tensor.
            assumed: whether the values are assumed.
            whole: whether nothing else in the tensor's storage matters.
        """
        if not tensor.is_cuda:
            tensor.copy_(values)
            return True
        nbytes = span(tensor)
        if not nbytes:
            return True
        if not (assumed or self._assumed):
            is_written = self._put(tensor, values)
            if is_written is not None:
                self.refused += 0 if is_written else nbytes
                return is_written
        address = tensor.data_ptr()
        is_partial = nbytes != tensor.nbytes and not self._library.is_known(address, nbytes)
        if not self._library.open_for_writing(address, nbytes):
            self.refused += nbytes
            return False
        host = over_device_memory(tensor)
        if values.data_ptr() != host.data_ptr():
            for dim, stride in enumerate(host.stride()):
                if not stride and host.shape[dim] > 1:  # an expanded tensor: write one element
                    host, values = host.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            host.copy_(values)
        # The gaps between the elements of a strided tensor contain other tensors' elements, which
        # were unknown and now count as assumed.
        assumed = assumed or (is_partial and not whole)
        if assumed or self._assumed:
            self._mark(tensor, assumed=assumed, whole=whole)
        return True

    def accept(self, tensor: Tensor) -> bool:
        """Mark the bytes of a newly allocated tensor as known values, whatever they are.

        If a program then writes the tensor part by part, all of it is known.
        """
        nbytes = span(tensor)
        if nbytes and not self._library.open_for_writing(tensor.data_ptr(), nbytes):
            return False
        if self._assumed:
            self._mark(tensor, assumed=False)
        return True

    def forget(self, tensor: Tensor) -> None:
        """Make a tensor's values unknown."""
        self._library.forget(tensor.data_ptr(), span(tensor))

    def forget_range(self, start: int, end: int) -> None:
        """Make the values in a range of addresses unknown."""
        self._library.forget(start, end - start)

    def are_assumed(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether any of these tensors has assumed values."""
        if not self._assumed:
            return False
        for tensor in tensors:
            if tensor.is_cuda:
                storage = tensor.untyped_storage()
                if self._assumed.get(storage.data_ptr()) == storage.nbytes():
                    return True
        return False

    def _mark(self, tensor: Tensor, *, assumed: bool, whole: bool = False) -> None:
        storage = tensor.untyped_storage()
        if assumed:
            self._assumed[storage.data_ptr()] = storage.nbytes()
        elif whole or span(tensor) == storage.nbytes():
            self._assumed.pop(storage.data_ptr(), None)
        self._library.tell_assumed(bool(self._assumed))


class Assumptions:
    """Returns plausible values: finite, repeatable, balanced like those of fresh weights."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(SEED)
        self.masks = 0.5
        """assumed share of true elements in a mask"""
        self.masks_declared = False
        """whether the test has set ``masks``, which then also applies to masks computed from
        assumed numbers"""

        self.least_sizes = False
        """whether sizes that depend on unknown values use the lower bound instead of the upper"""

    @property
    def bound(self) -> float:
        """The share of unknown elements to select: all, or none."""
        return 0.0 if self.least_sizes else 1.0

    def begin_again(self) -> None:
        """Restart the sequence of values."""
        self._generator.manual_seed(SEED)

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """Return assumed values for a tensor whose values are unknown."""
        if tensor.dtype == torch.bool:
            return torch.rand(tensor.shape, generator=self._generator) < self.masks
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        # Between 0 and 1: finite, plausible as a loss, norm, probability or logit; never a zero
        # divisor.
        values = torch.rand(tensor.shape, generator=self._generator)
        return (values * 0.9 + 0.05).to(tensor.dtype)

    def is_mask_with_set_share(self, call: OperatorCall, result: Tensor) -> bool:
        """Return whether a result of assumed inputs is a mask to which the test's share applies."""
        is_mask = result.dtype == torch.bool and result.numel() > 1
        return self.masks_declared and is_mask and call.name not in TRUE_FOR | FALSE_FOR

    def of_result(self, call: OperatorCall, result: Tensor) -> Tensor | None:
        """Return assumed values for an operator's result on unknown inputs; None to assume none."""
        name = call.name
        source = call.args[0] if call.args else None
        if name in TRUE_FOR | FALSE_FOR and result.dtype == torch.bool:
            is_true = name in TRUE_FOR or (name == "any" and self.masks == 1)
            return torch.full(result.shape, is_true)
        if result.is_floating_point() or result.is_complex() or not isinstance(source, Tensor):
            return None
        if name in INDICES and result.dtype == torch.int64:
            return self._indices(call, result, source)
        if name in {"sum", "count_nonzero"} and result.numel():
            share = source.numel() // result.numel()
            return torch.full(result.shape, int(share * self.masks), dtype=result.dtype)
        return None

    def _indices(self, call: OperatorCall, result: Tensor, source: Tensor) -> Tensor:
        dim = call.by_name().get("dim")
        if not source.dim() or (dim is None and call.name in {"argmax", "argmin"}):
            dim, choices = -1, source.numel()
        else:
            dim = -1 if dim is None else dim
            choices = source.shape[dim]
        if choices <= MAX_CHOICES and result.dim() == source.dim():
            order = torch.rand(source.shape, generator=self._generator).argsort(dim)
            return order.narrow(dim, 0, result.shape[dim]) if result.dim() else order
        return torch.randint(
            max(choices, 1), result.shape, generator=self._generator, dtype=result.dtype
        )
