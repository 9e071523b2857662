"""Equivalents of normalisations: cuDNN's, and those with results of another form or type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from pytest_gpumem.devices.virtual.values.operator_table import (
    EQUIVALENTS,
    equivalent,
    equivalent_of_arguments,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pytest_gpumem.devices.virtual.values.operator_table import Arguments

aten: Final = torch.ops.aten

LOW: Final = (torch.float16, torch.bfloat16)


def _wide(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor of at least single precision, in which a GPU computes."""
    return tensor.float() if tensor is not None and tensor.dtype in LOW else tensor


def _stored(tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or like is None else tensor.to(like.dtype)


def _batch_norm(
    given: Arguments, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the mean and inverse deviation that CUDA keeps, of evaluation too."""
    values, running = given.input, (given.get("running_mean"), given.get("running_var"))
    mean, var = map(_wide, running)
    parts = (_wide(values), _wide(given.weight), _wide(given.bias), mean, var)
    output, kept_mean, kept_scale = aten.native_batch_norm(*parts, training, momentum, eps)
    for statistic, updated in zip(running, (mean, var), strict=True):
        if statistic is not None and updated is not None and updated is not statistic:
            statistic.copy_(updated)
    if not training and mean is not None and var is not None:
        kept_mean, kept_scale = mean.clone(), (var + eps).rsqrt()
    return output.to(values.dtype), kept_mean, kept_scale


@equivalent_of_arguments(
    "aten::native_batch_norm",
    "aten::native_batch_norm.out",
    *(
        f"aten::_native_batch_norm_legit{kind}"
        for kind in ("", ".out", ".no_stats", ".no_stats_out")
    ),
)
def batch_norm(given: Arguments) -> tuple[Tensor, ...]:
    """Return the results; with ``out=``, in these tensors."""
    results = _batch_norm(given, given.training, given.momentum, given.eps)
    if given.get("out") is None:
        return results
    targets = given.out, given.save_mean, given.save_invstd
    for target, result in zip(targets, results, strict=True):
        target.resize_(result.shape).copy_(result)
    return targets


@equivalent_of_arguments("aten::cudnn_batch_norm")
def cudnn_batch_norm(given: Arguments) -> tuple[Tensor | None, ...]:
    """Return the results; of cuDNN's reserve space nothing is needed."""
    momentum = given.exponential_average_factor
    return *_batch_norm(given, given.training, momentum, given.epsilon), None


@equivalent_of_arguments("aten::_batch_norm_with_update")
def batch_norm_with_update(given: Arguments) -> tuple[Tensor | None, ...]:
    """Return the results of training, with a reserve space."""
    return *_batch_norm(given, True, given.momentum, given.eps), None


@equivalent_of_arguments("aten::_batch_norm_no_update")
def batch_norm_no_update(given: Arguments) -> tuple[Tensor | None, ...]:
    """Return the results of evaluation, with a reserve space."""
    return *_batch_norm(given, False, given.momentum, given.eps), None


def _batch_norm_backward(
    given: Arguments, gradient: Tensor, scale: Tensor, training: bool, eps: float
) -> tuple[Tensor | None, ...]:
    """Return the gradients of batch_norm's input, weight and bias."""
    values, weight = given.input, given.weight
    running = given.running_mean, given.running_var
    tensors = map(_wide, (gradient, values, weight, *running, given.save_mean, scale))
    mask = [*(given.get("output_mask") or (True, True, True))]
    results = aten.native_batch_norm_backward(*tensors, training, eps, mask)
    return tuple(map(_stored, results, (values, weight, weight)))


@equivalent_of_arguments("aten::native_batch_norm_backward")
def native_batch_norm_backward(given: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias."""
    return _batch_norm_backward(given, given.grad_out, given.save_invstd, given.train, given.eps)


@equivalent_of_arguments("aten::batch_norm_backward")
def batch_norm_backward(given: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias."""
    return _batch_norm_backward(given, given.grad_out, given.save_var, given.update, given.eps)


@equivalent_of_arguments("aten::cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(given: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, of training."""
    return _batch_norm_backward(given, given.grad_output, given.save_var, True, given.epsilon)


# -- synchronised batch normalisation: statistics, their union, the element-wise parts --


def _over_channels(values: Tensor) -> tuple[int, ...]:
    return (0, *range(2, values.ndim))


def _shaped(statistic: Tensor, values: Tensor) -> Tensor:
    return statistic.reshape(1, -1, *[1] * (values.ndim - 2))


@equivalent("aten::batch_norm_stats")
def batch_norm_stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean and the inverse deviation of each channel."""
    var, mean = torch.var_mean(values.float(), _over_channels(values), correction=0)
    return mean, (var + eps).rsqrt()


@equivalent_of_arguments("aten::batch_norm_elemt")
def batch_norm_elemt(given: Arguments) -> Tensor:
    """Return the normalised values."""
    values: Tensor = given.input
    result = (values.float() - _shaped(given.mean, values)) * _shaped(given.invstd, values)
    if given.weight is not None:
        result = result * _shaped(given.weight.float(), values)
    if given.bias is not None:
        result = result + _shaped(given.bias.float(), values)
    return result.to(values.dtype)


@equivalent_of_arguments(
    "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"
)
def batch_norm_gather_stats(given: Arguments) -> tuple[Tensor, Tensor]:
    """Return the mean and inverse deviation of all ranks; update the running ones."""
    means: Tensor = given.mean
    counts = given.get("counts")
    if counts is None:  # each rank has as many values
        counts = torch.full((means.shape[0],), float(given.count))
    total = counts.sum()
    share = counts.float().reshape(-1, 1) / total
    whole = (means * share).sum(0)
    square = ((given.invstd.pow(-2) - given.eps + means.square()) * share).sum(0)
    var = square - whole.square()
    for running, update in (
        (given.running_mean, whole),
        (given.running_var, var * total / (total - 1)),
    ):
        if running is not None:
            running.lerp_(update.to(running.dtype), given.momentum)
    return whole, (var + given.eps).rsqrt()


@equivalent_of_arguments("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(given: Arguments) -> tuple[Tensor | None, ...]:
    """Return the sums that each rank gives to all: of gradients, and with the values."""
    gradient, values, weight = given.grad_out.float(), given.input, given.weight
    dims = _over_channels(values)
    sums = gradient.sum(dims)
    centred = (gradient * (values.float() - _shaped(given.mean, values))).sum(dims)
    return (
        sums if given.input_g else None,
        centred if given.input_g else None,
        _stored(centred * given.invstd, weight) if given.weight_g else None,
        _stored(sums, weight) if given.bias_g else None,
    )


@equivalent_of_arguments("aten::batch_norm_backward_elemt")
def batch_norm_backward_elemt(given: Arguments) -> Tensor:
    """Return the gradient of the values, from the sums of all ranks."""
    values, scale, total = given.input, given.invstd, given.count.sum()
    factor = scale if given.weight is None else scale * given.weight.float()
    slope = given.sum_dy_xmu * scale.square() / total
    inner = (values.float() - _shaped(given.mean, values)) * _shaped(slope, values)
    result = given.grad_out.float() - _shaped(given.sum_dy / total, values) - inner
    gradient: Tensor = result * _shaped(factor, values)
    return gradient.to(values.dtype)


# -- layer, group and root-mean-square normalisation --


@equivalent("aten::native_layer_norm")
def layer_norm(
    values: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and mean and inverse deviation in single precision, as CUDA keeps them."""
    output, mean, scale = aten.native_layer_norm(
        _wide(values), shape, _wide(weight), _wide(bias), eps
    )
    return output.to(values.dtype), mean, scale


@equivalent_of_arguments("aten::native_layer_norm_backward")
def layer_norm_backward(given: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of layer_norm's input, weight and bias."""
    stored = given.input, given.weight, given.bias
    gradient, values, weight, bias = map(_wide, (given.grad_out, *stored))
    parts = gradient, values, given.normalized_shape, given.mean, given.rstd, weight, bias
    results = aten.native_layer_norm_backward(*parts, [*given.output_mask])
    return tuple(map(_stored, results, stored))


@equivalent("aten::_fused_rms_norm")
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


@equivalent_of_arguments("aten::_fused_rms_norm_backward")
def rms_norm_backward(given: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of rms_norm's input and weight."""
    values, shape, weight, scale = given.input, given.normalized_shape, given.weight, given.rstd
    dims = tuple(range(-len(shape), 0))
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    normal, incoming = values.to(wide) * scale, given.grad_out.to(wide)
    through = incoming if weight is None else incoming * weight.to(wide)
    by_values = scale * (through - normal * (through * normal).mean(dims, keepdim=True))
    by_weight = (incoming * normal).reshape(-1, *shape).sum(0)
    return (
        by_values.to(values.dtype) if given.output_mask[0] else None,
        by_weight.to(weight.dtype) if given.output_mask[1] and weight is not None else None,
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


EQUIVALENTS.update(
    {
        "aten::_softmax": softmax(aten._softmax),
        "aten::_log_softmax": softmax(aten._log_softmax),
        "aten::_softmax_backward_data": softmax_backward(aten._softmax_backward_data),
        "aten::_log_softmax_backward_data": softmax_backward(aten._log_softmax_backward_data),
    }
)
