"""PyTorch's selective activation checkpointing, as torchtitan applies it to its blocks.

torchtitan's own test_mem reads memory_stats five times, and compares with hard-coded figures; here
the parts are compared with each other.
"""

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def every_other_product():
    """Save the results of every other matrix product, as torchtitan's SelectiveAC does."""
    products = {False: 0, True: 0}

    def policy(context, operator, *_args, **_kwargs):
        if operator not in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            return CheckpointPolicy.PREFER_RECOMPUTE
        products[context.is_recompute] += 1
        saved = products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def step(around):
    blocks = [Block().cuda() for _ in range(4)]
    x = torch.randn(2048, 1024, device="cuda", requires_grad=True)
    for block in blocks:
        x = around(block, x)
    x.sum().backward()


@pytest.mark.gpu_memory(card="L4")
def test_what_is_recomputed_is_not_held(gpu_memory):
    recomputed = functools.partial(checkpoint, use_reentrant=False)
    with gpu_memory.measure("none") as none:
        step(lambda block, x: block(x))
    with gpu_memory.measure("selective", less_than=none) as selective:
        step(functools.partial(recomputed, context_fn=every_other_product))
    with gpu_memory.measure("full", less_than=selective):
        step(recomputed)
