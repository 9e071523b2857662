"""The matrix's steps over torchvision's models, random weights."""

# ruff: noqa: ANN401 - what a step takes besides is of any type

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.fidelity.matrix import add
from benchmarks.fidelity.training import BF16, by_class, images, train

if TYPE_CHECKING:
    from torch import nn


def add_steps() -> None:
    """Torchvision's models, random weights."""

    def make(name: str) -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None)

    def inception(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).logits, y)

    def densely(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x)["out"], y)

    def row(name: str, batch: int, suffix: str = "", **more: Any) -> None:
        step = partial(train, partial(make, name), images(batch), by_class, **more)
        add(f"tv-{name}{suffix}", "torchvision", step, needs=("torchvision",))

    row("resnet18", 64, optimizer="sgd")
    row("resnet50", 32, optimizer="adam")
    row("resnet50", 32, "-bf16", optimizer="sgd", amp=BF16, channels_last=True)
    row("resnext50_32x4d", 32, optimizer="sgd")
    row("wide_resnet50_2", 32, optimizer="sgd")
    row("densenet121", 32)
    row("vgg16", 32, optimizer="sgd")
    row("alexnet", 128, optimizer="sgd")
    row("mobilenet_v3_large", 64)
    row("efficientnet_b0", 64)
    row("mnasnet1_0", 64)
    row("shufflenet_v2_x1_0", 64)
    row("regnet_y_400mf", 64)
    row("convnext_tiny", 32, amp=BF16)
    row("swin_t", 32, amp=BF16)
    row("vit_b_16", 32)
    add(
        "tv-deeplabv3_resnet50",
        "torchvision",
        partial(
            train,
            lambda: __import__("torchvision").models.segmentation.deeplabv3_resnet50(
                weights=None, weights_backbone=None
            ),
            lambda: (
                torch.randn(8, 3, 256, 256, device="cuda"),
                torch.randint(0, 21, (8, 256, 256), device="cuda"),
            ),
            densely,
            optimizer="sgd",
        ),
        needs=("torchvision",),
    )
    add(
        "tv-inception_v3",
        "torchvision",
        partial(
            train,
            lambda: __import__("torchvision").models.inception_v3(weights=None, init_weights=False),
            images(32, 299),
            inception,
            optimizer="sgd",
        ),
        needs=("torchvision",),
    )
