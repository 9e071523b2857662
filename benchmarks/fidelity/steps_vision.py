"""The matrix's steps over images: convolutional networks, U-Nets and vision transformers."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.fidelity import models_conv as m
from benchmarks.fidelity.matrix import add
from benchmarks.fidelity.models_transformer import Vit
from benchmarks.fidelity.training import BF16, FP16, by_class, by_label, images, train


def conv() -> None:
    """ResNets and other convolutional networks."""
    add(
        "convnet-fp32",
        "conv",
        partial(train, m.plain_convnet, images(64, 64, 100), by_class, optimizer="sgd"),
    )
    add(
        "convnet-channels-last-fp16",
        "conv",
        partial(
            train,
            m.plain_convnet,
            images(64, 64, 100),
            by_class,
            optimizer="sgd",
            amp=FP16,
            channels_last=True,
        ),
    )
    add("resnet50-fp32", "conv", partial(train, m.ResNet, images(32), by_class, optimizer="sgd"))
    add(
        "resnet50-adam-bf16",
        "conv",
        partial(train, m.ResNet, images(32), by_class, optimizer="adam", amp=BF16),
    )
    add(
        "resnet50-fp16-scaler",
        "conv",
        partial(train, m.ResNet, images(32), by_class, optimizer="sgd", amp=FP16),
    )
    add(
        "resnet50-channels-last",
        "conv",
        partial(
            train, m.ResNet, images(32), by_class, optimizer="sgd", amp=BF16, channels_last=True
        ),
    )
    add(
        "resnet50-checkpointed",
        "conv",
        partial(train, partial(m.ResNet, recompute=True), images(32), by_class, optimizer="sgd"),
    )
    add(
        "resnet50-accumulate-4",
        "conv",
        partial(train, m.ResNet, images(8), by_class, optimizer="sgd", accumulate=4),
    )
    add(
        "resnet50-benchmark",
        "conv",
        partial(train, m.ResNet, images(32), by_class, optimizer="sgd", benchmark=True),
    )
    add(
        "resnet101-fp32",
        "conv",
        partial(train, partial(m.ResNet, (3, 4, 23, 3)), images(32), by_class, optimizer="sgd"),
    )
    add("mobilenet-fp32", "conv", partial(train, m.mobile_net, images(64), by_class))
    add(
        "conv3d-fp32",
        "conv",
        partial(
            train,
            m.conv3d_net,
            lambda: (
                torch.randn(4, 3, 16, 112, 112, device="cuda"),
                torch.randint(0, 10, (4,), device="cuda"),
            ),
            by_class,
        ),
    )


def pictures() -> tuple:
    """Images and their masks."""
    return torch.randn(8, 3, 256, 256, device="cuda"), torch.zeros(8, 256, 256, device="cuda")


def unet() -> None:
    """U-Nets, and an autoencoder."""
    add("unet-fp32", "unet", partial(train, m.UNet, pictures, by_label))
    add("unet-bf16", "unet", partial(train, m.UNet, pictures, by_label, amp=BF16))
    add(
        "unet-wide-channels-last",
        "unet",
        partial(train, partial(m.UNet, 64), pictures, by_label, amp=BF16, channels_last=True),
    )
    add(
        "autoencoder-fp32",
        "unet",
        partial(
            train,
            m.Generator,
            lambda: (torch.randn(64, 3, 128, 128, device="cuda"),),
            lambda model, x: F.mse_loss(model(x), x),
        ),
    )


def vit() -> None:
    """Vision transformers."""
    add("vit-small-fp32", "vit", partial(train, Vit, images(32), by_class))
    add("vit-small-bf16", "vit", partial(train, Vit, images(32), by_class, amp=BF16))
    add(
        "vit-base-fp16-scaler",
        "vit",
        partial(train, partial(Vit, 768, 12), images(32), by_class, amp=FP16),
    )
    add(
        "vit-base-pure-bf16",
        "vit",
        partial(train, partial(Vit, 768, 12), images(32), by_class, dtype=BF16),
    )


def add_steps() -> None:
    """Put these steps into the matrix."""
    conv()
    unet()
    vit()
