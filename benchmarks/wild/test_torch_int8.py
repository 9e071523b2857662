"""torch 2.10's compiler saves what checkpointing would recompute, in an autograd.Function."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

PACKAGE = "torch"
GOOD = "2.9.1"
BAD = "2.10.0"
RELEASE = "2.10.0"
VERSIONS = ("2.9.1", "2.10.0")
WITH = ("numpy",)
REPORTED = "14.5 GB where 2.9.1 takes 11"
LINKS = ("pytorch/pytorch#175058",)
WIDTH, TOKENS, BLOCKS = 1024, 2048, 16


def multiply(values, weight):
    """Multiply in int8, and give bfloat16 back, as OneTrainer's linear layers do."""
    scale = values.abs().amax(dim=-1, keepdim=True).div(127)
    rounded = values.float().div(scale).round().clamp(-128, 127).to(torch.int8)
    return torch._int_mm(rounded, weight).float().mul_(scale).to(torch.bfloat16)


class Int8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, weight):
        ctx.save_for_backward(weight)
        return multiply(values, weight.T)

    @staticmethod
    def backward(ctx, grad):
        return multiply(grad, ctx.saved_tensors[0]), None


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("up", torch.zeros(4 * WIDTH, WIDTH, dtype=torch.int8))
        self.register_buffer("down", torch.zeros(WIDTH, 4 * WIDTH, dtype=torch.int8))

    def step(self, values):
        return values + Int8.apply(torch.nn.functional.gelu(Int8.apply(values, self.up)), self.down)

    def forward(self, values):
        return checkpoint(self.step, values, use_reentrant=False)


@pytest.mark.gpu_memory(card="A100-80GB")
def test_checkpointed_int8_blocks():
    blocks = torch.nn.Sequential(*(Block() for _ in range(BLOCKS))).cuda()
    for block in blocks:
        block.compile(fullgraph=True)
    values = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        blocks(values).sum().backward()
