"""CPU equivalents of flash, memory-efficient and cuDNN attention, with gradients.

All are softmax(q @ k.T * scale + bias) @ v, computed in single precision, with the logsumexp that
the backward pass needs. Dropout's mask is drawn from the seed that the operator returns, so that
the backward pass draws the same one.

They are written out because PyTorch's own attention for the CPU does not do all of this: it has no
dropout and no windows, aligns causal masks only to the upper left, or returns no logsumexp.
Backward passes are written out too: gradients by autograd are the same, but double the time of a
small transformer's step.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pytest_gpumem.devices.virtual.values.operator_table import TORCH, equivalent_of_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pytest_gpumem.devices.virtual.values.operator_table import Arguments

aten: Final = torch.ops.aten

FROM_TOP_LEFT, FROM_BOTTOM_RIGHT = 1, 2
"""PyTorch's enum CustomMaskType: causal masks of memory-efficient attention"""
LOWER_RIGHT: Final = "lower right"
UPPER_LEFT: Final = "upper left"
ALIGNED: Final = {0: None, FROM_TOP_LEFT: UPPER_LEFT, FROM_BOTTOM_RIGHT: LOWER_RIGHT}
EFFICIENT_ROWS: Final = 32
"""memory-efficient attention pads the logsumexp that it returns to a multiple of so many rows"""


class Options(NamedTuple):
    """The arguments of attention besides its tensors."""

    scale: float
    causal: str | None = None
    """corner of the scores to which the causal mask is aligned; None: not causal"""
    dropout: float = 0.0
    seed: int = 0
    window: tuple[int, int] = (-1, -1)
    """how many keys before and after its own position a query attends to; -1: all"""


def _options(args: Arguments, aligned: str | None, seed: Tensor | None = None) -> Options:
    """Return the options of a call.

    Args:
        args: the operator's arguments.
        aligned: corner of the scores to which the causal mask is aligned; None: not causal.
        seed: in a backward pass, the seed that the forward pass returned; None: draw one.
    """
    number = 0
    if args.dropout_p and seed is None:
        number = int(torch.randint(1 << 62, ()))
    elif args.dropout_p and seed is not None and seed.numel():
        number = int(seed.flatten()[0].to(torch.int64))
    window = args.get("window_size_left"), args.get("window_size_right")
    before, after = (-1 if side is None else side for side in window)
    scale = 1 / math.sqrt(args.query.shape[-1]) if args.scale is None else args.scale
    causal = None if args.get("is_causal") is False else aligned
    return Options(scale, causal, args.dropout_p, number, (before, after))


def _refuse(args: Arguments, *names: str) -> None:
    """Raise if any of these arguments is given, because the equivalent does not support it."""
    if any(args.get(name) is not None for name in names):
        message = f"{', '.join(names)}: there is no equivalent"
        raise NotImplementedError(message)


def _as_many_heads(keys: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values for the query heads that share them, in single precision."""
    return keys.repeat_interleave(query.shape[-3] // keys.shape[-3], -3).float()


def _shared_heads(gradient: Tensor, keys: Tensor) -> Tensor:
    """Sum the gradient of keys or values over the heads that share them."""
    groups = gradient.shape[-3] // keys.shape[-3]
    if groups > 1:
        gradient = gradient.unflatten(-3, (keys.shape[-3], groups)).sum(-3)
    return gradient.to(keys.dtype)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    scores = query.float() @ _as_many_heads(key, query).mT * options.scale
    if bias is not None:
        masked = (
            torch.zeros_like(bias, dtype=torch.float32).masked_fill_(~bias, -math.inf)
            if bias.dtype == torch.bool
            else bias.float()
        )
        scores = scores + masked[..., : scores.shape[-2], : scores.shape[-1]]
    rows, columns = scores.shape[-2:]
    shift = columns - rows if options.causal == LOWER_RIGHT else 0
    distance = torch.arange(columns) - torch.arange(rows)[:, None] - shift
    left, right = options.window
    if options.causal is not None:
        scores = scores.masked_fill(distance > 0, -math.inf)
    if right >= 0:
        scores = scores.masked_fill(distance > right, -math.inf)
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -math.inf)
    return scores


def _dropout_mask(scores: Tensor, options: Options) -> Tensor | None:
    """Return each weight's factor, 0 or the one that preserves the mean; None without dropout."""
    if not options.dropout:
        return None
    generator = torch.Generator().manual_seed(options.seed)
    return (torch.rand(scores.shape, generator=generator) >= options.dropout) / (
        1 - options.dropout
    )


def attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Return the output and each row's logsumexp; all tensors have heads before rows."""
    scores = _scores(query, key, bias, options)
    weights = aten._safe_softmax(scores, -1)  # zeros in rows that attend to no key
    mask = _dropout_mask(scores, options)
    if mask is not None:
        weights = weights * mask
    return (weights @ _as_many_heads(value, query)).to(query.dtype), scores.logsumexp(-1)


def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, and of a bias expanded to the scores' shape."""
    scores = _scores(query, key, bias, options)
    plain = aten._safe_softmax(scores, -1)
    mask = _dropout_mask(scores, options)
    incoming = gradient.float()
    by_weights = incoming @ _as_many_heads(value, query).mT
    weights = plain
    if mask is not None:
        weights, by_weights = plain * mask, by_weights * mask
    by_scores = plain * (by_weights - (plain * by_weights).sum(-1, keepdim=True))
    by_query = by_scores @ _as_many_heads(key, query) * options.scale
    by_key = by_scores.mT @ query.float() * options.scale
    by_value = weights.mT @ incoming
    return (
        by_query.to(query.dtype),
        _shared_heads(by_key, key),
        _shared_heads(by_value, value),
        by_scores,
    )


def _reduced(gradient: Tensor, bias: Tensor) -> Tensor:
    """Sum the gradient of an expanded bias to the bias's shape."""
    return gradient.sum_to_size(bias.shape).to(bias.dtype)


# -- torch.nn.functional.scaled_dot_product_attention: heads before rows --


def _heads(args: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    return args.query, args.key, args.value


def _row_counts(args: Arguments) -> tuple[int, int]:
    return args.query.shape[-2], args.key.shape[-2]


def _seeds(options: Options) -> tuple[Tensor, Tensor]:
    return torch.tensor(options.seed), torch.tensor(0)


def _flash_state(options: Options) -> tuple[Tensor, Tensor]:
    """Return the seed and the offset as flash attention returns them."""
    if TORCH < (2, 7):
        return _seeds(options)
    state = torch.tensor([options.seed, 0]).to(torch.uint64)
    return state, state.new_zeros(())


def _kept(args: Arguments, logarithm: Tensor) -> Tensor:
    """Return the logsumexp, padded as by memory-efficient attention; empty if not requested."""
    if not args.compute_log_sumexp:
        return logarithm[..., :0]
    rows = -logarithm.shape[-1] % EFFICIENT_ROWS
    return torch.nn.functional.pad(logarithm, (0, rows), value=math.inf)


@equivalent_of_arguments("aten::_scaled_dot_product_flash_attention")
def sdpa_flash(args: Arguments) -> tuple[object, ...]:
    """Return flash attention's results, with an empty debug mask."""
    options = _options(args, LOWER_RIGHT)
    output, logarithm = attention(*_heads(args), None, options)
    state = _flash_state(options)
    return output, logarithm, None, None, *_row_counts(args), *state, output.new_empty(0)


equivalent_of_arguments("aten::_scaled_dot_product_flash_attention_backward")(
    lambda args: attention_backward(
        args.grad_out, *_heads(args), None, _options(args, LOWER_RIGHT, args.philox_seed)
    )[:3]
)


@equivalent_of_arguments("aten::_scaled_dot_product_efficient_attention")
def sdpa_efficient(args: Arguments) -> tuple[object, ...]:
    """Return the output, the logsumexp and the seed."""
    options = _options(args, UPPER_LEFT)
    output, logarithm = attention(*_heads(args), args.attn_bias, options)
    return output, _kept(args, logarithm), *_seeds(options)


@equivalent_of_arguments("aten::_scaled_dot_product_efficient_attention_backward")
def sdpa_efficient_backward(args: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and bias."""
    options, bias = _options(args, UPPER_LEFT, args.philox_seed), args.attn_bias
    *gradients, by_bias = attention_backward(args.grad_out_, *_heads(args), bias, options)
    is_wanted = bias is not None and args.grad_input_mask[3]
    return *gradients, _reduced(by_bias, bias) if is_wanted else None


@equivalent_of_arguments("aten::_scaled_dot_product_cudnn_attention")
def sdpa_cudnn(args: Arguments) -> tuple[object, ...]:
    """Return the output, the logsumexp, the numbers of rows and the seed."""
    options = _options(args, UPPER_LEFT)
    output, logarithm = attention(*_heads(args), args.attn_bias, options)
    if TORCH >= (2, 9):
        logarithm = logarithm[..., None]
    return output, logarithm, None, None, *_row_counts(args), *_seeds(options), None


@equivalent_of_arguments("aten::_scaled_dot_product_cudnn_attention_backward")
def sdpa_cudnn_backward(args: Arguments) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    options = _options(args, UPPER_LEFT, args.philox_seed)
    has_bias = args.attn_bias is not None and args.attn_bias.numel() > 0
    bias = args.attn_bias if has_bias else None
    return attention_backward(args.grad_out, *_heads(args), bias, options)[:3]


# -- operators with rows before heads, which also take packed sequences of different lengths --


def _exchanged(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Swap heads and rows of tensors with or without a batch dimension."""
    return query.transpose(-3, -2), key.transpose(-3, -2), value.transpose(-3, -2)


class Piece(NamedTuple):
    """The rows of one packed sequence."""

    queries: slice
    keys: slice


def _pieces(starts_q: Tensor | None, starts_k: Tensor | None) -> list[Piece]:
    """Return the rows of each packed sequence; an empty list if the tensors are batches."""
    if starts_q is None or starts_k is None:
        return []
    pairs = zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True)
    return [Piece(slice(*queries), slice(*keys)) for queries, keys in pairs]


def _piecewise(
    pieces: Sequence[Piece], query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, list[Tensor]]:
    """Return the output, with rows before heads, and each sequence's logsumexp."""
    output, logarithms = torch.empty_like(query), []
    for queries, keys in pieces:
        heads = _exchanged(query[queries], key[keys], value[keys])
        result, logarithm = attention(*heads, None, options)
        output[queries] = result.transpose(0, 1)
        logarithms.append(logarithm)
    return output, logarithms


def _by_rows(pieces: Sequence[Piece], several: Sequence[Tensor], query: Tensor) -> Tensor:
    """Return all sequences' logsumexp in one tensor, with heads before rows."""
    logarithms = torch.full((query.shape[1], query.shape[0]), math.inf)
    for piece, logarithm in zip(pieces, several, strict=True):
        logarithms[:, piece.queries] = logarithm
    return logarithms


def _by_sequences(several: Sequence[Tensor], query: Tensor, rows: int) -> Tensor:
    """Return all sequences' logsumexp in one tensor, each padded to a number of rows."""
    logarithms = torch.full((len(several), query.shape[1], rows), math.inf)
    for place, part in enumerate(several):
        logarithms[place, :, : part.shape[-1]] = part
    return logarithms


def _piecewise_backward(
    pieces: Sequence[Piece],
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, which have rows before heads."""
    by_query, by_key, by_value = map(torch.empty_like, (query, key, value))
    for queries, keys in pieces:
        incoming = gradient[queries].transpose(0, 1)
        heads = _exchanged(query[queries], key[keys], value[keys])
        parts = attention_backward(incoming, *heads, None, options)[:3]
        by_query[queries], by_key[keys], by_value[keys] = _exchanged(*parts)
    return by_query, by_key, by_value


@equivalent_of_arguments("aten::_flash_attention_forward")
def flash_forward(args: Arguments) -> tuple[object, ...]:
    """Return flash attention's results; ALiBi and paged keys are not supported."""
    _refuse(args, "seqused_k", "alibi_slopes", "block_table")
    options = _options(args, LOWER_RIGHT)
    rest = (*_flash_state(options), args.query.new_empty(0))
    pieces = _pieces(args.cum_seq_q, args.cum_seq_k)
    if not pieces:
        output, logarithm = attention(*_exchanged(*_heads(args)), None, options)
        return output.transpose(1, 2), logarithm, *rest
    output, several = _piecewise(pieces, *_heads(args), options)
    if TORCH < (2, 7):
        return output, _by_sequences(several, args.query, args.max_q), *rest
    return output, _by_rows(pieces, several, args.query), *rest


@equivalent_of_arguments("aten::_flash_attention_backward")
def flash_backward(args: Arguments) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    seed = args.philox_seed if TORCH < (2, 7) else args.rng_state
    options = _options(args, LOWER_RIGHT, seed)
    pieces = _pieces(args.cum_seq_q, args.cum_seq_k)
    if pieces:
        return _piecewise_backward(pieces, args.grad_out, *_heads(args), options)
    heads = _exchanged(*_heads(args))
    gradients = attention_backward(args.grad_out.transpose(1, 2), *heads, None, options)
    return _exchanged(*gradients[:3])


@equivalent_of_arguments("aten::_efficient_attention_forward")
def efficient_forward(args: Arguments) -> tuple[object, ...]:
    """Return the output, the logsumexp, the seed and the numbers of rows.

    Packed sequences, which have no bias, form one batch: the tensors' first size is then 1.
    """
    _refuse(args, "seqlen_k", "window_size")
    options = _options(args, ALIGNED[args.custom_mask_type])
    pieces = _pieces(args.cu_seqlens_q, args.cu_seqlens_k)
    rows = args.max_seqlen_q, args.max_seqlen_k
    if pieces:
        query, key, value = (heads[0] for heads in _heads(args))
        output, several = _piecewise(pieces, query, key, value, options)
        output, logarithm = output[None], _by_sequences(several, query, rows[0] or 0)
    else:
        output, logarithm = attention(*_exchanged(*_heads(args)), args.bias, options)
        output = output.transpose(1, 2)
    return output, _kept(args, logarithm), *_seeds(options), *rows


@equivalent_of_arguments("aten::_efficient_attention_backward")
def efficient_backward(args: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and bias."""
    _refuse(args, "window_size")
    options = _options(args, ALIGNED[args.custom_mask_type], args.philox_seed)
    pieces, gradient = _pieces(args.cu_seqlens_q, args.cu_seqlens_k), args.grad_out_
    if pieces:
        query, key, value = (heads[0] for heads in _heads(args))
        results = _piecewise_backward(pieces, gradient[0], query, key, value, options)
        return *(result[None] for result in results), None
    heads, bias = _exchanged(*_heads(args)), args.bias
    *grads, by_scores = attention_backward(gradient.transpose(1, 2), *heads, bias, options)
    is_wanted = bias is not None and args.bias_requires_grad
    return *_exchanged(*grads), _reduced(by_scores, bias) if is_wanted else None


@equivalent_of_arguments("aten::_cudnn_attention_forward")
def cudnn_forward(args: Arguments) -> tuple[object, ...]:
    """Return cuDNN attention's results; paged keys are not supported."""
    _refuse(args, "seqused_k", "block_table")
    starts = args.cum_seq_q, args.cum_seq_k
    pieces = _pieces(*starts)
    if not pieces:
        return sdpa_cudnn(args)
    options = _options(args, UPPER_LEFT)
    output, several = _piecewise(pieces, *_heads(args), options)
    logarithms = _by_rows(pieces, several, args.query)
    return output, logarithms, *starts, args.max_q, args.max_k, *_seeds(options), None


@equivalent_of_arguments("aten::_cudnn_attention_backward")
def cudnn_backward(args: Arguments) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    pieces = _pieces(args.cum_seq_q, args.cum_seq_k)
    if not pieces:
        return sdpa_cudnn_backward(args)
    options = _options(args, UPPER_LEFT, args.philox_seed)
    return _piecewise_backward(pieces, args.grad_out, *_heads(args), options)
