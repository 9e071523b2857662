"""Equivalents for the CPU of operators that are CUDA's alone, or that have other outputs there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

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
"""embedding_bag's mode: the greatest of each bag"""


# -- unique: CUDA sorts always, and its outputs that nobody asked for are empty --


@equivalent_of_arguments("aten::_unique2")
def unique2(args: Arguments) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the unique values, sorted; counts of a mask even where none are asked for."""
    inverse, is_mask = args.return_inverse, args.self.dtype == torch.bool and args.self.numel()
    counts = args.return_counts or bool(is_mask)
    unique, inverses, numbers = aten._unique2(args.self, True, inverse, counts)
    # Of a mask, CUDA counts always, and returns no tensor for an inverse that nobody asked for.
    return unique, None if is_mask and not inverse else inverses, numbers


@equivalent_of_arguments(
    "aten::unique_dim", "aten::unique_dim_consecutive", "aten::unique_consecutive"
)
def unique_slices(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unique slices; of one without ``sorted`` and dimension, the unique values."""
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
    """Count whole numbers too, which the CPU's operator does not take."""
    values, bins = args.self, args.bins
    counts: Tensor
    if values.is_floating_point():
        counts = aten.histc(values, bins, args.min, args.max)
        return counts
    numbers = values.to(torch.int64).flatten()
    if not numbers.numel():
        counts = values.new_zeros(bins)
        return counts
    least, greatest = int(args.min), int(args.max)
    if least == greatest:
        least, greatest = int(numbers.min()), int(numbers.max())
    if least == greatest:
        least, greatest = least - 1, greatest + 1
    inside = numbers[(numbers >= least) & (numbers <= greatest)]
    places = ((inside - least) * bins // (greatest - least)).clamp(max=bins - 1)
    return torch.bincount(places, minlength=bins).to(values.dtype)


@equivalent_of_arguments("aten::linalg_lstsq")
def linalg_lstsq(args: Arguments) -> tuple[Tensor, ...]:
    """Take the one driver that CUDA has; the CPU's own choice returns ranks as well."""
    result: tuple[Tensor, ...] = aten.linalg_lstsq(args.self, args.b, args.rcond, driver="gels")
    return result


@equivalent_of_arguments("aten::_linalg_svd")
def linalg_svd(args: Arguments) -> tuple[Tensor, ...]:
    """Ignore the driver, one of cuSOLVER's."""
    result: tuple[Tensor, ...] = aten._linalg_svd(args.A, args.full_matrices, args.compute_uv)
    return result


# -- losses, dropout, embeddings, grids --


@equivalent_of_arguments("aten::_cudnn_ctc_loss", "aten::_cudnn_ctc_loss.Tensor")
def cudnn_ctc_loss(args: Arguments) -> tuple[Tensor, Tensor]:
    """Return the loss, and its gradient by the probabilities, which cuDNN computes at once."""
    arguments = args.log_probs, args.targets, args.input_lengths, args.target_lengths
    options = args.blank, args.zero_infinity
    loss, alpha = aten._ctc_loss(*arguments, *options)
    gradient = aten._ctc_loss_backward(torch.ones_like(loss), *arguments, loss, alpha, *options)
    return loss, gradient


@equivalent("aten::_fused_dropout")
def fused_dropout(
    values: Tensor, keep: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return the values that are kept, scaled, and their mask."""
    mask = torch.rand(values.shape, generator=generator) < keep
    return values * mask / keep, mask.to(torch.uint8)


@equivalent("aten::_masked_scale")
def masked_scale(values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the values that the mask leaves, scaled."""
    return values * mask * scale


@equivalent_of_arguments("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output and each index's bag, which the CPU leaves out where it has a fast way."""
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


@equivalent("aten::log_sigmoid_forward")
def log_sigmoid_forward(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return no buffer: CUDA's backward pass takes none."""
    return aten.log_sigmoid_forward(values)[0], values.new_empty(0)


@equivalent("aten::log_sigmoid_backward")
def log_sigmoid_backward(gradient: Tensor, values: Tensor, _buffer: Tensor) -> Tensor:
    """Return the results of ``log_sigmoid_backward``."""
    return gradient * (-values).sigmoid()


@equivalent("aten::cudnn_grid_sampler")
def grid_sampler(values: Tensor, grid: Tensor) -> Tensor:
    """Interpolate linearly, with zeros outside and aligned corners: all that cuDNN does."""
    result: Tensor = aten.grid_sampler_2d(values, grid, 0, 0, True)
    return result


@equivalent("aten::cudnn_grid_sampler_backward")
def grid_sampler_backward(values: Tensor, grid: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the results of ``grid_sampler_backward``."""
    result: tuple[Tensor, ...] = aten.grid_sampler_2d_backward(
        gradient, values, grid, 0, 0, True, [True, True]
    )
    return result


@equivalent("aten::cudnn_affine_grid_generator")
def affine_grid(theta: Tensor, *size: int) -> Tensor:
    """Return the results of ``affine_grid``."""
    result: Tensor = aten.affine_grid_generator(theta, list(size), True)
    return result


@equivalent("aten::cudnn_affine_grid_generator_backward")
def affine_grid_backward(gradient: Tensor, *size: int) -> Tensor:
    """Return the results of ``affine_grid_backward``."""
    result: Tensor = aten.affine_grid_generator_backward(gradient, list(size), True)
    return result


@equivalent_of_arguments(
    *("aten::cudnn_convolution", "aten::cudnn_convolution_transpose"),
    *("aten::_conv_depthwise2d", "aten::conv_depthwise3d"),
)
def convolution(args: Arguments) -> Tensor:
    """Return the convolution; of each channel by itself where there are no groups."""
    groups = args.get("groups") or args.self.shape[1]
    outputs = args.get("output_padding")
    transposed, outputs = outputs is not None, outputs or [0] * len(args.padding)
    sizes = args.stride, args.padding, args.dilation
    bias = args.get("bias")
    result: Tensor = aten.convolution(
        args.self, args.weight, bias, *sizes, transposed, outputs, groups
    )
    return result


@equivalent_of_arguments("aten::cudnn_convolution_relu")
def convolution_relu(args: Arguments) -> Tensor:
    """Return the convolution, cut off below zero."""
    return convolution(args).relu()


@equivalent_of_arguments("aten::cudnn_convolution_add_relu")
def convolution_add_relu(args: Arguments) -> Tensor:
    """Return the convolution and another tensor added, cut off below zero."""
    alpha = 1 if args.alpha is None else args.alpha
    total: Tensor = convolution(args) + alpha * args.z
    return total.relu()


# no equivalent reads the state of dropout
EQUIVALENTS["aten::_cudnn_init_dropout_state"] = lambda *_arguments, **_options: None
