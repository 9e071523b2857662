"""Equivalents of cuDNN's recurrent networks, and of CUDA's fused cells."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.devices.autograd_threads import unawaited

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RELU, TANH, LSTM, GRU = range(4)
"""cuDNN's modes of a recurrent network"""
NETWORKS: Final[dict[int, Callable[..., Any]]] = {
    RELU: torch.ops.aten.rnn_relu,
    TANH: torch.ops.aten.rnn_tanh,
    LSTM: torch.ops.aten.lstm,
    GRU: torch.ops.aten.gru,
}


class Network(NamedTuple):
    """A network's options, as the operator takes them."""

    mode: int
    stride: int
    """weights of a layer and direction: four have biases, a fifth projects"""
    layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool
    batch_sizes: Sequence[int]


GATES: Final = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
"""the gates of a cell"""


def _in_shape(
    network: Network, weights: Sequence[Tensor], inputs: int, hidden: int, projected: int
) -> list[Tensor]:
    """Return weights as the CPU's network takes them: autocast passes flat ones."""
    rows, outputs = GATES[network.mode] * hidden, projected or hidden
    directions = 2 if network.bidirectional else 1
    shaped = []
    for place, weight in enumerate(weights):
        group, kind = divmod(place, network.stride)
        columns = inputs if group < directions else outputs * directions
        has_biases = network.stride >= 4  # noqa: PLR2004 - two weights and two biases
        shape: list[tuple[int, ...]] = [(rows, columns), (rows, outputs)]
        shape += [(rows,), (rows,)] if has_biases else []
        shape += [(outputs, hidden)] if projected else []
        shaped.append(weight.reshape(shape[kind]))
    return shaped


def _forward(
    network: Network, values: Tensor, weights: Sequence[Tensor], hidden: Tensor, cell: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the output and the last states, by PyTorch's own network of the CPU."""
    state = [hidden, cell] if network.mode == LSTM else hidden
    has_biases = network.stride >= 4  # noqa: PLR2004 - two weights and two biases
    options = (
        *(list(weights), has_biases, network.layers, network.dropout),
        *(network.train, network.bidirectional),
    )
    run = NETWORKS[network.mode]
    if not network.dropout or not network.train:
        return _call(run, network, values, state, options)
    # The backward pass draws the same mask: it has the same values.
    seed = zlib.crc32(bytes(values.detach().float().contiguous().flatten()[:64].numpy().tobytes()))
    generator_state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        return _call(run, network, values, state, options)
    finally:
        torch.default_generator.set_state(generator_state)


def _call(
    run: Callable[..., Any], network: Network, values: Tensor, state: object, options: Sequence[Any]
) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = (
        run(values, torch.tensor(network.batch_sizes), state, *options)
        if network.batch_sizes
        else run(values, state, *options, network.batch_first)
    )
    return result


def cudnn_rnn(
    values: Tensor,
    weights: Sequence[Tensor],
    stride: int,
    buffer: Tensor | None,
    hidden: Tensor,
    cell: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    _dropout_state: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the output and the last states; of the reserve space nothing is needed."""
    network = Network(mode, stride, layers, batch_first, dropout, train, bidirectional, batch_sizes)
    shaped = _in_shape(network, weights, values.shape[-1], hidden_size, proj_size)
    result = _forward(network, values, shaped, hidden, cell)
    last_cell = result[2] if mode == LSTM else values.new_empty(0)
    return result[0], result[1], last_cell, None, buffer  # in which the weights lie


def cudnn_rnn_backward(
    values: Tensor,
    weights: Sequence[Tensor],
    stride: int,
    _buffer: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    _output: Tensor,
    by_output: Tensor | None,
    by_hidden: Tensor | None,
    by_cell: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    _dropout_state: Tensor | None,
    _reserve: Tensor,
    mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Return the gradients of values, states and weights, by autograd over the CPU's network."""
    network = Network(mode, stride, layers, batch_first, dropout, train, bidirectional, batch_sizes)
    shaped = _in_shape(network, weights, values.shape[-1], hidden_size, proj_size)
    leaves = [values, hidden, *([] if cell is None else [cell]), *shaped]
    gradients = differentiated(
        lambda *inputs: _forward(
            network,
            inputs[0],
            inputs[-len(weights) :],
            inputs[1],
            None if cell is None else inputs[2],
        ),
        leaves,
        [by_output, by_hidden, by_cell],
    )
    by_state = gradients[2] if cell is not None else None
    by_weights = [
        gradient.reshape(weight.shape)
        for gradient, weight in zip(gradients[-len(weights) :], weights, strict=True)
    ]
    return (
        gradients[0] if mask[0] else None,
        gradients[1] if mask[1] else None,
        by_state if mask[2] else None,
        by_weights if mask[3] else [None] * len(weights),
    )


def differentiated(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    """Return the gradients of a function's inputs, by autograd of the host.

    It runs in a thread of its own: this one may be autograd's, inside an operator, where nothing is
    recorded.
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


# -- the cells of networks that are not cuDNN's --


def _added(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates.float() if bias is None else gates.float() + bias.float()


def lstm_cell(
    by_input: Tensor,
    by_hidden: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new states, and the gates as the backward pass takes them."""
    gates = _added(by_input, input_bias) + _added(by_hidden, hidden_bias)
    enter, forget, new, leave = gates.chunk(4, -1)
    enter, forget, leave = enter.sigmoid(), forget.sigmoid(), leave.sigmoid()
    new = new.tanh()
    state = forget * cell.float() + enter * new
    workspace = torch.cat([enter, forget, new, leave], -1)
    kind = by_input.dtype
    return (leave * state.tanh()).to(kind), state.to(kind), workspace.to(kind)


def lstm_cell_backward(
    by_hidden: Tensor | None,
    by_cell: Tensor | None,
    cell: Tensor,
    state: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the gates, of the cell, and of the bias."""
    enter, forget, new, leave = workspace.float().chunk(4, -1)
    hidden = torch.zeros_like(enter) if by_hidden is None else by_hidden.float()
    shape = state.float().tanh()
    inner = hidden * leave * (1 - shape.square())
    if by_cell is not None:
        inner = inner + by_cell.float()
    gates = torch.cat(
        [
            inner * new * enter * (1 - enter),
            inner * cell.float() * forget * (1 - forget),
            inner * enter * (1 - new.square()),
            hidden * shape * leave * (1 - leave),
        ],
        -1,
    ).to(workspace.dtype)
    return gates, (inner * forget).to(cell.dtype), gates.sum(0) if has_bias else None


def gru_cell(
    by_input: Tensor,
    by_hidden: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the new state, and the backward pass's tensor: gates, the state, a gate's part."""
    reset_i, enter_i, new_i = _added(by_input, input_bias).chunk(3, -1)
    reset_h, enter_h, new_h = _added(by_hidden, hidden_bias).chunk(3, -1)
    reset, enter = (reset_i + reset_h).sigmoid(), (enter_i + enter_h).sigmoid()
    new = (new_i + reset * new_h).tanh()
    result = new + enter * (hidden.float() - new)
    workspace = torch.cat([reset, enter, new, hidden.float(), new_h], -1)
    return result.to(by_input.dtype), workspace.to(by_input.dtype)


def gru_cell_backward(
    gradient: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of both gates, of the state, and of both biases."""
    reset, enter, new, hidden, new_h = workspace.float().chunk(5, -1)
    incoming = gradient.float()
    by_enter = incoming * (hidden - new) * enter * (1 - enter)
    by_new = incoming * (1 - enter) * (1 - new.square())
    by_reset = by_new * new_h * reset * (1 - reset)
    kind = workspace.dtype
    by_input = torch.cat([by_reset, by_enter, by_new], -1).to(kind)
    by_hidden = torch.cat([by_reset, by_enter, by_new * reset], -1).to(kind)
    biases = (by_input.sum(0), by_hidden.sum(0)) if has_bias else (None, None)
    return by_input, by_hidden, (incoming * enter).to(kind), *biases
