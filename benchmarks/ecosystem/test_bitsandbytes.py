"""bitsandbytes: 8-bit and paged optimizers, and a linear layer of 4 bits."""

import bitsandbytes
import pytest
import torch


@pytest.mark.gpu_memory(card="T4")
@pytest.mark.parametrize("name", ["Adam8bit", "PagedAdamW8bit"])
def test_an_optimizer_s_steps(name):
    model = torch.nn.Linear(2048, 2048).cuda()
    optimizer = getattr(bitsandbytes.optim, name)(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 2048, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu_memory(card="T4")
@torch.no_grad()
def test_a_layer_of_4_bits():
    layer = bitsandbytes.nn.Linear4bit(2048, 2048, compute_dtype=torch.float16).cuda()
    layer(torch.randn(8, 2048, device="cuda", dtype=torch.float16))
