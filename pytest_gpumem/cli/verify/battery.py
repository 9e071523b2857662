"""Define the steps of ``gpumem verify``: each takes less than 2 GiB.

A step that trains creates its model and data, and trains twice: an optimizer allocates its state at
the end of the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

NEEDS_TRITON: Final = "compiled MLP"
"""the step to skip if Triton is not installed"""


def train(
    model: Any,  # noqa: ANN401 - torch is not imported here
    data: tuple[Any, ...],
    loss: Callable[[Any], Any],
    optimizer: Any = None,  # noqa: ANN401
    *,
    autocast: str = "",
) -> None:
    """Train a model twice on the same batch.

    ``autocast`` is "bfloat16", "float16" (scaled by torch.amp.GradScaler) or "".
    """
    import torch

    scaler = torch.amp.GradScaler("cuda", enabled=autocast == "float16")
    dtype = getattr(torch, autocast) if autocast else None
    for _ in range(2):
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            value = loss(model(*data))
        scaler.scale(value).backward()
        if optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


def mean_square(output: Any) -> Any:  # noqa: ANN401
    """Return a loss that needs no target."""
    return output.float().square().mean()


def mlp(width: int = 2048, depth: int = 3) -> Any:  # noqa: ANN401
    """Return a multilayer perceptron on the GPU."""
    from torch import nn

    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers).cuda()


def convolutions(dimensions: int, channels: int, depth: int, *, norm: bool = True) -> Any:  # noqa: ANN401
    """Return convolutions of kernel size 3 on the GPU, with BatchNorm if ``norm``, and ReLU."""
    from torch import nn

    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    normalization = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    layers: list[nn.Module] = []
    inputs = 3
    for _ in range(depth):
        layers.append(convolution(inputs, channels, 3, padding=1))
        layers += [normalization(channels)] if norm else []
        layers.append(nn.ReLU())
        inputs = channels
    return nn.Sequential(*layers).cuda()


def batch(*shape: int) -> Any:  # noqa: ANN401
    """Return random data on the GPU."""
    import torch

    return torch.randn(*shape, device="cuda")


def train_mlp(
    optimizer: str,
    *,
    rows: int = 512,
    autocast: str = "",
    compiled: bool = False,
    **options: Any,  # noqa: ANN401 - of the optimizer
) -> None:
    """Train a multilayer perceptron with an optimizer of torch.optim."""
    import torch

    model = mlp()
    made = getattr(torch.optim, optimizer)(model.parameters(), **options)
    called = torch.compile(model) if compiled else model
    train(called, (batch(rows, 2048),), mean_square, made, autocast=autocast)


def train_checkpointed_mlp() -> None:
    """Train a deeper multilayer perceptron with activation checkpointing."""
    from torch.utils.checkpoint import checkpoint

    model = mlp(depth=8)

    def run(x: Any) -> Any:  # noqa: ANN401
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    train(run, (batch(4096, 2048),), mean_square)


def attend(length: int, dtype: str, *, is_causal: bool = False) -> None:
    """Run scaled-dot-product attention forward and backward."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    queries, keys, values = (
        batch(4, 16, length, 64).to(getattr(torch, dtype)).requires_grad_()
        for _ in ("queries", "keys", "values")
    )
    output = scaled_dot_product_attention(queries, keys, values, is_causal=is_causal)
    output.float().sum().backward()


def train_transformer(length: int, *, norm_first: bool = False, autocast: str = "") -> None:
    """Train three encoder layers on 16 sequences."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, (batch(16, length, 512),), mean_square, optimizer, autocast=autocast)


def train_language_model() -> None:
    """Train an embedding and a linear layer over 32,000 tokens."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    model = nn.Sequential(nn.Embedding(32_000, 512), nn.Linear(512, 32_000)).cuda()
    tokens = torch.randint(0, 32_000, (4, 512), device="cuda")
    train(
        model,
        (tokens,),
        lambda logits: cross_entropy(logits.view(-1, 32_000), tokens.view(-1)),
        torch.optim.AdamW(model.parameters()),
    )


def train_convolutions(*, channels_last: bool = False) -> None:
    """Train 2D convolutions: with SGD, or in float16 and channels last without an optimizer."""
    import torch

    model, data = convolutions(2, 64, 4, norm=not channels_last), batch(16, 3, 112, 112)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        data = data.contiguous(memory_format=torch.channels_last)
        train(model, (data,), mean_square, autocast="float16")
    else:
        train(model, (data,), mean_square, torch.optim.SGD(model.parameters(), 0.1))


def train_normalizations() -> None:
    """Train normalizations and activations."""
    from torch import nn

    model = nn.Sequential(
        nn.GroupNorm(8, 64), nn.SiLU(), nn.LayerNorm([64, 56, 56]), nn.GELU(), nn.Dropout(0.1)
    ).cuda()
    train(model, (batch(32, 64, 56, 56).requires_grad_(),), mean_square)


def sort_and_gather() -> None:
    """Sort random numbers, gather their cumulative sums, and take the largest 1000."""
    import torch

    values, order = batch(4_000_000).sort()
    torch.gather(values.cumsum(0), 0, order).topk(1000)


STEPS: Final[dict[str, Callable[[], object]]] = {
    "matrix product, float32": lambda: batch(4096, 4096) @ batch(4096, 4096),
    "matrix product, bfloat16": (
        lambda: batch(4096, 4096).bfloat16() @ batch(4096, 4096).bfloat16()
    ),
    "MLP, SGD": lambda: train_mlp("SGD", lr=0.1),
    "MLP, SGD with momentum, one tensor at a time": (
        lambda: train_mlp("SGD", lr=0.1, momentum=0.9, foreach=False)
    ),
    "MLP, AdamW": lambda: train_mlp("AdamW"),
    "MLP, fused Adam": lambda: train_mlp("Adam", fused=True),
    "MLP, float16 with GradScaler": lambda: train_mlp("AdamW", rows=2048, autocast="float16"),
    "MLP, checkpointed": train_checkpointed_mlp,
    "attention, float16, causal": lambda: attend(1024, "float16", is_causal=True),
    "attention, float32": lambda: attend(512, "float32"),
    "transformer layers, float32": lambda: train_transformer(256),
    "transformer layers, bfloat16 autocast": (
        lambda: train_transformer(512, norm_first=True, autocast="bfloat16")
    ),
    "embedding and cross-entropy of 32,000 tokens": train_language_model,
    "convolutions in 2D, float32": train_convolutions,
    "convolutions in 2D, float16 autocast, channels last": (
        lambda: train_convolutions(channels_last=True)
    ),
    "convolutions in 1D, float32": (
        lambda: train(convolutions(1, 128, 3), (batch(32, 3, 4096),), mean_square)
    ),
    "convolutions in 3D, bfloat16": lambda: train(
        convolutions(3, 32, 2).bfloat16(), (batch(2, 3, 32, 64, 64).bfloat16(),), mean_square
    ),
    "normalizations and activations": train_normalizations,
    "sort, gather and reductions": sort_and_gather,
    NEEDS_TRITON: lambda: train_mlp("AdamW", compiled=True),
}
"""each step by its name in the table, in order"""
