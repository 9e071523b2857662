"""Recurrent networks of the fidelity matrix: plain PyTorch, sizes by argument."""

# ruff: noqa: D102 - forward() of a module computes what the class says

from __future__ import annotations

from torch import Tensor, nn


class RecurrentLm(nn.Module):
    """A language model over an LSTM or a GRU."""

    def __init__(
        self, kind: type[nn.Module] = nn.LSTM, dim: int = 650, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10000, dim)
        self.rnn = kind(dim, dim, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(dim, 10000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(ids))[0])


class Speech(nn.Module):
    """1-d convolutions and a bidirectional LSTM under a CTC loss."""

    def __init__(self, width: int = 256, letters: int = 32) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(80, width, 5, 2, 2), nn.GELU(), nn.Conv1d(width, width, 5, 2, 2), nn.GELU()
        )
        self.rnn = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, letters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.front(x).transpose(1, 2))[0]).log_softmax(-1)
