"""Equivalents for the CPU of operators that are CUDA's alone, or that have other outputs there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gpumem.devices.virtual.values import (
    attention,
    matrix_products,
    normalization,
    recurrent,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload


aten: Final = torch.ops.aten
MAX: Final = 2
"""embedding_bag's mode: the greatest of each bag"""


# -- unique: CUDA sorts always, and its outputs that nobody asked for are empty --


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


def unique_dim_consecutive(
    values: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``unique_dim_consecutive``."""
    result = aten.unique_dim_consecutive(values, dim, True, True)
    return _only_asked_for(result, inverse=return_inverse, counts=return_counts)


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


def linalg_lstsq(
    matrices: Tensor, right: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, ...]:
    """Take the one driver that CUDA has; the CPU's own choice returns ranks as well."""
    del driver
    result: tuple[Tensor, ...] = aten.linalg_lstsq(matrices, right, rcond, driver="gels")
    return result


def linalg_svd(
    matrices: Tensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[Tensor, ...]:
    """Ignore the driver, one of cuSOLVER's."""
    del driver
    result: tuple[Tensor, ...] = aten._linalg_svd(matrices, full_matrices, compute_uv)
    return result


# -- losses, dropout, embeddings, grids --


def cudnn_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | list[int],
    target_lengths: Tensor | list[int],
    blank: int,
    _deterministic: bool,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss, and its gradient by the probabilities, which cuDNN computes at once."""
    lengths = (input_lengths, target_lengths)
    arguments = (log_probs, targets, *lengths)
    loss, alpha = aten._ctc_loss(*arguments, blank, zero_infinity)
    gradient = aten._ctc_loss_backward(
        torch.ones_like(loss), *arguments, loss, alpha, blank, zero_infinity
    )
    return loss, gradient


def fused_dropout(
    values: Tensor, keep: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return the values that are kept, scaled, and their mask."""
    mask = torch.rand(values.shape, generator=generator) < keep
    return values * mask / keep, mask.to(torch.uint8)


def opaque(*_arguments: object, **_options: object) -> None:
    """Return nothing: no equivalent reads the operator's result."""


def masked_scale(values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the values that the mask leaves, scaled."""
    return values * mask * scale


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    _scale_grad: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output and each index's bag, which the CPU leaves out where it has a fast way."""
    starts = offsets[:-1] if include_last_offset else offsets
    output, _, _, greatest = aten._embedding_bag(
        weight,
        indices,
        offsets,
        False,
        mode,
        False,
        per_sample_weights,
        include_last_offset,
        padding_idx,
    )
    ends = torch.cat([starts[1:], starts.new_tensor([indices.shape[0]])])
    bags = torch.arange(starts.shape[0]).repeat_interleave(ends - starts).to(indices.dtype)
    counted = bags[indices != padding_idx] if padding_idx >= 0 else bags
    sizes = torch.bincount(counted, minlength=offsets.shape[0]).to(indices.dtype)
    shape = (starts.shape[0], weight.shape[1]) if mode == MAX else (0,)
    return output, bags, sizes, greatest.reshape(shape) if mode == MAX else greatest.new_empty(0)


def log_sigmoid_forward(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return no buffer: CUDA's backward pass takes none."""
    return aten.log_sigmoid_forward(values)[0], values.new_empty(0)


def log_sigmoid_backward(gradient: Tensor, values: Tensor, _buffer: Tensor) -> Tensor:
    """Return the results of ``log_sigmoid_backward``."""
    return gradient * (-values).sigmoid()


def grid_sampler(values: Tensor, grid: Tensor) -> Tensor:
    """Interpolate linearly, with zeros outside and aligned corners: all that cuDNN does."""
    result: Tensor = aten.grid_sampler_2d(values, grid, 0, 0, True)
    return result


def grid_sampler_backward(values: Tensor, grid: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the results of ``grid_sampler_backward``."""
    result: tuple[Tensor, ...] = aten.grid_sampler_2d_backward(
        gradient, values, grid, 0, 0, True, [True, True]
    )
    return result


def affine_grid(theta: Tensor, *size: int) -> Tensor:
    """Return the results of ``affine_grid``."""
    result: Tensor = aten.affine_grid_generator(theta, list(size), True)
    return result


def affine_grid_backward(gradient: Tensor, *size: int) -> Tensor:
    """Return the results of ``affine_grid_backward``."""
    result: Tensor = aten.affine_grid_generator_backward(gradient, list(size), True)
    return result


def convolution(
    values: Tensor,
    weight: Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_options: bool,
) -> Tensor:
    """Return the convolution, without a bias."""
    result: Tensor = aten.convolution(
        values, weight, None, stride, padding, dilation, False, [0] * len(padding), groups
    )
    return result


def convolution_transpose(
    values: Tensor,
    weight: Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_options: bool,
) -> Tensor:
    """Return the transposed convolution, without a bias."""
    result: Tensor = aten.convolution(
        values, weight, None, stride, padding, dilation, True, output_padding, groups
    )
    return result


def depthwise_convolution(
    values: Tensor,
    weight: Tensor,
    _kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """Return the convolution of each channel by itself."""
    groups, outputs = values.shape[1], [0] * len(padding)
    result: Tensor = aten.convolution(
        values, weight, bias, stride, padding, dilation, False, outputs, groups
    )
    return result


def convolution_relu(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Return the convolution, cut off below zero."""
    result: Tensor = aten.convolution(
        values, weight, bias, stride, padding, dilation, False, [0] * len(padding), groups
    )
    return result.relu()


def convolution_add_relu(
    values: Tensor,
    weight: Tensor,
    added: Tensor,
    alpha: float | None,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Return the convolution and another tensor added, cut off below zero."""
    result = aten.convolution(
        values, weight, bias, stride, padding, dilation, False, [0] * len(padding), groups
    )
    total: Tensor = result + (1 if alpha is None else alpha) * added
    return total.relu()


def into_out(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return an equivalent of batch normalisation that writes into ``out=`` tensors."""

    def written(
        *args: object, out: Tensor, save_mean: Tensor, save_invstd: Tensor
    ) -> tuple[Tensor, ...]:
        targets = out, save_mean, save_invstd
        for target, result in zip(targets, function(*args), strict=True):
            target.resize_(result.shape).copy_(result)
        return targets

    return written


EQUIVALENTS: Final[dict[OpOverload, Callable[..., Any]]] = {
    aten._unique2.default: unique2,
    aten.unique_dim.default: unique_dim,
    aten.unique_dim_consecutive.default: unique_dim_consecutive,
    aten.unique_consecutive.default: unique_consecutive,
    aten.histc.default: histc,
    aten.linalg_lstsq.default: linalg_lstsq,
    aten._linalg_svd.default: linalg_svd,
    aten._cudnn_ctc_loss.default: cudnn_ctc_loss,
    aten._cudnn_ctc_loss.Tensor: cudnn_ctc_loss,
    aten._cudnn_init_dropout_state.default: opaque,
    aten._fused_dropout.default: fused_dropout,
    aten._masked_scale.default: masked_scale,
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    aten.log_sigmoid_forward.default: log_sigmoid_forward,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
    aten.cudnn_grid_sampler.default: grid_sampler,
    aten.cudnn_grid_sampler_backward.default: grid_sampler_backward,
    aten.cudnn_affine_grid_generator.default: affine_grid,
    aten.cudnn_affine_grid_generator_backward.default: affine_grid_backward,
    aten.cudnn_convolution.default: convolution,
    aten.cudnn_convolution_transpose.default: convolution_transpose,
    aten._conv_depthwise2d.default: depthwise_convolution,
    aten.conv_depthwise3d.default: depthwise_convolution,
    aten.cudnn_convolution_relu.default: convolution_relu,
    aten.cudnn_convolution_add_relu.default: convolution_add_relu,
    # normalisation
    aten.native_batch_norm.default: normalization.batch_norm,
    aten._native_batch_norm_legit.default: normalization.batch_norm,
    aten._native_batch_norm_legit.no_stats: normalization.batch_norm_no_stats,
    aten.native_batch_norm.out: into_out(normalization.batch_norm),
    aten._native_batch_norm_legit.out: into_out(normalization.batch_norm),
    aten._native_batch_norm_legit.no_stats_out: into_out(normalization.batch_norm_no_stats),
    aten.native_batch_norm_backward.default: normalization.batch_norm_backward,
    aten.cudnn_batch_norm.default: normalization.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: normalization.cudnn_batch_norm_backward,
    aten._batch_norm_with_update.default: normalization.batch_norm_of(training=True),
    aten._batch_norm_no_update.default: normalization.batch_norm_of(training=False),
    aten.batch_norm_backward.default: normalization.batch_norm_backward,
    aten.batch_norm_stats.default: normalization.batch_norm_stats,
    aten.batch_norm_elemt.default: normalization.batch_norm_elemt,
    aten.batch_norm_gather_stats.default: normalization.batch_norm_gather_stats,
    aten.batch_norm_gather_stats_with_counts.default: (
        normalization.batch_norm_gather_stats_with_counts
    ),
    aten.batch_norm_backward_reduce.default: normalization.batch_norm_backward_reduce,
    aten.batch_norm_backward_elemt.default: normalization.batch_norm_backward_elemt,
    aten.native_layer_norm.default: normalization.layer_norm,
    aten.native_layer_norm_backward.default: normalization.layer_norm_backward,
    aten._softmax.default: normalization.softmax(aten._softmax),
    aten._softmax_backward_data.default: normalization.softmax_backward(
        aten._softmax_backward_data
    ),
    aten._log_softmax.default: normalization.softmax(aten._log_softmax),
    aten._log_softmax_backward_data.default: normalization.softmax_backward(
        aten._log_softmax_backward_data
    ),
    # attention
    aten._scaled_dot_product_flash_attention.default: attention.sdpa_flash,
    aten._scaled_dot_product_flash_attention_backward.default: attention.sdpa_flash_backward,
    aten._scaled_dot_product_efficient_attention.default: attention.sdpa_efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: (
        attention.sdpa_efficient_backward
    ),
    aten._scaled_dot_product_cudnn_attention.default: attention.sdpa_cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: attention.sdpa_cudnn_backward,
    aten._flash_attention_forward.default: attention.flash_forward,
    aten._flash_attention_backward.default: attention.flash_backward,
    aten._efficient_attention_forward.default: attention.efficient_forward,
    aten._efficient_attention_backward.default: attention.efficient_backward,
    # recurrent networks
    aten._cudnn_rnn.default: recurrent.cudnn_rnn,
    aten._cudnn_rnn_backward.default: recurrent.cudnn_rnn_backward,
    aten._thnn_fused_lstm_cell.default: recurrent.lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: recurrent.lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: recurrent.gru_cell,
    aten._thnn_fused_gru_cell_backward.default: recurrent.gru_cell_backward,
    # products of matrices
    aten._scaled_mm.default: matrix_products.scaled_mm,
    aten._scaled_mm.out: matrix_products.scaled_mm,
    aten._convert_weight_to_int4pack.default: matrix_products.convert_weight_to_int4pack,
    aten._weight_int4pack_mm.default: matrix_products.weight_int4pack_mm,
}
"""a function of the operator's arguments as CPU tensors: it returns the CUDA operator's results"""

NEWER: Final[dict[str, Callable[..., Any]]] = {
    "_cudnn_attention_forward.default": attention.cudnn_forward,
    "_cudnn_attention_backward.default": attention.cudnn_backward,
    "_fused_rms_norm.default": normalization.rms_norm,
    "_fused_rms_norm_backward.default": normalization.rms_norm_backward,
    "mm.dtype": matrix_products.product,
    "mm.dtype_out": matrix_products.product,
    "bmm.dtype": matrix_products.product,
    "bmm.dtype_out": matrix_products.product,
    "addmm.dtype": matrix_products.added_product,
    "addmm.dtype_out": matrix_products.added_product,
    "baddbmm.dtype": matrix_products.added_product,
    "baddbmm.dtype_out": matrix_products.added_product,
    "_grouped_mm.default": matrix_products.grouped_mm,
    "_scaled_grouped_mm.default": matrix_products.scaled_grouped_mm,
}
"""those of operators that torch 2.6, the oldest supported one, does not have"""

for _name, _equivalent in NEWER.items():
    _packet, _, _overload = _name.partition(".")
    if hasattr(aten, _packet) and hasattr(getattr(aten, _packet), _overload):
        EQUIVALENTS[getattr(getattr(aten, _packet), _overload)] = _equivalent
