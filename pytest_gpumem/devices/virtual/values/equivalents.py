"""CPU equivalents of operators that only CUDA has, or whose outputs differ on CUDA.

Where PyTorch has a decomposition (torch._decomp) with CUDA's results, it is the equivalent.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch
from torch._decomp import decomposition_table

from pytest_gpumem.devices.virtual.values.operator_table import (
    EQUIVALENTS,
    equivalent,
    equivalent_of_arguments,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_gpumem.devices.virtual.values.operator_table import Arguments

aten: Final = torch.ops.aten
MAX: Final = 2
"""``mode`` of embedding_bag that returns the maximum of each bag"""


# -- unique: CUDA always sorts, and its outputs that were not requested are empty --


@equivalent_of_arguments("aten::_unique2")
def unique2(args: Arguments) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the sorted unique values, the inverse, and the counts; masks always have counts."""
    inverse, is_mask = args.return_inverse, args.self.dtype == torch.bool and args.self.numel()
    counts = args.return_counts or bool(is_mask)
    unique, inverses, numbers = aten._unique2(args.self, True, inverse, counts)
    # For a mask, CUDA always counts, and returns no tensor for an inverse that was not requested.
    return unique, None if is_mask and not inverse else inverses, numbers


@equivalent_of_arguments(
    "aten::unique_dim", "aten::unique_dim_consecutive", "aten::unique_consecutive"
)
def unique_slices(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unique slices along ``dim``; the unique values if ``dim`` is None."""
    if args.dim is None:
        result = aten.unique_consecutive(args.self, True, True)
    elif args.get("sorted") is None:
        result = aten.unique_dim_consecutive(args.self, args.dim, True, True)
    else:
        result = aten.unique_dim(args.self, args.dim, True, True, True)
    unique, inverse, counts = result
    none = inverse.new_empty(0)
    return (
        unique,
        inverse if args.return_inverse else none,
        counts if args.return_counts else none,
    )


@equivalent_of_arguments("aten::histc")
def histc(args: Arguments) -> Tensor:
    """Compute a histogram, also of integers, whose range CUDA rounds towards zero."""
    values = args.self
    if values.is_floating_point():
        counts: Tensor = aten.histc(values, args.bins, args.min, args.max)
        return counts
    counts = aten.histc(values.double(), args.bins, int(args.min), int(args.max))
    return counts.to(values.dtype)


# -- losses, dropout, embeddings, grids --


@equivalent_of_arguments("aten::_cudnn_ctc_loss", "aten::_cudnn_ctc_loss.Tensor")
def cudnn_ctc_loss(args: Arguments) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of ``log_probs``: cuDNN computes both in one call."""
    arguments = args.log_probs, args.targets, args.input_lengths, args.target_lengths
    options = args.blank, args.zero_infinity
    loss, alpha = aten._ctc_loss(*arguments, *options)
    gradient = aten._ctc_loss_backward(torch.ones_like(loss), *arguments, loss, alpha, *options)
    return loss, gradient


@equivalent_of_arguments("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return CUDA's outputs, with each index's bag, which the CPU's fast path leaves out."""
    weight, indices, offsets = args.weight, args.indices, args.offsets
    output, _, _, greatest = aten._embedding_bag(
        *(weight, indices, offsets, False, args.mode, False, args.per_sample_weights),
        *(args.include_last_offset, args.padding_idx),
    )
    starts = offsets[:-1] if args.include_last_offset else offsets
    ends = torch.cat([starts[1:], starts.new_tensor([indices.shape[0]])])
    bags = torch.arange(starts.shape[0]).repeat_interleave(ends - starts).to(indices.dtype)
    counted = bags[indices != args.padding_idx] if args.padding_idx >= 0 else bags
    sizes = torch.bincount(counted, minlength=offsets.shape[0]).to(indices.dtype)
    if args.mode != MAX:
        return output, bags, sizes, greatest.new_empty(0)
    return output, bags, sizes, greatest.reshape(starts.shape[0], weight.shape[1])


for name in ("_fused_dropout", "_fused_rms_norm_backward"):
    if hasattr(aten, name):  # torch before 2.9 has no _fused_rms_norm_backward
        EQUIVALENTS[f"aten::{name}"] = decomposition_table[getattr(aten, name).default]


ALIGNED: Final = True
"""value of ``align_corners`` for which PyTorch calls cuDNN's grid functions; these interpolate
linearly, with zeros outside of the input"""
EQUIVALENTS.update(
    {
        "aten::_masked_scale": lambda values, mask, scale: values * mask * scale,
        # CUDA's backward pass needs no buffer.
        "aten::log_sigmoid_forward": lambda values: (
            *(aten.log_sigmoid_forward(values)[0], values.new_empty(0)),
        ),
        "aten::log_sigmoid_backward": lambda gradient, values, _: gradient * (-values).sigmoid(),
        "aten::cudnn_grid_sampler": lambda values, grid: aten.grid_sampler_2d(
            values, grid, 0, 0, ALIGNED
        ),
        "aten::cudnn_grid_sampler_backward": lambda values, grid, gradient: (
            aten.grid_sampler_2d_backward(gradient, values, grid, 0, 0, ALIGNED, [True, True])
        ),
        "aten::cudnn_affine_grid_generator": lambda theta, *size: aten.affine_grid_generator(
            theta, list(size), ALIGNED
        ),
        "aten::cudnn_affine_grid_generator_backward": lambda gradient, *size: (
            aten.affine_grid_generator_backward(gradient, list(size), ALIGNED)
        ),
        # CUDA has one driver; the CPU's default driver returns ranks as well.
        "aten::linalg_lstsq": lambda values, b, rcond=None, **_: aten.linalg_lstsq(
            values, b, rcond, driver="gels"
        ),
        "aten::_linalg_svd": lambda values, full=False, compute_uv=True, **_: aten._linalg_svd(
            values, full, compute_uv
        ),  # ``driver`` is ignored: it names one of cuSOLVER's
        # No equivalent reads the state of dropout.
        "aten::_cudnn_init_dropout_state": lambda *_arguments, **_options: None,
    }
)


@equivalent_of_arguments(
    *("aten::cudnn_convolution", "aten::cudnn_convolution_transpose"),
    *("aten::_conv_depthwise2d", "aten::conv_depthwise3d"),
)
def convolution(args: Arguments) -> Tensor:
    """Return the convolution, which is depthwise if the operator has no argument ``groups``."""
    groups = args.get("groups") or args.self.shape[1]
    outputs = args.get("output_padding")
    transposed, outputs = outputs is not None, outputs or [0] * len(args.padding)
    sizes = args.stride, args.padding, args.dilation
    bias = args.get("bias")
    result: Tensor = aten.convolution(
        args.self, args.weight, bias, *sizes, transposed, outputs, groups
    )
    return result


equivalent_of_arguments("aten::cudnn_convolution_relu")(lambda args: convolution(args).relu())
equivalent_of_arguments("aten::cudnn_convolution_add_relu")(
    lambda args: (convolution(args) + (1 if args.alpha is None else args.alpha) * args.z).relu()
)


# -- matrix products: with other dtypes, scaled, grouped, of int4 --
#
# PyTorch's CPU kernels are missing in older versions (_scaled_mm in 2.6, _grouped_mm in 2.8), and
# do not accept scales of blocks, int4 weights of 8 rows, and other result types.


ZERO_OF_INT4 = 8
"""the int4 code of zero"""


@equivalent("aten::mm.dtype", "aten::mm.dtype_out", "aten::bmm.dtype", "aten::bmm.dtype_out")
def product(
    left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    """Return mm or bmm, accumulated and stored in another dtype."""
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
    """Return addmm or baddbmm, accumulated and stored in another dtype."""
    result = alpha * (left.to(dtype) @ right.to(dtype))
    if beta:
        result = result + beta * added.to(dtype)
    return result if out is None else out.resize_(result.shape).copy_(result)


def _factors(scale: Tensor, matrix: Tensor) -> Tensor:
    """Reshape scales of a whole matrix, its rows, columns or blocks to be multiplied with it."""
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
    """Return the product of two scaled 8-bit matrices, with a bias."""
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
    """Multiply groups of rows, of columns or of the inner dimension, which end at ``ends``."""
    dtype = out_dtype or left.dtype
    wide_left, wide_right = left.float(), right.float()
    if ends is None:
        result = wide_left @ wide_right
        return (result if bias is None else result + bias.float()[:, None]).to(dtype)
    bounds = [0, *ends.tolist()]
    groups = [slice(start, end) for start, end in pairwise(bounds)]
    if left.ndim == right.ndim:  # both have two dimensions: the inner one is grouped
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
    """Return grouped_mm of matrices with scaled rows and columns, grouped by rows."""
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
    """Pack int4 weights, eight per integer, in the shape of CUDA's layout.

    The order of the weights is our own: only ``_weight_int4pack_mm`` reads them.
    """
    rows, half = weights.shape
    words = weights.contiguous().view(torch.int32)
    return words.reshape(rows // 8, half * 2 // (inner_tiles * 16), 32, inner_tiles // 2)


@equivalent("aten::_weight_int4pack_mm")
def weight_int4pack_mm(values: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    """Return the product of values and int4 weights, scaled per group of the inner dimension."""
    rows = packed.shape[0] * 8
    pairs = packed.contiguous().view(torch.uint8).reshape(rows, -1)
    numbers = torch.stack([pairs >> 4, pairs & 15], -1).reshape(rows, -1)
    factors = scales.float().repeat_interleave(group, 0)  # [inner, rows, (scale, zero)]
    weights = (numbers.T.float() - ZERO_OF_INT4) * factors[..., 0] + factors[..., 1]
    return (values.float() @ weights).to(values.dtype)
