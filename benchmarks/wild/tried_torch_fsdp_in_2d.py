"""Beside tensor parallelism, FSDP2 takes more than FSDP1."""

import pytest
import torch

PACKAGE = "torch"
GOOD = "2.6.0"
BAD = "2.15.0"
VERSIONS = ("2.6.0", "2.15.0")
WITH = ("numpy<2",)
REPORTED = "87 GB with FSDP2, 71 GB with FSDP1, in April 2024"
LINKS = ("pytorch/torchtitan#191",)
WIDTH, LAYERS, DATA, TENSOR = 1024, 8, 2, 4


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def blocks():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh("cuda", (DATA, TENSOR), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Sequential(*(Block() for _ in range(LAYERS))).cuda()
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    for block in model:
        parallel.parallelize_module(block, mesh["tensor"], plan)
    return model, mesh["data"]


def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 1024, WIDTH, device="cuda")).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu_memory(card="H100", world_size=DATA * TENSOR)
def test_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model, mesh = blocks()
    train(
        FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=0,
            use_orig_params=True,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16),
        )
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.gpu_memory(card="H100", world_size=DATA * TENSOR)
def test_fsdp2():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = blocks()
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    train(fully_shard(model, mesh=mesh))
