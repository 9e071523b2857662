"""FSDP takes more with torch's nightly builds of 30 August 2025 than with those two days older."""

import pytest
import torch

PACKAGE = "torch"
GOOD = "2.8.0"
BAD = "2.10.0"
WITH = ()
REPORTED = "166 GB on 28 August 2025, out of memory on 178.9 GB two days later"
LINKS = ("pytorch/pytorch#161860",)
WIDTH, HEADS, LAYERS = 1024, 16, 8


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qkvo":
            setattr(self, name, torch.nn.Linear(WIDTH, WIDTH, bias=False))
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        y = self.norm(x)
        heads = [
            it(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for it in (self.q, self.k, self.v)
        ]
        y = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 1024, WIDTH, device="cuda")).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu_memory(card="B200", world_size=8)
def test_fsdp2():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = torch.nn.Sequential(*(Block() for _ in range(LAYERS))).cuda()
    for block in model:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    train(fully_shard(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu_memory(card="B200", world_size=8)
def test_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    train(
        FullyShardedDataParallel(
            torch.nn.Sequential(*(Block() for _ in range(LAYERS))),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=0,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16),
        )
    )
