"""Data, losses, optimizers and the training step of the fidelity matrix."""

# ruff: noqa: ANN401, PLR0913 - a step has many options, of any type

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from collections.abc import Callable

BF16, FP16 = torch.bfloat16, torch.float16

# -- data: made on the device, with valid values for the layers that read it --


def images(batch: int, size: int = 224, classes: int = 1000) -> Callable[[], tuple]:
    """Images and their classes."""
    return lambda: (
        torch.randn(batch, 3, size, size, device="cuda"),
        torch.randint(0, classes, (batch,), device="cuda"),
    )


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple]:
    """Token ids, and the ids shifted by one."""

    def make() -> tuple:
        ids = torch.randint(0, vocabulary, (batch, length + 1), device="cuda")
        return ids[:, :-1], ids[:, 1:]

    return make


def vectors(batch: int, inputs: int, classes: int) -> Callable[[], tuple]:
    """Feature vectors and classes."""
    return lambda: (
        torch.randn(batch, inputs, device="cuda"),
        torch.randint(0, classes, (batch,), device="cuda"),
    )


def sentences(batch: int, length: int) -> Callable[[], tuple]:
    """Token ids, and a class per sentence."""
    return lambda: (
        torch.randint(0, 30522, (batch, length), device="cuda"),
        torch.randint(0, 2, (batch,), device="cuda"),
    )


# -- losses --


def by_class(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with one class per sample."""
    return F.cross_entropy(model(x), y)


def by_token(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with one class per token."""
    return F.cross_entropy(model(x).flatten(0, 1), y.reshape(-1))


def by_label(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of each output."""
    return F.binary_cross_entropy_with_logits(model(x), y)


# -- one training step --

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "plain-sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "sparse-adam": lambda p: torch.optim.SparseAdam(p, lr=1e-3),
}


def attention(kind: str) -> Any:
    """Allow only one backend of scaled_dot_product_attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, kind)) if kind else contextlib.nullcontext()


def train(
    make: Callable[[], nn.Module],
    data: Callable[[], tuple],
    loss: Callable[..., torch.Tensor],
    *,
    optimizer: str = "adamw",
    amp: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    accumulate: int = 1,
    channels_last: bool = False,
    compiled: bool = False,
    sdpa: str = "",
    clip: bool = False,
    benchmark: bool = False,
    scale: float = 1024.0,
) -> Callable[[], None]:
    """Make a model; return a function that runs one usual training step of it."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = benchmark
    model = make().cuda()
    if dtype is not None:
        model = model.to(dtype)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    steps = OPTIMIZERS[optimizer](model.parameters())
    called = torch.compile(model) if compiled else model
    scaler = torch.amp.GradScaler(init_scale=scale) if amp is torch.float16 else None

    def step() -> None:
        steps.zero_grad()
        for _ in range(accumulate):
            batch = data()
            if channels_last:
                batch = (batch[0].contiguous(memory_format=torch.channels_last), *batch[1:])
            if dtype is not None and batch[0].is_floating_point():
                batch = (batch[0].to(dtype), *batch[1:])
            autocast = torch.autocast("cuda", dtype=amp, enabled=amp is not None)
            with autocast, attention(sdpa):
                value = loss(called, *batch) / accumulate
            (scaler.scale(value) if scaler else value).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler:
            scaler.step(steps)
            scaler.update()
        else:
            steps.step()

    return step
