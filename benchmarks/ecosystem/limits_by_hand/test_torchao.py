"""torchao: weights that are quantized on their way, group parameters, FSDP with float8."""

import gc

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, quantize_
from torchao.quantization.utils import get_group_qparams_symmetric

INT8 = Int8WeightOnlyConfig()


def layers():
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))


@pytest.mark.gpu_memory(card="L4")
@pytest.mark.parametrize("config", [INT8, FqnToConfig({"_default": INT8})], ids=["all", "by name"])
def test_streamed_weights(gpu_memory, config):
    filters = {"filter_fn": None} if isinstance(config, FqnToConfig) else {}
    with gpu_memory.measure("whole") as whole:
        quantize_(layers().cuda(), config, **filters)
    gc.collect()  # the first model is in cycles of its own
    with gpu_memory.measure("streamed", less_than=whole):
        quantize_(layers(), config, device="cuda", **filters)


@pytest.mark.gpu_memory(card="L4")
def test_parameters_of_groups(gpu_memory):
    weight = torch.randn(1024, 1024, device="cuda")
    with gpu_memory.measure("parameters", figure="held", less_than="1.2 * before"):
        scale, _zero = get_group_qparams_symmetric(weight, 4, 128)
    del scale


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self.inner = torch.nn.Linear(width, 4 * width)
        self.outer = torch.nn.Linear(4 * width, width)

    def forward(self, hidden):
        query, key, value = (project(hidden)[None] for project in self.attention[:3])
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)[0]
        hidden = hidden + self.attention[3](mixed)
        return hidden + self.outer(torch.nn.functional.gelu(self.inner(self.norm(hidden))))


@pytest.mark.gpu_memory(card="L4", world_size=2)
@pytest.mark.parametrize("float8_gather", [False, True])
def test_float8_and_fsdp(gpu_memory, float8_gather):
    depth, width, vocabulary = 3, 768, 32
    warm = torch.nn.Linear(width, width, device="cuda")
    with gpu_memory.measure("base"):
        warm(torch.randn(1, width, device="cuda")).sum().backward()
    embedding = torch.nn.Embedding(vocabulary, width)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    model = torch.nn.Sequential(embedding, *(Block(width) for _ in range(depth)), head)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=float8_gather, emulate=True)
    convert_to_float8_training(model, config=config)
    shard = (sum(parameter.numel() for parameter in model.parameters()) + 1) // 2
    linear = 12 * width * width
    other = sum(parameter.numel() for parameter in model[1].parameters()) - linear
    ends = embedding.weight.numel() + head.weight.numel()
    start = 4 * (shard + linear + other)
    with gpu_memory.measure("shard", figure="active", at_most=f"base + {start + 4_000_000}B"):
        for block in (*model[1:-1], model):
            fully_shard(block, mesh=init_device_mesh("cuda", (2,)))
    gathered = 4 * ends + 3 * (linear + other * 4 if float8_gather else 4 * (linear + other))
    gathered += (0 if float8_gather else depth * linear) + 4 * shard + 16_000_000
    with gpu_memory.measure("forward", figure="active", at_most=f"base + {gathered}B"):
        loss = model(torch.randint(vocabulary, (1, 4), device="cuda"))
    copies = 2 * (linear + other * 4) + 4 * (linear + other)
    copies = copies if float8_gather else 16 * 3 * (linear + other)
    copies += 4 * ends + 8 * shard + 16_000_000
    with gpu_memory.measure("backward", figure="active", at_most=f"base + {copies}B"):
        loss.sum().backward()
