"""Equivalents of normalisations: cuDNN's, and those with results of another form or type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

aten: Final = torch.ops.aten

LOW: Final = (torch.float16, torch.bfloat16)


def _wide(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor of at least single precision, in which a GPU computes."""
    return tensor.float() if tensor is not None and tensor.dtype in LOW else tensor


def _stored(tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or like is None else tensor.to(like.dtype)


def batch_norm(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the mean and inverse deviation that CUDA keeps, of evaluation too."""
    mean, var = _wide(running_mean), _wide(running_var)
    parts = (_wide(values), _wide(weight), _wide(bias), mean, var)
    output, kept_mean, kept_scale = aten.native_batch_norm(*parts, training, momentum, eps)
    for running, updated in ((running_mean, mean), (running_var, var)):
        if running is not None and updated is not None and updated is not running:
            running.copy_(updated)
    if not training and mean is not None and var is not None:
        kept_mean, kept_scale = mean.clone(), (var + eps).rsqrt()
    return output.to(values.dtype), kept_mean, kept_scale


def cudnn_batch_norm(*arguments: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - the operator's
    """Return batch_norm's results; of cuDNN's reserve space nothing is needed."""
    return *batch_norm(*arguments), None


def batch_norm_backward(
    gradient: Tensor,
    values: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_scale: Tensor | None,
    training: bool,
    eps: float,
    mask: Sequence[bool] = (True, True, True),
    _reserve: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of batch_norm's input, weight and bias."""
    tensors = (gradient, values, weight, running_mean, running_var, save_mean, save_scale)
    results = aten.native_batch_norm_backward(*map(_wide, tensors), training, eps, list(mask))
    by_values, by_weight, by_bias = results
    return (_stored(by_values, values), _stored(by_weight, weight), _stored(by_bias, weight))


def cudnn_batch_norm_backward(
    values: Tensor,
    gradient: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_scale: Tensor | None,
    eps: float,
    _reserve: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of batch_norm's input, weight and bias, of training."""
    return batch_norm_backward(
        gradient, values, weight, running_mean, running_var, save_mean, save_scale, True, eps
    )


def batch_norm_of(*, training: bool) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the operator of training or of evaluation alone: its results have a reserve space."""

    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - the operator's
        completed = (*arguments[:5], training, *arguments[5:])
        return *batch_norm(*completed), None

    return forward


def batch_norm_no_stats(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return batch_norm's results where no running statistics are kept."""
    return batch_norm(values, weight, bias, None, None, training, momentum, eps)


# -- synchronised batch normalisation: statistics, their union, the element-wise parts --


def _over_channels(values: Tensor) -> tuple[int, ...]:
    return (0, *range(2, values.ndim))


def _shaped(statistic: Tensor, values: Tensor) -> Tensor:
    return statistic.reshape(1, -1, *[1] * (values.ndim - 2))


def batch_norm_stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean and the inverse deviation of each channel."""
    var, mean = torch.var_mean(values.float(), _over_channels(values), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_elemt(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    _eps: float,
) -> Tensor:
    """Return the normalised values."""
    result = (values.float() - _shaped(mean, values)) * _shaped(scale, values)
    if weight is not None:
        result = result * _shaped(weight.float(), values)
    if bias is not None:
        result = result + _shaped(bias.float(), values)
    return result.to(values.dtype)


def batch_norm_gather_stats_with_counts(
    _values: Tensor,
    mean: Tensor,
    scale: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the mean and inverse deviation of all ranks; update the running ones."""
    share = counts.float().reshape(-1, 1) / counts.sum()
    whole = (mean * share).sum(0)
    square = ((scale.pow(-2) - eps + mean.square()) * share).sum(0)
    var = square - whole.square()
    total = counts.sum()
    if running_mean is not None:
        running_mean.lerp_(whole.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((var * total / (total - 1)).to(running_var.dtype), momentum)
    return whole, (var + eps).rsqrt()


def batch_norm_gather_stats(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - the operator's
    """Return the mean and inverse deviation of ranks with as many values each."""
    means, count = arguments[1], arguments[-1]
    counted = (*arguments[:-1], torch.full((means.shape[0],), float(count)))
    return batch_norm_gather_stats_with_counts(*counted)


def batch_norm_backward_reduce(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """Return the sums that each rank gives to all: of gradients, and with the values."""
    dims = _over_channels(values)
    sums = gradient.float().sum(dims)
    centred = (gradient.float() * (values.float() - _shaped(mean, values))).sum(dims)
    return (
        sums if input_g else None,
        centred if input_g else None,
        _stored(centred * scale, weight) if weight_g else None,
        _stored(sums, weight) if bias_g else None,
    )


def batch_norm_backward_elemt(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    centred: Tensor,
    count: Tensor,
) -> Tensor:
    """Return the gradient of the values, from the sums of all ranks."""
    total = count.sum()
    factor = scale if weight is None else scale * weight.float()
    inner = (values.float() - _shaped(mean, values)) * _shaped(
        centred * scale.square() / total, values
    )
    result = gradient.float() - _shaped(sums / total, values) - inner
    return (result * _shaped(factor, values)).to(values.dtype)


# -- layer, group and root-mean-square normalisation --


def layer_norm(
    values: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and mean and inverse deviation in single precision, as CUDA keeps them."""
    output, mean, scale = aten.native_layer_norm(
        _wide(values), shape, _wide(weight), _wide(bias), eps
    )
    return output.to(values.dtype), mean, scale


def layer_norm_backward(
    gradient: Tensor,
    values: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of layer_norm's input, weight and bias."""
    results = aten.native_layer_norm_backward(
        _wide(gradient), _wide(values), shape, mean, scale, _wide(weight), _wide(bias), list(mask)
    )
    return tuple(map(_stored, results, (values, weight, bias)))


def rms_norm(
    values: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output, and the inverse root mean square."""
    dims = tuple(range(-len(shape), 0))
    wide = values if values.dtype == torch.float64 else values.float()
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    scale = (wide.square().mean(dims, keepdim=True) + least).rsqrt()
    output = wide * scale
    if weight is not None:
        output = output * weight.to(output.dtype)
    return output.to(values.dtype), scale


def rms_norm_backward(
    gradient: Tensor,
    values: Tensor,
    shape: Sequence[int],
    scale: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of rms_norm's input and weight."""
    dims = tuple(range(-len(shape), 0))
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    normal, incoming = values.to(wide) * scale, gradient.to(wide)
    through = incoming if weight is None else incoming * weight.to(wide)
    by_values = scale * (through - normal * (through * normal).mean(dims, keepdim=True))
    by_weight = (incoming * normal).reshape(-1, *shape).sum(0)
    return (
        by_values.to(values.dtype) if mask[0] else None,
        by_weight.to(weight.dtype) if mask[1] and weight is not None else None,
    )


def softmax(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``_softmax`` or ``_log_softmax`` with half made single in it: the CPU's does not."""

    def forward(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
        return operator(values.float() if half_to_float else values, dim, False)

    return forward


def softmax_backward(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the operator's backward with its gradient in the type of the forward's input."""

    def backward(gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        return operator(gradient, output, dim, gradient.dtype).to(input_dtype)

    return backward
