"""CPU equivalents of normalizations that are cuDNN's, or whose results differ on CUDA.

They call the CPU's kernels, because PyTorch's decompositions (torch._decomp) return no statistics
in evaluation, return statistics in half precision, and do not accept all types that CUDA accepts.
Synchronized batch normalization is written out: it has neither a CPU kernel nor a decomposition.
"""

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
    """Return a tensor in at least single precision, in which a GPU computes."""
    return tensor.float() if tensor is not None and tensor.dtype in LOW else tensor


def _stored(tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or like is None else tensor.to(like.dtype)


def _batch_norm(
    args: Arguments, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the mean and inverse deviation that CUDA saves, also in evaluation."""
    values, running = args.input, (args.get("running_mean"), args.get("running_var"))
    mean, var = map(_wide, running)
    parts = (_wide(values), _wide(args.weight), _wide(args.bias), mean, var)
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
def batch_norm(args: Arguments) -> tuple[Tensor, ...]:
    """Return the results, in the tensors of ``out=`` if the operator has them."""
    results = _batch_norm(args, args.training, args.momentum, args.eps)
    if args.get("out") is None:
        return results
    targets = args.out, args.save_mean, args.save_invstd
    for target, result in zip(targets, results, strict=True):
        target.resize_(result.shape).copy_(result)
    return targets


# The next three return no reserve space: the equivalents of their backward passes do not read it.
equivalent_of_arguments("aten::cudnn_batch_norm")(
    lambda args: (
        *_batch_norm(args, args.training, args.exponential_average_factor, args.epsilon),
        None,
    )
)
equivalent_of_arguments("aten::_batch_norm_with_update")(
    lambda args: (*_batch_norm(args, True, args.momentum, args.eps), None)
)
equivalent_of_arguments("aten::_batch_norm_no_update")(
    lambda args: (*_batch_norm(args, False, args.momentum, args.eps), None)
)


def _batch_norm_backward(
    args: Arguments, gradient: Tensor, scale: Tensor, training: bool, eps: float
) -> tuple[Tensor | None, ...]:
    """Return the gradients of batch_norm's input, weight and bias."""
    values, weight = args.input, args.weight
    running = args.running_mean, args.running_var
    tensors = map(_wide, (gradient, values, weight, *running, args.save_mean, scale))
    mask = [*(args.get("output_mask") or (True, True, True))]
    results = aten.native_batch_norm_backward(*tensors, training, eps, mask)
    return tuple(map(_stored, results, (values, weight, weight)))


equivalent_of_arguments("aten::native_batch_norm_backward")(
    lambda args: _batch_norm_backward(args, args.grad_out, args.save_invstd, args.train, args.eps)
)
equivalent_of_arguments("aten::batch_norm_backward")(
    lambda args: _batch_norm_backward(args, args.grad_out, args.save_var, args.update, args.eps)
)
equivalent_of_arguments("aten::cudnn_batch_norm_backward")(
    lambda args: _batch_norm_backward(args, args.grad_output, args.save_var, True, args.epsilon)
)


# -- synchronized batch normalization: statistics, their combination, the element-wise parts --


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
def batch_norm_elemt(args: Arguments) -> Tensor:
    """Return the normalized values."""
    values: Tensor = args.input
    result = (values.float() - _shaped(args.mean, values)) * _shaped(args.invstd, values)
    if args.weight is not None:
        result = result * _shaped(args.weight.float(), values)
    if args.bias is not None:
        result = result + _shaped(args.bias.float(), values)
    return result.to(values.dtype)


@equivalent_of_arguments(
    "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"
)
def batch_norm_gather_stats(args: Arguments) -> tuple[Tensor, Tensor]:
    """Return mean and inverse deviation over all ranks; update the running statistics."""
    means: Tensor = args.mean
    counts = args.get("counts")
    if counts is None:  # all ranks have the same number of values
        counts = torch.full((means.shape[0],), float(args.count))
    total = counts.sum()
    share = counts.float().reshape(-1, 1) / total
    whole = (means * share).sum(0)
    square = ((args.invstd.pow(-2) - args.eps + means.square()) * share).sum(0)
    var = square - whole.square()
    for running, update in (
        (args.running_mean, whole),
        (args.running_var, var * total / (total - 1)),
    ):
        if running is not None:
            running.lerp_(update.to(running.dtype), args.momentum)
    return whole, (var + args.eps).rsqrt()


@equivalent_of_arguments("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(args: Arguments) -> tuple[Tensor | None, ...]:
    """Return the sums that ranks exchange, and the gradients of weight and bias."""
    gradient, values, weight = args.grad_out.float(), args.input, args.weight
    dims = _over_channels(values)
    sums = gradient.sum(dims)
    centred = (gradient * (values.float() - _shaped(args.mean, values))).sum(dims)
    return (
        sums if args.input_g else None,
        centred if args.input_g else None,
        _stored(centred * args.invstd, weight) if args.weight_g else None,
        _stored(sums, weight) if args.bias_g else None,
    )


@equivalent_of_arguments("aten::batch_norm_backward_elemt")
def batch_norm_backward_elemt(args: Arguments) -> Tensor:
    """Return the gradient of the values from the sums over all ranks."""
    values, scale, total = args.input, args.invstd, args.count.sum()
    factor = scale if args.weight is None else scale * args.weight.float()
    slope = args.sum_dy_xmu * scale.square() / total
    inner = (values.float() - _shaped(args.mean, values)) * _shaped(slope, values)
    result = args.grad_out.float() - _shaped(args.sum_dy / total, values) - inner
    gradient: Tensor = result * _shaped(factor, values)
    return gradient.to(values.dtype)


# -- layer normalization, softmax --


@equivalent("aten::native_layer_norm")
def layer_norm(
    values: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and mean and reciprocal deviation in at least single precision."""
    output, mean, scale = aten.native_layer_norm(
        _wide(values), shape, _wide(weight), _wide(bias), eps
    )
    return output.to(values.dtype), mean, scale


@equivalent_of_arguments("aten::native_layer_norm_backward")
def layer_norm_backward(args: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of layer_norm's input, weight and bias."""
    stored = args.input, args.weight, args.bias
    gradient, values, weight, bias = map(_wide, (args.grad_out, *stored))
    parts = gradient, values, args.normalized_shape, args.mean, args.rstd, weight, bias
    results = aten.native_layer_norm_backward(*parts, [*args.output_mask])
    return tuple(map(_stored, results, stored))


def softmax(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``_softmax`` or ``_log_softmax`` to support ``half_to_float``, as on CUDA."""

    def forward(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
        return operator(values.float() if half_to_float else values, dim, False)

    return forward


def softmax_backward(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a backward operator to return the gradient in the dtype of the forward's input."""

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
