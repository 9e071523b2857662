"""The matrix's steps over recurrent networks: language models and speech."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.fidelity import models_recurrent as m
from benchmarks.fidelity.matrix import add
from benchmarks.fidelity.training import FP16, by_token, tokens, train


def language() -> None:
    """LSTM and GRU language models."""
    words = tokens(20, 70, 10000)
    add(
        "lstm-lm-fp32",
        "rnn",
        partial(train, m.RecurrentLm, words, by_token, optimizer="plain-sgd", clip=True),
    )
    add(
        "lstm-lm-dropout",
        "rnn",
        partial(train, partial(m.RecurrentLm, dropout=0.5), words, by_token),
    )
    add("lstm-lm-fp16", "rnn", partial(train, m.RecurrentLm, words, by_token, amp=FP16))
    add("gru-lm-fp32", "rnn", partial(train, partial(m.RecurrentLm, nn.GRU), words, by_token))


def speech() -> tuple:
    """Spectrograms and the letters that are spoken."""
    return torch.randn(16, 80, 800, device="cuda"), torch.randint(1, 32, (16, 40), device="cuda")


def ctc(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """CTC loss of letters."""
    out = model(x).transpose(0, 1)
    lengths = torch.full((16,), out.shape[0]), torch.full((16,), 40)
    return F.ctc_loss(out.float(), y, *lengths)


def speech_recognition() -> None:
    """An LSTM under a CTC loss."""
    add("speech-lstm-ctc", "rnn", partial(train, m.Speech, speech, ctc))


def add_steps() -> None:
    """Put these steps into the matrix."""
    language()
    speech_recognition()
