"""The suite of the pictures: GROWN=1 switches a regression on."""

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet50


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 12, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, width=768, depth=12, vocabulary=32000):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.gpu_memory(card="T4", batch_size=8)
def test_decoder_step(gpu_memory):
    model = Decoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        tokens = torch.randint(32000, (gpu_memory.batch_size, 256), device="cuda")
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "GROWN" in os.environ:
            losses.append(cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))


@pytest.mark.gpu_memory(card="T4", batch_size=8)
def test_decoder_inference(gpu_memory):
    model = Decoder().cuda()
    with torch.inference_mode():
        model(torch.randint(32000, (gpu_memory.batch_size, 256), device="cuda"))


@pytest.mark.gpu_memory(max_gib=8, batch_size=32)
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "amp"])
def test_resnet50_step(gpu_memory, amp):
    model = resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        images = torch.randn(gpu_memory.batch_size, 3, 224, 224, device="cuda")
        labels = torch.zeros(gpu_memory.batch_size, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.float16, enabled=amp):
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
