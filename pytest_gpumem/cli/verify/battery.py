"""The steps of ``gpumem verify``: each takes what training takes, in less than 2 GiB.

A step makes its model and its data, and trains twice: an optimizer's state comes to life at the end
of the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS: Final[dict[str, Callable[[], None]]] = {}
"""each step by its name in the table, in its order"""
NEEDS_TRITON: Final = "compiled MLP"
"""the step that is left out where Triton is not installed"""


def step(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a decorator that adds a step to the battery."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        STEPS[name] = function
        return function

    return add


def train(
    model: Any,  # noqa: ANN401 - torch is not imported here
    data: tuple[Any, ...],
    loss: Callable[[Any], Any],
    optimizer: Any = None,  # noqa: ANN401
    *,
    autocast: str = "",
) -> None:
    """Train a model twice on the same batch.

    ``autocast`` is "bfloat16", "float16" (the loss is scaled by torch.amp.GradScaler) or "".
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
    """Return convolutions of kernels of 3 with normalization, on the GPU."""
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


@step("matrix product, float32")
def _matrix_product() -> None:
    batch(4096, 4096) @ batch(4096, 4096)


@step("matrix product, bfloat16")
def _matrix_product_bfloat16() -> None:
    batch(4096, 4096).bfloat16() @ batch(4096, 4096).bfloat16()


@step("MLP, SGD")
def _mlp_sgd() -> None:
    import torch

    model = mlp()
    train(model, (batch(512, 2048),), mean_square, torch.optim.SGD(model.parameters(), 0.1))


@step("MLP, SGD with momentum, one tensor at a time")
def _mlp_momentum() -> None:
    import torch

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    train(model, (batch(512, 2048),), mean_square, optimizer)


@step("MLP, AdamW")
def _mlp_adamw() -> None:
    import torch

    model = mlp()
    train(model, (batch(512, 2048),), mean_square, torch.optim.AdamW(model.parameters()))


@step("MLP, fused Adam")
def _mlp_fused_adam() -> None:
    import torch

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    train(model, (batch(512, 2048),), mean_square, optimizer)


@step("MLP, float16 with GradScaler")
def _mlp_scaled() -> None:
    import torch

    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, (batch(2048, 2048),), mean_square, optimizer, autocast="float16")


@step("MLP, checkpointed")
def _mlp_checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    model = mlp(depth=8)

    def run(x: Any) -> Any:  # noqa: ANN401
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    train(run, (batch(4096, 2048),), mean_square)


@step("attention, float16, causal")
def _attention() -> None:
    from torch.nn.functional import scaled_dot_product_attention

    queries, keys, values = (
        batch(4, 16, 1024, 64).half().requires_grad_() for _ in ("queries", "keys", "values")
    )
    scaled_dot_product_attention(queries, keys, values, is_causal=True).float().sum().backward()


@step("attention, float32")
def _attention_float32() -> None:
    from torch.nn.functional import scaled_dot_product_attention

    queries, keys, values = (
        batch(4, 16, 512, 64).requires_grad_() for _ in ("queries", "keys", "values")
    )
    scaled_dot_product_attention(queries, keys, values).sum().backward()


@step("transformer layers, float32")
def _transformer() -> None:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, (batch(16, 256, 512),), mean_square, optimizer)


@step("transformer layers, bfloat16 autocast")
def _transformer_bfloat16() -> None:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, (batch(16, 512, 512),), mean_square, optimizer, autocast="bfloat16")


@step("embedding and cross-entropy of 32,000 tokens")
def _language_model() -> None:
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


@step("convolutions in 2D, float32")
def _convolutions() -> None:
    import torch

    model = convolutions(2, 64, 4)
    train(model, (batch(16, 3, 112, 112),), mean_square, torch.optim.SGD(model.parameters(), 0.1))


@step("convolutions in 2D, float16 autocast, channels last")
def _convolutions_channels_last() -> None:
    import torch

    model = convolutions(2, 64, 4, norm=False).to(memory_format=torch.channels_last)
    data = batch(16, 3, 112, 112).contiguous(memory_format=torch.channels_last)
    train(model, (data,), mean_square, autocast="float16")


@step("convolutions in 1D, float32")
def _convolutions_in_1d() -> None:
    train(convolutions(1, 128, 3), (batch(32, 3, 4096),), mean_square)


@step("convolutions in 3D, bfloat16")
def _convolutions_in_3d() -> None:
    train(convolutions(3, 32, 2).bfloat16(), (batch(2, 3, 32, 64, 64).bfloat16(),), mean_square)


@step("normalizations and activations")
def _normalizations() -> None:
    from torch import nn

    model = nn.Sequential(
        nn.GroupNorm(8, 64), nn.SiLU(), nn.LayerNorm([64, 56, 56]), nn.GELU(), nn.Dropout(0.1)
    ).cuda()
    train(model, (batch(32, 64, 56, 56).requires_grad_(),), mean_square)


@step("sort, gather and reductions")
def _sorting() -> None:
    import torch

    values, order = batch(4_000_000).sort()
    torch.gather(values.cumsum(0), 0, order).topk(1000)


@step(NEEDS_TRITON)
def _compiled() -> None:
    import torch

    model = mlp()
    train(
        torch.compile(model),
        (batch(512, 2048),),
        mean_square,
        torch.optim.AdamW(model.parameters()),
    )
