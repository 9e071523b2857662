"""Equivalents of CUDA's attention: flash, memory-efficient and cuDNN's, forwards and backwards.

All are softmax(q @ k.T * scale + bias) @ v, computed in single precision, with the logarithm of the
sum of exponentials that the backward pass takes. Dropout's mask is drawn from the seed that the
operator returns, so that the backward pass has the same one.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pytest_gpumem.devices.virtual.values.torch_release import TORCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

FROM_TOP_LEFT, FROM_BOTTOM_RIGHT = 1, 2
"""PyTorch's numbers of causal masks for memory-efficient attention: CustomMaskType"""
LOWER_RIGHT: Final = "lower right"
UPPER_LEFT: Final = "upper left"
ALIGNED: Final = {0: None, FROM_TOP_LEFT: UPPER_LEFT, FROM_BOTTOM_RIGHT: LOWER_RIGHT}
EFFICIENT_ROWS: Final = 32
"""rows to whose multiple memory-efficient attention pads the logarithms that it returns"""


class Options(NamedTuple):
    """What attention depends on beside its tensors."""

    scale: float
    causal: str | None = None
    """where the causal mask's diagonal ends, if there is one"""
    dropout: float = 0.0
    seed: int = 0
    window: tuple[int, int] = (-1, -1)
    """keys before and after a query that it sees; -1: all"""


def _options(
    query: Tensor,
    scale: float | None,
    causal: str | None,
    dropout: float,
    seed: Tensor | None = None,
    window: Sequence[int | None] = (None, None),
) -> Options:
    """Return the options of a call, as operators take them.

    Args:
        query: its last size gives the scale, where there is none.
        scale: of the scores.
        causal: where the causal mask's diagonal ends.
        dropout: the share that is dropped.
        seed: of a backward pass, as the forward one returned it; else one is drawn.
        window: keys before and after a query that it sees; None: all.
    """
    number = 0
    if dropout and seed is None:
        number = int(torch.randint(1 << 62, ()))
    elif dropout and seed is not None and seed.numel():
        number = int(seed.flatten()[0].to(torch.int64))
    before, after = (-1 if side is None else side for side in window)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Options(scale, causal, dropout, number, (before, after))


def _as_many_heads(keys: Tensor, query: Tensor) -> Tensor:
    """Return keys or values repeated for the groups of heads that share them."""
    return keys.repeat_interleave(query.shape[-3] // keys.shape[-3], -3).float()


def _shared_heads(gradient: Tensor, keys: Tensor) -> Tensor:
    """Return the gradient of keys or values, summed over the heads that share them."""
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
    """Return the mask's factors: 0, or the one that keeps the mean as it is."""
    if not options.dropout:
        return None
    generator = torch.Generator().manual_seed(options.seed)
    return (torch.rand(scores.shape, generator=generator) >= options.dropout) / (
        1 - options.dropout
    )


def attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithm of each row's sum, of heads before rows."""
    scores = _scores(query, key, bias, options)
    logarithm = scores.logsumexp(-1)
    weights = (scores - logarithm[..., None]).exp().nan_to_num(0.0)
    mask = _dropout_mask(scores, options)
    if mask is not None:
        weights = weights * mask
    return (weights @ _as_many_heads(value, query)).to(query.dtype), logarithm


def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, and of the bias as large as the scores."""
    scores = _scores(query, key, bias, options)
    plain = scores.softmax(-1).nan_to_num(0.0)
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
    """Return the gradient of a bias that was expanded."""
    return gradient.sum_to_size(bias.shape).to(bias.dtype)


# -- torch.nn.functional.scaled_dot_product_attention: heads before rows --


def sdpa_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    _debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    """Return the results of ``_scaled_dot_product_flash_attention``; no mask for debugging."""
    options = _options(query, scale, LOWER_RIGHT if causal else None, dropout)
    output, logarithm = attention(query, key, value, None, options)
    rows = (query.shape[-2], key.shape[-2])
    state = _random_state(options)
    return output, logarithm, None, None, *rows, *state, output.new_empty(0)


def _random_state(options: Options) -> tuple[Tensor, Tensor]:
    """Return the seed and its offset as flash attention returns them."""
    if TORCH < (2, 7):
        return torch.tensor(options.seed), torch.tensor(0)
    state = torch.tensor([options.seed, 0]).to(torch.uint64)
    return state, state.new_zeros(())


def sdpa_flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _output: Tensor,
    _logarithm: Tensor,
    _cum_seq_q: Tensor | None,
    _cum_seq_k: Tensor | None,
    _max_q: int,
    _max_k: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    _offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    options = _options(query, scale, LOWER_RIGHT if causal else None, dropout, seed)
    return attention_backward(gradient, query, key, value, None, options)[:3]


def sdpa_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    """Return the results of ``_scaled_dot_product_efficient_attention``."""
    options = _options(query, scale, UPPER_LEFT if causal else None, dropout)
    output, logarithm = attention(query, key, value, bias, options)
    return (
        output,
        _padded(logarithm) if compute_log_sumexp else logarithm[..., :0],
        torch.tensor(options.seed),
        torch.tensor(0),
    )


def _padded(logarithm: Tensor) -> Tensor:
    rows = -logarithm.shape[-1] % EFFICIENT_ROWS
    return torch.nn.functional.pad(logarithm, (0, rows), value=math.inf)


def sdpa_efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    _output: Tensor,
    _logarithm: Tensor,
    seed: Tensor,
    _offset: Tensor,
    dropout: float,
    mask: list[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and bias."""
    options = _options(query, scale, UPPER_LEFT if causal else None, dropout, seed)
    *gradients, by_bias = attention_backward(gradient, query, key, value, bias, options)
    return *gradients, _reduced(by_bias, bias) if bias is not None and mask[3] else None


def sdpa_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    _compute_log_sumexp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    _debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    """Return the results of ``_scaled_dot_product_cudnn_attention``."""
    options = _options(query, scale, UPPER_LEFT if causal else None, dropout)
    output, logarithm = attention(query, key, value, bias, options)
    rows = (query.shape[-2], key.shape[-2])
    seeds = torch.tensor(options.seed), torch.tensor(0)
    if TORCH >= (2, 9):
        logarithm = logarithm[..., None]
    return output, logarithm, None, None, *rows, *seeds, None


def sdpa_cudnn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _output: Tensor,
    _logarithm: Tensor,
    seed: Tensor,
    _offset: Tensor,
    bias: Tensor | None,
    _cum_seq_q: Tensor | None,
    _cum_seq_k: Tensor | None,
    _max_q: int,
    _max_k: int,
    dropout: float,
    causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    options = _options(query, scale, UPPER_LEFT if causal else None, dropout, seed)
    has_bias = bias is not None and bias.numel() > 0
    return attention_backward(gradient, query, key, value, bias if has_bias else None, options)[:3]


# -- the operators below: rows before heads, and sequences of many lengths in a row --


def _rows_and_heads_exchanged(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors with the one order from tensors with the other, of a batch or without."""
    return query.transpose(-3, -2), key.transpose(-3, -2), value.transpose(-3, -2)


class Piece(NamedTuple):
    """The rows of one of several sequences that lie one after the other."""

    queries: slice
    keys: slice


def _pieces(starts_q: Tensor | None, starts_k: Tensor | None) -> list[Piece]:
    """Return the rows of each sequence; none where all tensors are batches."""
    if starts_q is None or starts_k is None:
        return []
    pairs = zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True)
    return [Piece(slice(*queries), slice(*keys)) for queries, keys in pairs]


def _piecewise(
    pieces: Sequence[Piece], query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and each sequence's logarithms, of rows before heads."""
    output, logarithms = torch.empty_like(query), []
    for queries, keys in pieces:
        heads = _rows_and_heads_exchanged(query[queries], key[keys], value[keys])
        result, logarithm = attention(*heads, None, options)
        output[queries] = result.transpose(0, 1)
        logarithms.append(logarithm)
    return output, logarithms


def _by_rows(pieces: Sequence[Piece], several: Sequence[Tensor], query: Tensor) -> Tensor:
    """Return each sequence's logarithms in its rows, of heads before rows."""
    logarithms = torch.full((query.shape[1], query.shape[0]), math.inf)
    for piece, logarithm in zip(pieces, several, strict=True):
        logarithms[:, piece.queries] = logarithm
    return logarithms


def _piecewise_backward(
    pieces: Sequence[Piece],
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, of rows before heads."""
    by_query, by_key, by_value = map(torch.empty_like, (query, key, value))
    for queries, keys in pieces:
        incoming = gradient[queries].transpose(0, 1)
        heads = _rows_and_heads_exchanged(query[queries], key[keys], value[keys])
        parts = attention_backward(incoming, *heads, None, options)[:3]
        by_query[queries], by_key[keys], by_value[keys] = _rows_and_heads_exchanged(*parts)
    return by_query, by_key, by_value


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    _max_q: int,
    _max_k: int,
    dropout: float,
    causal: bool,
    _debug: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unknown: object,
) -> tuple[object, ...]:
    """Return the results of ``_flash_attention_forward``, but for ALiBi and paged keys."""
    if any(unknown.get(name) is not None for name in ("seqused_k", "alibi_slopes", "block_table")):
        message = "alibi_slopes, seqused_k and block_table have no equivalent"
        raise NotImplementedError(message)
    window = (window_size_left, window_size_right)
    options = _options(query, scale, LOWER_RIGHT if causal else None, dropout, None, window)
    rest = (*_random_state(options), query.new_empty(0))
    pieces = _pieces(starts_q, starts_k)
    if not pieces:
        output, logarithm = attention(*_rows_and_heads_exchanged(query, key, value), None, options)
        return output.transpose(1, 2), logarithm, *rest
    output, several = _piecewise(pieces, query, key, value, options)
    return output, _by_rows(pieces, several, query), *rest


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _output: Tensor,
    _logarithm: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    _max_q: int,
    _max_k: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    _unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    window = (window_size_left, window_size_right)
    options = _options(query, scale, LOWER_RIGHT if causal else None, dropout, seed, window)
    pieces = _pieces(starts_q, starts_k)
    if pieces:
        return _piecewise_backward(pieces, gradient, query, key, value, options)
    heads = _rows_and_heads_exchanged(query, key, value)
    grads = attention_backward(gradient.transpose(1, 2), *heads, None, options)
    return _rows_and_heads_exchanged(*grads[:3])


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    max_q: int | None,
    max_k: int | None,
    dropout: float,
    mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
) -> tuple[object, ...]:
    """Return the results of ``_efficient_attention_forward``.

    Several sequences, which have no bias, are one batch: the first size is 1 then.
    """
    if seqlen_k is not None or window_size is not None:
        message = "seqlen_k and windows have no equivalent"
        raise NotImplementedError(message)
    options = _options(query, scale, ALIGNED[mask_type], dropout)
    pieces = _pieces(starts_q, starts_k)
    if pieces:
        output, several = _piecewise(pieces, query[0], key[0], value[0], options)
        output = output[None]
        logarithm = torch.full((len(several), query.shape[2], max_q or 0), math.inf)
        for place, part in enumerate(several):
            logarithm[place, :, : part.shape[-1]] = part
    else:
        output, logarithm = attention(*_rows_and_heads_exchanged(query, key, value), bias, options)
        output = output.transpose(1, 2)
    seeds = torch.tensor(options.seed), torch.tensor(0)
    kept = _padded(logarithm) if compute_log_sumexp else logarithm[..., :0]
    return output, kept, *seeds, max_q, max_k


def efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    _output: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    _max_q: int,
    _max_k: int,
    _logarithm: Tensor,
    dropout: float,
    seed: Tensor,
    _offset: Tensor,
    mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    window_size: int | None = None,
    **_unread: object,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and bias."""
    if window_size is not None:
        message = "windows have no equivalent"
        raise NotImplementedError(message)
    options = _options(query, scale, ALIGNED[mask_type], dropout, seed)
    pieces = _pieces(starts_q, starts_k)
    if pieces:
        parts = gradient[0], query[0], key[0], value[0]
        results = _piecewise_backward(pieces, *parts, options)
        return *(result[None] for result in results), None
    *grads, by_scores = attention_backward(
        gradient.transpose(1, 2), *_rows_and_heads_exchanged(query, key, value), bias, options
    )
    by_bias = _reduced(by_scores, bias) if bias is not None and bias_requires_grad else None
    return *_rows_and_heads_exchanged(*grads), by_bias


def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    _debug: bool = False,
    *,
    scale: float | None = None,
    **unknown: object,
) -> tuple[object, ...]:
    """Return the results of ``_cudnn_attention_forward``, but for paged keys."""
    if any(unknown.get(name) is not None for name in ("seqused_k", "block_table")):
        message = "seqused_k and block_table have no equivalent"
        raise NotImplementedError(message)
    pieces = _pieces(starts_q, starts_k)
    if not pieces:
        heads = query, key, value
        return sdpa_cudnn(*heads, bias, compute_log_sumexp, dropout, causal, scale=scale)
    options = _options(query, scale, UPPER_LEFT if causal else None, dropout)
    output, several = _piecewise(pieces, query, key, value, options)
    seeds = torch.tensor(options.seed), torch.tensor(0)
    logarithms = _by_rows(pieces, several, query)
    return output, logarithms, starts_q, starts_k, max_q, max_k, *seeds, None


def cudnn_backward(*args: Any, scale: float | None = None) -> tuple[Tensor, ...]:  # noqa: ANN401 - as sdpa_cudnn_backward's
    """Return the gradients of query, key and value; the arguments are sdpa_cudnn_backward's."""
    gradient, query, key, value, _, _, seed, _, _, starts_q, starts_k, _, _, dropout, causal = args
    pieces = _pieces(starts_q, starts_k)
    if not pieces:
        return sdpa_cudnn_backward(*args, scale=scale)
    options = _options(query, scale, UPPER_LEFT if causal else None, dropout, seed)
    return _piecewise_backward(pieces, gradient, query, key, value, options)
