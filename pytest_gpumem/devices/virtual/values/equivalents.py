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


@equivalent("aten::_unique2")
def unique2(
    values: Tensor, _sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the unique values, sorted; counts of a mask even where none are asked for."""
    is_mask = values.dtype == torch.bool and values.numel() > 0
    unique, inverse, counts = aten._unique2(values, True, return_inverse, return_counts or is_mask)
    # Of a mask, CUDA counts always, and returns no tensor for an inverse that nobody asked for.
    return unique, None if is_mask and not return_inverse else inverse, counts


def _only_asked_for(
    result: tuple[Tensor, Tensor, Tensor], *, inverse: bool, counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    unique, inverse_indices, numbers = result
    none = inverse_indices.new_empty(0)
    return unique, inverse_indices if inverse else none, numbers if counts else none


@equivalent("aten::unique_dim")
def unique_dim(
    values: Tensor,
    dim: int,
    _sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``unique_dim``."""
    result = aten.unique_dim(values, dim, True, True, True)
    return _only_asked_for(result, inverse=return_inverse, counts=return_counts)


@equivalent("aten::unique_dim_consecutive")
def unique_dim_consecutive(
    values: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``unique_dim_consecutive``."""
    result = aten.unique_dim_consecutive(values, dim, True, True)
    return _only_asked_for(result, inverse=return_inverse, counts=return_counts)


@equivalent("aten::unique_consecutive")
def unique_consecutive(
    values: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``unique_consecutive``."""
    if dim is not None:
        return unique_dim_consecutive(values, dim, return_inverse, return_counts)
    result = aten.unique_consecutive(values, True, True)
    return _only_asked_for(result, inverse=return_inverse, counts=return_counts)


@equivalent("aten::histc")
def histc(
    values: Tensor, bins: int = 100, low: float = 0, high: float = 0, **_options: object
) -> Tensor:
    """Count whole numbers too, which the CPU's operator does not take."""
    if values.is_floating_point():
        counts: Tensor = aten.histc(values, bins, low, high)
        return counts
    numbers = values.to(torch.int64).flatten()
    if not numbers.numel():
        return values.new_zeros(bins)
    least, greatest = int(low), int(high)
    if least == greatest:
        least, greatest = int(numbers.min()), int(numbers.max())
    if least == greatest:
        least, greatest = least - 1, greatest + 1
    inside = numbers[(numbers >= least) & (numbers <= greatest)]
    places = ((inside - least) * bins // (greatest - least)).clamp(max=bins - 1)
    return torch.bincount(places, minlength=bins).to(values.dtype)


@equivalent("aten::linalg_lstsq")
def linalg_lstsq(
    matrices: Tensor, right: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, ...]:
    """Take the one driver that CUDA has; the CPU's own choice returns ranks as well."""
    del driver
    result: tuple[Tensor, ...] = aten.linalg_lstsq(matrices, right, rcond, driver="gels")
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
