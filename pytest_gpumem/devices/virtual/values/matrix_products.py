"""Equivalents of CUDA's own matrix products: of other types, scaled, grouped, of four bits."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from pytest_gpumem.devices.virtual.values.operator_table import equivalent, equivalent_of_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_gpumem.devices.virtual.values.operator_table import Arguments

ZERO_OF_INT4 = 8
"""the number of four bits that stands for zero"""


@equivalent("aten::mm.dtype", "aten::mm.dtype_out", "aten::bmm.dtype", "aten::bmm.dtype_out")
def product(
    left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    """Return mm or bmm, summed and stored in another type."""
    result = left.to(dtype) @ right.to(dtype)
    return result if out is None else out.resize_(result.shape).copy_(result)


@equivalent(
    "aten::addmm.dtype", "aten::addmm.dtype_out", "aten::baddbmm.dtype", "aten::baddbmm.dtype_out"
)
def added_product(
    added: Tensor,
    left: Tensor,
    right: Tensor,
    dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return addmm or baddbmm, summed and stored in another type."""
    result = alpha * (left.to(dtype) @ right.to(dtype))
    if beta:
        result = result + beta * added.to(dtype)
    return result if out is None else out.resize_(result.shape).copy_(result)


def _factors(scale: Tensor, matrix: Tensor) -> Tensor:
    """Return scales of a tensor, of its rows or columns, or of blocks, so that they multiply it."""
    if scale.numel() == 1:
        return scale.float().reshape(())
    if scale.ndim == 1 and scale.numel() in matrix.shape:
        shape = (-1, 1) if scale.numel() == matrix.shape[0] else (1, -1)
        return scale.float().reshape(shape)
    if scale.ndim == 2:  # noqa: PLR2004 - rows and columns
        factors = scale.float()
        for dim in (0, 1):
            repeats, rest = divmod(matrix.shape[dim], factors.shape[dim])
            if rest:
                break
            factors = factors.repeat_interleave(repeats, dim)
        else:
            return factors
    message = f"scales of {tuple(scale.shape)} for a matrix of {tuple(matrix.shape)}"
    raise NotImplementedError(message)


@equivalent_of_arguments("aten::_scaled_mm", "aten::_scaled_mm.out")
def scaled_mm(args: Arguments) -> Tensor:
    """Return the product of two scaled matrices of 8 bits, with a bias."""
    left = args.self.float() * _factors(args.scale_a, args.self)
    right = args.mat2.float() * _factors(args.scale_b, args.mat2)
    result: Tensor = left @ right
    if args.bias is not None:
        result = result + args.bias.float()
    result = result.to(args.out_dtype or args.self.dtype)
    out: Tensor | None = args.get("out")
    return result if out is None else out.resize_(result.shape).copy_(result)


@equivalent("aten::_grouped_mm")
def grouped_mm(
    left: Tensor,
    right: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the products of groups of rows, of columns or of the inner size; by their ends."""
    dtype = out_dtype or left.dtype
    wide_left, wide_right = left.float(), right.float()
    if ends is None:
        result = wide_left @ wide_right
        return (result if bias is None else result + bias.float()[:, None]).to(dtype)
    bounds = [0, *ends.tolist()]
    groups = [slice(start, end) for start, end in pairwise(bounds)]
    if left.ndim == right.ndim:  # both of two dimensions: the inner one is grouped
        parts = [wide_left[:, group] @ wide_right[group] for group in groups]
        return torch.stack(parts).to(dtype)
    if right.ndim > left.ndim:
        result = wide_left.new_zeros(left.shape[0], right.shape[-1])
        for number, group in enumerate(groups):
            result[group] = wide_left[group] @ wide_right[number]
            if bias is not None:
                result[group] += bias[number].float()
        return result.to(dtype)
    result = wide_left.new_zeros(left.shape[-2], right.shape[-1])
    for number, group in enumerate(groups):
        result[:, group] = wide_left[number] @ wide_right[:, group]
    return result.to(dtype)


@equivalent("aten::_scaled_grouped_mm")
def scaled_grouped_mm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    _result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    _fast: bool = False,
) -> Tensor:
    """Return grouped_mm of matrices whose rows and columns are scaled, and groups of rows."""
    if left.ndim != 2 or right.ndim != 3 or ends is None:  # noqa: PLR2004
        message = "only groups of rows are multiplied here"
        raise NotImplementedError(message)
    return grouped_mm(
        left.float() * left_scale[:, None],
        right.float() * right_scale[:, None, :],
        ends,
        bias,
        out_dtype or torch.bfloat16,
    )


@equivalent("aten::_convert_weight_to_int4pack")
def convert_weight_to_int4pack(weights: Tensor, inner_tiles: int) -> Tensor:
    """Return weights of four bits, eight a number, in the shape of CUDA's layout.

    Their order in it is our own: ``_weight_int4pack_mm`` alone reads it.
    """
    rows, half = weights.shape
    words = weights.contiguous().view(torch.int32)
    return words.reshape(rows // 8, half * 2 // (inner_tiles * 16), 32, inner_tiles // 2)


@equivalent("aten::_weight_int4pack_mm")
def weight_int4pack_mm(values: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    """Return the product of values and weights of four bits, scaled by groups of the inner size."""
    rows = packed.shape[0] * 8
    pairs = packed.contiguous().view(torch.uint8).reshape(rows, -1)
    numbers = torch.stack([pairs >> 4, pairs & 15], -1).reshape(rows, -1)
    factors = scales.float().repeat_interleave(group, 0)  # [inner, rows, (scale, zero)]
    weights = (numbers.T.float() - ZERO_OF_INT4) * factors[..., 0] + factors[..., 1]
    return (values.float() @ weights).to(values.dtype)
