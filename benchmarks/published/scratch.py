"""Rewritten steps whose peaks others published: a GPT from scratch, and a profiler's ResNet.

The rows are those of data/real-gpu-peaks.csv, except xMem's (xmem.py).
"""

# ruff: noqa: D102 - forward() of a module computes what the class says

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.harness import MIB


class OwnNorm(nn.Module):
    """Layer norm from single operations."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class OwnGelu(nn.Module):
    """GELU's tanh form from single operations."""

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.sqrt(torch.tensor(2.0 / math.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class Heads(nn.Module):
    """Attention from single operations, or scaled_dot_product_attention."""

    def __init__(self, dim: int, heads: int, length: int, *, keep_mask: bool, sdpa: bool) -> None:
        super().__init__()
        self.heads, self.sdpa, self.keep_mask = heads, sdpa, keep_mask
        if sdpa:
            self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        else:
            self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.1)
        if keep_mask:
            self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        shape = (batch, length, self.heads, dim // self.heads)
        if self.sdpa:
            qkv = self.qkv(x).view(batch, length, 3, *shape[2:]).permute(2, 0, 3, 1, 4)
            rate = 0.1 if self.training else 0.0
            mixed = F.scaled_dot_product_attention(*qkv, dropout_p=rate, is_causal=True)
            return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, dim))
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys, queries, values = (
            part.view(shape).transpose(1, 2) for part in (keys, queries, values)
        )
        scores = queries @ keys.transpose(2, 3)
        if self.keep_mask:
            mask = self.mask.bool()[:length, :length]
        else:
            mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), 1)
        scores.masked_fill_(mask, -torch.inf)
        weights = self.dropout(torch.softmax(scores / shape[-1] ** 0.5, dim=-1))
        mixed = (weights @ values).transpose(1, 2).reshape(batch, length, dim)
        return self.out(mixed)


class Layer(nn.Module):
    """One block of the GPT."""

    def __init__(self, dim: int, length: int, *, own: bool, **attention: bool) -> None:
        super().__init__()
        norm, gelu = (OwnNorm, OwnGelu) if own else (nn.LayerNorm, _gelu)
        self.attention = Heads(dim, 12, length, **attention)
        self.forwards = nn.Sequential(nn.Linear(dim, 4 * dim), gelu(), nn.Linear(4 * dim, dim))
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.forwards(x)
        x = self.dropout(x)
        return x + shortcut


def _gelu() -> nn.GELU:
    return nn.GELU(approximate="tanh")


class ScratchGpt(nn.Module):
    """A GPT with the shape of GPT-2 small, an untied output layer and 162 million parameters."""

    def __init__(self, *, own: bool, keep_mask: bool, sdpa: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50257, 768), nn.Embedding(1024, 768)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(
            *(Layer(768, 1024, own=own, keep_mask=keep_mask, sdpa=sdpa) for _ in range(12))
        )
        self.norm = OwnNorm(768) if own else nn.LayerNorm(768)
        self.head = nn.Linear(768, 50257, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.tokens(ids)
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        x = embedded + places
        x = self.dropout(x)
        return self.head(self.norm(self.blocks(x)))


def scratch_gpt(  # noqa: PLR0913 - its variants
    *,
    own: bool,
    keep_mask: bool = False,
    sdpa: bool = False,
    fused: bool,
    half: bool,
    compiled: bool = False,
) -> float:
    """Run LLMs-from-scratch's loop: steps, an evaluation after the first, a generated text."""
    model = ScratchGpt(own=own, keep_mask=keep_mask, sdpa=sdpa).cuda()
    if half:
        model = model.to(torch.bfloat16)
    if compiled:
        model = torch.compile(model)
    more = {"fused": True} if fused else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, **more)

    def loss() -> Tensor:
        ids, targets = (torch.zeros(8, 1024, dtype=torch.long).cuda() for _ in range(2))
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for index in range(4):
        model.train()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        if index == 0:
            model.eval()
            with torch.no_grad():
                loss().item()
                loss().item()
    model.eval()
    ids = torch.zeros(1, 4, dtype=torch.long).cuda()
    with torch.no_grad():
        for _ in range(50):
            best = torch.argmax(model(ids[:, -1024:])[:, -1, :], dim=-1, keepdim=True)
            ids = torch.cat((ids, best), dim=1)
    return torch.cuda.memory_reserved() / MIB


def kineto_resnet50() -> float:
    """Return the peak in MiB above the memory at the record's start: parameters and momentum."""
    import torchvision

    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50(weights=None).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    model.train()
    for index in range(8):
        if index == 2:
            start = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        x, y = torch.zeros(32, 3, 224, 224).cuda(), torch.zeros(32, dtype=torch.long).cuda()
        loss = nn.CrossEntropyLoss()(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (torch.cuda.max_memory_allocated() - start) / MIB
