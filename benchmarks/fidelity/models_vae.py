"""Flux's autoencoder, after its public description: encoding keeps the outputs of all blocks."""

# ruff: noqa: D102 - forward() of a module computes what the class says

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

WIDTHS = (128, 256, 512, 512)
"""channels of the four levels"""


def norm(channels: int) -> nn.GroupNorm:
    """The group normalization in all blocks."""
    return nn.GroupNorm(32, channels, eps=1e-6)


def swish(x: Tensor) -> Tensor:
    """The activation, as a single operator (data/README.md)."""
    return F.silu(x)


class Residual(nn.Module):
    """Two convolutions, and a 1x1 shortcut if the number of channels changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = norm(outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        h = x
        h = self.norm1(h)
        h = swish(h)
        h = self.conv1(h)
        h = self.norm2(h)
        h = swish(h)
        h = self.conv2(h)
        if self.shortcut is not None:
            x = self.shortcut(x)
        return x + h


class Attention(nn.Module):
    """Attention with one head over all positions; its projections are 1x1 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.project = nn.Conv2d(channels, channels, 1)

    def attend(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        batch, channels, height, width = q.shape
        q = q.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
        k = k.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
        v = v.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
        x = F.scaled_dot_product_attention(q, k, v)
        return x.squeeze(1).transpose(1, 2).reshape(batch, channels, height, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.attend(x))


class Middle(nn.Module):
    """The middle: a residual block, attention, a residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = Residual(channels, channels)
        self.attention = Attention(channels)
        self.second = Residual(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.attention(x)
        return self.second(x)


class Down(nn.Module):
    """Halve the size, padding only at the right and the bottom."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1))
        return self.conv(x)


class Up(nn.Module):
    """Double the size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(x)


class Encoder(nn.Module):
    """Encode images to means and variances."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTHS[0], 3, padding=1)
        layers: list[nn.Module] = []
        before = WIDTHS[0]
        for level, width in enumerate(WIDTHS):
            layers += [Residual(before, width), Residual(width, width)]
            layers += [Down(width)] if level < len(WIDTHS) - 1 else []
            before = width
        self.layers = nn.ModuleList(layers)
        self.middle = Middle(before)
        self.norm, self.last = norm(before), nn.Conv2d(before, 2 * latent, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.first(x)]
        for layer in self.layers:
            h = layer(outputs[-1])
            outputs.append(h)
        h = outputs[-1]
        h = self.middle(h)
        h = self.norm(h)
        h = swish(h)
        return self.last(h)


class Decoder(nn.Module):
    """Decode latents to images."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        before = WIDTHS[-1]
        self.first = nn.Conv2d(latent, before, 3, padding=1)
        self.middle = Middle(before)
        levels: list[nn.Module] = []
        for level, width in enumerate(reversed(WIDTHS)):
            blocks = [Residual(before, width), Residual(width, width), Residual(width, width)]
            blocks += [Up(width)] if level < len(WIDTHS) - 1 else []
            levels.insert(0, nn.ModuleList(blocks))  # weights are allocated in this order
            before = width
        self.levels = nn.ModuleList(levels)
        self.norm, self.last = norm(before), nn.Conv2d(before, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.first(z)
        h = self.middle(h)
        for level in reversed(self.levels):
            for layer in level:
                h = layer(h)
        h = self.norm(h)
        h = swish(h)
        return self.last(h)


class FluxVae(nn.Module):
    """The autoencoder of Flux: 16 channels of latents."""

    scale, shift = 0.3611, 0.1159

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(16), Decoder(16)

    def encode(self, x: Tensor) -> Tensor:
        mean, log_variance = torch.chunk(self.encoder(x), 2, dim=1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.scale * (z - self.shift)

    def decode(self, z: Tensor) -> Tensor:
        z = z / self.scale + self.shift
        return self.decoder(z)
