"""diffusers: group offloading and layerwise casting save memory, each more than the last."""

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from diffusers.models import ModelMixin
from diffusers.models.attention_processor import AttnProcessor


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.outer = torch.nn.Linear(width, width)

    def forward(self, hidden):
        return self.outer(self.inner(hidden).relu())


class Stack(ModelMixin):
    def __init__(self, width=1024, depth=4):
        super().__init__()
        self.entry = torch.nn.Linear(64, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.exit = torch.nn.Linear(width, 64)

    def forward(self, hidden):
        hidden = self.entry(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.exit(hidden)


@pytest.mark.gpu_memory(card="T4")
@torch.no_grad()
def test_each_kind_of_group_offloading_takes_less_than_the_one_before(gpu_memory):
    batch = torch.randn(4, 64, device="cuda")
    with gpu_memory.measure("whole") as whole:
        model = Stack().to("cuda")
        model(batch)
    del model
    with gpu_memory.measure("blocks of 3", less_than=whole) as threes:
        model = Stack()
        model.enable_group_offload(
            torch.device("cuda"), offload_type="block_level", num_blocks_per_group=3
        )
        model(batch)
    del model
    with gpu_memory.measure("single blocks", less_than=threes) as ones:
        model = Stack()
        model.enable_group_offload(
            torch.device("cuda"), offload_type="block_level", num_blocks_per_group=1
        )
        model(batch)
    del model
    with gpu_memory.measure("leaves", less_than=ones):
        model = Stack()
        model.enable_group_offload(torch.device("cuda"), offload_type="leaf_level")
        model(batch)


@pytest.mark.gpu_memory(card="T4")
@torch.no_grad()
def test_layerwise_casting_takes_less(gpu_memory):
    batch = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    with gpu_memory.measure("bfloat16") as plain:
        model = Stack().to("cuda", torch.bfloat16)
        model(batch)
    del model
    with gpu_memory.measure("float8", less_than=plain):
        model = Stack().to(torch.bfloat16)
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
        model.to("cuda")(batch)


@pytest.mark.gpu_memory(card="T4", max_allocated_gib=5e9 / 2**30)
@pytest.mark.parametrize("slices", ["auto", "max", 2])
@torch.no_grad()
def test_slices_of_a_unet_s_attention_take_less(gpu_memory, slices):
    with torch.device("cuda"):
        model = UNet2DConditionModel(cross_attention_dim=768).half()
        latents = torch.randn(1, 4, 64, 64, dtype=torch.float16)
        prompt = torch.randn(1, 77, 768, dtype=torch.float16)
    model.set_attn_processor(AttnProcessor())
    with gpu_memory.measure("whole") as whole:
        model(latents, 1, prompt)
    with gpu_memory.measure("slices", less_than=whole):
        model.set_attention_slice(slices)
        model(latents, 1, prompt)


@pytest.mark.gpu_memory(card="T4")
def test_a_unet_s_training_step():
    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(2, 3, 32, 32, device="cuda"), 10).sample.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
