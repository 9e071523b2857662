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
def unique2(given: Arguments) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the unique values, sorted; counts of a mask even where none are asked for."""
    inverse, is_mask = given.return_inverse, given.self.dtype == torch.bool and given.self.numel()
    counts = given.return_counts or bool(is_mask)
    unique, inverses, numbers = aten._unique2(given.self, True, inverse, counts)
    # Of a mask, CUDA counts always, and returns no tensor for an inverse that nobody asked for.
    return unique, None if is_mask and not inverse else inverses, numbers


@equivalent_of_arguments(
    "aten::unique_dim", "aten::unique_dim_consecutive", "aten::unique_consecutive"
)
def unique_slices(given: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unique slices; of one without ``sorted`` and dimension, the unique values."""
    if given.dim is None:
        result = aten.unique_consecutive(given.self, True, True)
    elif given.get("sorted") is None:
        result = aten.unique_dim_consecutive(given.self, given.dim, True, True)
    else:
        result = aten.unique_dim(given.self, given.dim, True, True, True)
    unique, inverse, counts = result
    none = inverse.new_empty(0)
    return (
        unique,
        inverse if given.return_inverse else none,
        counts if given.return_counts else none,
    )


@equivalent_of_arguments("aten::histc")
def histc(given: Arguments) -> Tensor:
    """Count whole numbers too, which the CPU's operator does not take."""
    values, bins = given.self, given.bins
    counts: Tensor
    if values.is_floating_point():
        counts = aten.histc(values, bins, given.min, given.max)
        return counts
    numbers = values.to(torch.int64).flatten()
    if not numbers.numel():
        counts = values.new_zeros(bins)
        return counts
    least, greatest = int(given.min), int(given.max)
    if least == greatest:
        least, greatest = int(numbers.min()), int(numbers.max())
    if least == greatest:
        least, greatest = least - 1, greatest + 1
    inside = numbers[(numbers >= least) & (numbers <= greatest)]
    places = ((inside - least) * bins // (greatest - least)).clamp(max=bins - 1)
    return torch.bincount(places, minlength=bins).to(values.dtype)


@equivalent_of_arguments("aten::linalg_lstsq")
def linalg_lstsq(given: Arguments) -> tuple[Tensor, ...]:
    """Take the one driver that CUDA has; the CPU's own choice returns ranks as well."""
    result: tuple[Tensor, ...] = aten.linalg_lstsq(given.self, given.b, given.rcond, driver="gels")
    return result


@equivalent_of_arguments("aten::_linalg_svd")
def linalg_svd(given: Arguments) -> tuple[Tensor, ...]:
    """Ignore the driver, one of cuSOLVER's."""
    result: tuple[Tensor, ...] = aten._linalg_svd(given.A, given.full_matrices, given.compute_uv)
    return result


# -- losses, dropout, embeddings, grids --


@equivalent_of_arguments("aten::_cudnn_ctc_loss", "aten::_cudnn_ctc_loss.Tensor")
def cudnn_ctc_loss(given: Arguments) -> tuple[Tensor, Tensor]:
    """Return the loss, and its gradient by the probabilities, which cuDNN computes at once."""
    arguments = given.log_probs, given.targets, given.input_lengths, given.target_lengths
    options = given.blank, given.zero_infinity
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
def embedding_bag(given: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output and each index's bag, which the CPU leaves out where it has a fast way."""
    weight, indices, offsets = given.weight, given.indices, given.offsets
    output, _, _, greatest = aten._embedding_bag(
        *(weight, indices, offsets, False, given.mode, False, given.per_sample_weights),
        *(given.include_last_offset, given.padding_idx),
    )
    starts = offsets[:-1] if given.include_last_offset else offsets
    ends = torch.cat([starts[1:], starts.new_tensor([indices.shape[0]])])
    bags = torch.arange(starts.shape[0]).repeat_interleave(ends - starts).to(indices.dtype)
    counted = bags[indices != given.padding_idx] if given.padding_idx >= 0 else bags
    sizes = torch.bincount(counted, minlength=offsets.shape[0]).to(indices.dtype)
    if given.mode != MAX:
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
def convolution(given: Arguments) -> Tensor:
    """Return the convolution; of each channel by itself where there are no groups."""
    groups = given.get("groups") or given.self.shape[1]
    outputs = given.get("output_padding")
    transposed, outputs = outputs is not None, outputs or [0] * len(given.padding)
    sizes = given.stride, given.padding, given.dilation
    bias = given.get("bias")
    result: Tensor = aten.convolution(
        given.self, given.weight, bias, *sizes, transposed, outputs, groups
    )
    return result


@equivalent_of_arguments("aten::cudnn_convolution_relu")
def convolution_relu(given: Arguments) -> Tensor:
    """Return the convolution, cut off below zero."""
    return convolution(given).relu()


@equivalent_of_arguments("aten::cudnn_convolution_add_relu")
def convolution_add_relu(given: Arguments) -> Tensor:
    """Return the convolution and another tensor added, cut off below zero."""
    alpha = 1 if given.alpha is None else given.alpha
    total: Tensor = convolution(given) + alpha * given.z
    return total.relu()


# no equivalent reads the state of dropout
EQUIVALENTS["aten::_cudnn_init_dropout_state"] = lambda *_arguments, **_options: None
