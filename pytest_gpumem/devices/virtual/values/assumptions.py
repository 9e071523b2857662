"""Plausible values in place of computed ones: finite, repeatable, balanced like fresh weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from pytest_gpumem.devices.virtual.values.operators import FALSE_FOR, INDICES, TRUE_FOR

if TYPE_CHECKING:
    from pytest_gpumem.devices.virtual.values.operators import OperatorCall

SEED: Final = 2_147_483_647
MAX_CHOICES: Final = 256
"""of so many, as of experts, distinct ones are chosen; of more, repetitions are rare"""


class Assumptions:
    """Makes plausible values."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(SEED)
        self.masks = 0.5
        """the share of a mask that is true"""
        self.masks_declared = False
        """whether the test says that share: it holds for masks of assumed numbers too"""

    @property
    def most_of_masks(self) -> float:
        """The share of a mask that is true where no element is assumed: all, or as declared."""
        return self.masks if self.masks_declared else 1.0

    def begin_again(self) -> None:
        """Give the same values as at first."""
        self._generator.manual_seed(SEED)

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """Return values for a tensor of which nothing is known."""
        if tensor.dtype == torch.bool:
            return torch.rand(tensor.shape, generator=self._generator) < self.masks
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        # Between 0 and 1: finite, a loss or a norm, a probability, a logit; never a divisor of 0.
        values = torch.rand(tensor.shape, generator=self._generator)
        return (values * 0.9 + 0.05).to(tensor.dtype)

    def are_of_mask(self, call: OperatorCall, result: Tensor) -> bool:
        """Return whether the share of masks holds for a result of assumed tensors."""
        is_mask = result.dtype == torch.bool and result.numel() > 1
        return self.masks_declared and is_mask and call.name not in TRUE_FOR | FALSE_FOR

    def of_result(self, call: OperatorCall, result: Tensor) -> Tensor | None:
        """Return values for a result of unknown tensors; None: it is unknown until it decides."""
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
        dim = call.argument("dim")
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
