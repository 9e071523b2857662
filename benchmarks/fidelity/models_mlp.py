"""Fully connected networks of the fidelity matrix, and embeddings under one: plain PyTorch."""

# ruff: noqa: D102 - forward() of a module computes what the class says

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class Recommender(nn.Module):
    """DLRM-like: large embedding bags and a small network."""

    def __init__(
        self, rows: int = 1_000_000, tables: int = 8, dim: int = 64, *, sparse: bool = False
    ) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse) for _ in range(tables)
        )
        self.top = mlp([tables * dim, 512, 256, 1])

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([bag(i) for bag, i in zip(self.bags, ids, strict=True)], 1))


def mlp(sizes: list[int]) -> nn.Sequential:
    """Linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
