"""CPU equivalents of cuDNN's recurrent networks, and of CUDA's fused cells."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pytest_gpumem.devices.autograd_threads import unawaited
from pytest_gpumem.devices.virtual.values.operator_table import equivalent, equivalent_of_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.devices.virtual.values.operator_table import Arguments

aten: Final = torch.ops.aten

RELU, TANH, LSTM, GRU = range(4)
"""cuDNN's modes of a recurrent network"""
RUN: Final[dict[int, Callable[..., Any]]] = {
    RELU: aten.rnn_relu,
    TANH: aten.rnn_tanh,
    LSTM: aten.lstm,
    GRU: aten.gru,
}
"""PyTorch's operators that run these networks on the CPU, by mode"""
GATES: Final = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
"""number of gates of a cell, by mode"""


def _has_biases(args: Arguments) -> bool:
    """Return whether each layer and direction has two biases besides its two weights."""
    return bool(args.weight_stride0 >= 4)  # noqa: PLR2004 - a fifth weight is the projection


def _weights_in_shape(args: Arguments) -> list[Tensor]:
    """Return the weights in the shapes of the CPU's network: autocast passes them flattened."""
    hidden, inputs = args.hidden_size, args.input.shape[-1]
    rows, outputs = GATES[args.mode] * hidden, args.proj_size or hidden
    directions = 2 if args.bidirectional else 1
    shaped = []
    for place, weight in enumerate(args.weight):
        group, kind = divmod(place, args.weight_stride0)
        columns = inputs if group < directions else outputs * directions
        shape: list[tuple[int, ...]] = [(rows, columns), (rows, outputs)]
        shape += [(rows,), (rows,)] if _has_biases(args) else []
        shape += [(outputs, hidden)] if args.proj_size else []
        shaped.append(weight.reshape(shape[kind]))
    return shaped


def _forward(
    args: Arguments, values: Tensor, weights: Sequence[Tensor], hidden: Tensor, cell: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the output and the last states, computed by PyTorch's CPU network."""
    state = [hidden, cell] if args.mode == LSTM else hidden
    options = (
        *(list(weights), _has_biases(args), args.num_layers, args.dropout),
        *(args.train, args.bidirectional),
    )
    generator_state = None
    if args.dropout and args.train:
        # Seed from the input values: the backward pass has the same ones, and so draws the same
        # mask.
        first = values.detach().float().contiguous().flatten()[:64]
        generator_state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(zlib.crc32(bytes(first.numpy().tobytes())))
    try:
        if args.batch_sizes:
            sizes = torch.tensor(args.batch_sizes)
            result: tuple[Tensor, ...] = RUN[args.mode](values, sizes, state, *options)
        else:
            result = RUN[args.mode](values, state, *options, args.batch_first)
    finally:
        if generator_state is not None:
            torch.default_generator.set_state(generator_state)
    return result


@equivalent_of_arguments("aten::_cudnn_rnn")
def cudnn_rnn(args: Arguments) -> tuple[Tensor | None, ...]:
    """Return the output and the last states, but no reserve space: no equivalent reads it."""
    weights = _weights_in_shape(args)
    result = _forward(args, args.input, weights, args.hx, args.cx)
    last_cell = result[2] if args.mode == LSTM else args.input.new_empty(0)
    return result[0], result[1], last_cell, None, args.weight_buf  # weight_buf has the weights


@equivalent_of_arguments("aten::_cudnn_rnn_backward")
def cudnn_rnn_backward(args: Arguments) -> tuple[Any, ...]:
    """Return the gradients of values, states and weights, with autograd on the CPU's network."""
    weights = _weights_in_shape(args)
    states = [args.hx] if args.cx is None else [args.hx, args.cx]

    def forward(values: Tensor, hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        cell = None if args.cx is None else others[0]
        return _forward(args, values, others[-len(weights) :], hidden, cell)

    incoming = [args.grad_output, args.grad_hy, args.grad_cy]
    gradients = differentiated(forward, [args.input, *states, *weights], incoming)
    by_weights = [
        gradient.reshape(weight.shape)
        for gradient, weight in zip(gradients[-len(weights) :], args.weight, strict=True)
    ]
    mask = args.output_mask
    return (
        gradients[0] if mask[0] else None,
        gradients[1] if mask[1] else None,
        gradients[2] if mask[2] and args.cx is not None else None,
        by_weights if mask[3] else [None] * len(weights),
    )


def differentiated(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    """Return the gradients of a function's inputs, with autograd on the host.

    Autograd runs in a new thread: the current one may be autograd's own, inside an operator, where
    autograd records nothing.
    """

    def run() -> list[Tensor]:
        with torch.enable_grad(), unawaited():
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            results = function(*leaves)
            pairs = [
                (result, gradient)
                for result, gradient in zip(results, gradients, strict=False)
                if gradient is not None and result.requires_grad
            ]
            outputs, incoming = zip(*pairs, strict=True)
            return list(
                torch.autograd.grad(
                    outputs, leaves, incoming, allow_unused=True, materialize_grads=True
                )
            )

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


# -- cells of networks that do not use cuDNN --
#
# The workspace is read by the backward pass alone. Unlike CUDA's workspace, it stores the gates
# before sigmoid and tanh, as PyTorch's own backward passes for the CPU expect.


def _added(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates.float() if bias is None else gates.float() + bias.float()


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


@equivalent_of_arguments("aten::_thnn_fused_lstm_cell")
def lstm_cell(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new hidden state and cell state, and the gates for the backward pass."""
    gates = _added(args.input_gates, args.input_bias)
    gates = gates + _added(args.hidden_gates, args.hidden_bias)
    enter, forget, new, leave = gates.chunk(4, -1)
    state = forget.sigmoid() * args.cx.float() + enter.sigmoid() * new.tanh()
    kind = args.input_gates.dtype
    return (leave.sigmoid() * state.tanh()).to(kind), state.to(kind), gates.to(kind)


@equivalent_of_arguments("aten::_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(args: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of the gates, of the cell state, and of the bias."""
    gates, cell, state = args.workspace.float(), args.cx.float(), args.cy.float()
    incoming = _wide(args.grad_hy), _wide(args.grad_cy)
    by_gates, _, by_cell, *_ = aten._thnn_differentiable_lstm_cell_backward(
        *incoming, gates, torch.zeros(()), None, None, cell, state
    )
    by_gates = by_gates.to(args.workspace.dtype)
    return by_gates, by_cell.to(args.cx.dtype), by_gates.sum(0) if args.has_bias else None


@equivalent_of_arguments("aten::_thnn_fused_gru_cell")
def gru_cell(args: Arguments) -> tuple[Tensor, Tensor]:
    """Return the new state, and the gates and the old state for the backward pass."""
    reset_i, enter_i, new_i = _added(args.input_gates, args.input_bias).chunk(3, -1)
    reset_h, enter_h, new_h = _added(args.hidden_gates, args.hidden_bias).chunk(3, -1)
    reset, enter, hidden = reset_i + reset_h, enter_i + enter_h, args.hx.float()
    new = (new_i + reset.sigmoid() * new_h).tanh()
    workspace = torch.cat([reset, enter, new_i, hidden, new_h], -1)
    kind = args.input_gates.dtype
    return (new + enter.sigmoid() * (hidden - new)).to(kind), workspace.to(kind)


@equivalent("aten::_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    gradient: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the input's and the state's gates, the state, and both biases."""
    width, kind = workspace.shape[-1] // 5, workspace.dtype
    gates, hidden, new_h = workspace.float().split([3 * width, width, width], -1)
    of_state = torch.nn.functional.pad(new_h, (2 * width, 0))
    results = aten._thnn_differentiable_gru_cell_backward(
        gradient.float(), gates, of_state, hidden, None, None
    )
    by_input, by_hidden, by_state = (result.to(kind) for result in results[:3])
    biases = (by_input.sum(0), by_hidden.sum(0)) if has_bias else (None, None)
    return by_input, by_hidden, by_state, *biases
