"""Convolutional networks of the fidelity matrix: plain PyTorch, sizes by argument."""

# ruff: noqa: D102 - forward() of a module computes what the class says

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.checkpoint import checkpoint


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list:
    """A convolution, its batch norm and a ReLU in place."""
    padding = kernel // 2
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def plain_convnet(width: int = 64, classes: int = 100) -> nn.Module:
    """VGG-like: pairs of 3x3 convolutions between poolings."""
    layers, before = [], 3
    for factor in (1, 2, 4, 8):
        here = width * factor
        layers += [*conv_bn(before, here), *conv_bn(here, here), nn.MaxPool2d(2)]
        before = here
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class Bottleneck(nn.Module):
    """ResNet's bottleneck block."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        last = conv_bn(width, outputs, 1)[:2]
        self.body = nn.Sequential(
            *conv_bn(inputs, width, 1), *conv_bn(width, width, 3, stride), *last
        )
        same = inputs == outputs and stride == 1
        self.skip = (
            nn.Identity() if same else nn.Sequential(*conv_bn(inputs, outputs, 1, stride)[:2])
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


class ResNet(nn.Module):
    """A bottleneck ResNet; each block checkpointed where asked."""

    def __init__(
        self,
        depths: tuple[int, ...] = (3, 4, 6, 3),
        classes: int = 1000,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks, before = [], 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for index in range(depth):
                blocks.append(Bottleneck(before, width, 2 if stage and not index else 1))
                before = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, classes)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x.mean((2, 3)))


def mobile_net(width: int = 32, classes: int = 1000) -> nn.Module:
    """Depthwise-separable convolutions."""
    layers, before = conv_bn(3, width, 3, 2), width
    for outputs, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers += [*conv_bn(before, before, 3, stride, groups=before), *conv_bn(before, outputs, 1)]
        before = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def conv3d_net(width: int = 16, classes: int = 10) -> nn.Module:
    """Video: 3-d convolutions."""
    layers, before = [], 3
    for factor in (1, 2, 4):
        layers += [nn.Conv3d(before, width * factor, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)]
        before = width * factor
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(before, classes))


class UNet(nn.Module):
    """A U-Net of four levels, one output channel."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width << level for level in range(4)]
        self.down = nn.ModuleList(
            nn.Sequential(*conv_bn(a, b), *conv_bn(b, b))
            for a, b in zip([3, *sizes[:-1]], sizes, strict=True)
        )
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in reversed(sizes[:-1])
        )
        self.up = nn.ModuleList(
            nn.Sequential(*conv_bn(2 * size, size), *conv_bn(size, size))
            for size in reversed(sizes[:-1])
        )
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        kept.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([rise(x), kept.pop()], 1))
        return self.head(x).squeeze(1)


class Generator(nn.Module):
    """A DCGAN-like decoder with an encoder: an autoencoder of images."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        down, up, before = [], [], 3
        for factor in (1, 2, 4, 8):
            down += [nn.Conv2d(before, width * factor, 4, 2, 1), nn.LeakyReLU(0.2)]
            up = [nn.ConvTranspose2d(width * factor, before, 4, 2, 1), nn.ReLU(), *up]
            before = width * factor
        self.net = nn.Sequential(*down, *up[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)
