"""Transformers of the fidelity matrix: plain PyTorch, sizes by argument."""

# ruff: noqa: D102 - forward() of a module computes what the class says

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Multi-head attention by scaled_dot_product_attention; fewer key heads where asked."""

    def __init__(self, dim: int, heads: int, kv_heads: int | None = None, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads or heads, causal
        self.size = dim // heads
        self.qkv = nn.Linear(dim, (heads + 2 * self.kv_heads) * self.size, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        batch, length, dim = x.shape
        sizes = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, k, v = (
            part.view(batch, length, -1, self.size).transpose(1, 2)
            for part in self.qkv(x).split(sizes, -1)
        )
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.kv_heads != self.heads:
            k = k.repeat_interleave(self.heads // self.kv_heads, 1)
            v = v.repeat_interleave(self.heads // self.kv_heads, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding."""
    one, other = x.chunk(2, -1)
    return (x * cos + torch.cat([-other, one], -1) * sin).to(x.dtype)


class Block(nn.Module):
    """A pre-norm transformer block, GPT-2's and ViT's."""

    def __init__(self, dim: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    """A GPT; its blocks checkpointed where asked."""

    def __init__(  # noqa: PLR0913 - sizes
        self,
        dim: int = 768,
        heads: int = 12,
        depth: int = 12,
        vocabulary: int = 50257,
        length: int = 512,
        *,
        recompute: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(
            Block(dim, heads, causal=True, dropout=dropout) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class RmsNorm(nn.Module):
    """Root mean square norm, as Llama computes it: in fp32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * full.to(x.dtype)


class SwiGlu(nn.Module):
    """Llama's feed-forward layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A mixture of experts whose shapes do not depend on values: each takes a fixed capacity."""

    def __init__(self, dim: int, hidden: int, experts: int = 8, picked: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(SwiGlu(dim, hidden) for _ in range(experts))
        self.picked = picked

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        capacity = self.picked * flat.shape[0] // len(self.experts)
        weights, chosen = self.router(flat).float().softmax(-1).t().topk(capacity, -1)
        out = torch.zeros_like(flat)
        for weight, index, expert in zip(weights, chosen, self.experts, strict=True):
            mixed = expert(flat[index]) * weight[:, None].to(flat.dtype)
            out = out.index_add(0, index, mixed.to(out.dtype))
        return out.view_as(x)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention with grouped keys, SwiGLU or experts."""

    def __init__(self, dim: int, heads: int, hidden: int, *, experts: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(dim), RmsNorm(dim)
        self.attention = Attention(dim, heads, max(1, heads // 4), causal=True)
        self.mlp = Experts(dim, hidden, experts) if experts else SwiGlu(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), (cos, sin))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Llama-like, with grouped-query attention; its layers may be mixtures of experts."""

    def __init__(  # noqa: PLR0913 - sizes
        self,
        dim: int = 1024,
        heads: int = 16,
        depth: int = 8,
        hidden: int = 2816,
        vocabulary: int = 32000,
        *,
        experts: int = 0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(
            LlamaBlock(dim, heads, hidden, experts=experts) for _ in range(depth)
        )
        self.norm, self.head = RmsNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.size, self.recompute = dim // heads, recompute

    def forward(self, ids: Tensor) -> Tensor:
        steps = torch.arange(0, self.size, 2, device=ids.device).float() / self.size
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), 10000.0**-steps)
        angles = torch.cat([angles, angles], -1)
        x, cos, sin = self.tokens(ids), angles.cos(), angles.sin()
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.head(self.norm(x))


class Bert(nn.Module):
    """PyTorch's own encoder layers, with a classifier over the first token."""

    def __init__(self, dim: int = 768, heads: int = 12, depth: int = 12, classes: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(30522, dim), nn.Embedding(512, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.encoder(x)[:, 0])


class Vit(nn.Module):
    """A vision transformer over 16x16 patches."""

    def __init__(
        self, dim: int = 384, heads: int = 6, depth: int = 12, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.places = nn.Parameter(torch.zeros(1, 197, dim))
        self.first = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class T5(nn.Module):
    """An encoder and a decoder, as PyTorch's nn.Transformer has them."""

    def __init__(self, dim: int = 512, heads: int = 8, depth: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32128, dim)
        self.net = nn.Transformer(dim, heads, depth, depth, 4 * dim, batch_first=True)
        self.head = nn.Linear(dim, 32128, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        mixed = self.net(
            self.tokens(source), self.tokens(target), tgt_mask=mask, tgt_is_causal=True
        )
        return self.head(mixed)
