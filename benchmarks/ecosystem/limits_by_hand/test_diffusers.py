"""diffusers: limits of pipelines, orders of offloading, memory that a component gives back.

Stable Diffusion has the sizes of version 1.4, and no trained weights.
"""

import gc

import diffusers
import pytest
import torch
import transformers
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention_processor import AttnProcessor
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

HALF = torch.float16


def stable_diffusion(device="cuda"):
    vision, text = transformers.CLIPVisionConfig, transformers.CLIPTextConfig
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    large |= {"num_attention_heads": 16, "patch_size": 14}
    with torch.device(device):
        unet = diffusers.UNet2DConditionModel(cross_attention_dim=768, sample_size=64).to(HALF)
        vae = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            sample_size=512,
        ).to(HALF)
        prompts = transformers.CLIPTextModel(
            text(hidden_size=768, intermediate_size=3072, num_attention_heads=12)
        ).to(HALF)
        checker = StableDiffusionSafetyChecker(
            transformers.CLIPConfig(vision_config=vision(**large).to_dict(), projection_dim=768)
        ).to(HALF)
    unet.set_attn_processor(AttnProcessor())
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=prompts,
        tokenizer=None,
        unet=unet,
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=checker,
        feature_extractor=transformers.CLIPImageProcessor(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline, images=1):
    prompt = torch.zeros(images, 77, 768, dtype=HALF, device="cuda")
    return pipeline(prompt_embeds=prompt, negative_prompt_embeds=prompt, num_inference_steps=2)


@pytest.mark.gpu_memory(card="T4")
def test_attention_slicing(gpu_memory):
    pipeline = stable_diffusion()
    pipeline.enable_attention_slicing()
    with gpu_memory.measure("sliced", less_than="3.75GB"):
        draw(pipeline)
    pipeline.disable_attention_slicing()
    pipeline.unet.set_attn_processor(AttnProcessor())
    with gpu_memory.measure("whole", more_than="3.75GB"):
        draw(pipeline)


@pytest.mark.gpu_memory(card="T4")
def test_vae_slicing(gpu_memory):
    pipeline = stable_diffusion()
    pipeline.enable_attention_slicing()
    pipeline.vae.enable_slicing()
    with gpu_memory.measure("sliced", less_than="4GB"):
        draw(pipeline, images=4)
    pipeline.vae.disable_slicing()
    with gpu_memory.measure("whole", more_than="4GB"):
        draw(pipeline, images=4)


@pytest.mark.gpu_memory(card="T4", max_allocated_gib=2.8e9 / 2**30)
def test_sequential_offloading():
    pipeline = stable_diffusion("cpu")
    pipeline.enable_attention_slicing(1)
    pipeline.enable_sequential_cpu_offload(device="cuda")
    draw(pipeline)


@pytest.mark.gpu_memory(card="T4")
def test_model_offloading(gpu_memory):
    with gpu_memory.measure("whole"):
        draw(stable_diffusion())
    pipeline = stable_diffusion("cpu")
    pipeline.enable_model_cpu_offload(device="cuda")
    with gpu_memory.measure("offloaded", less_than="3.5GB"):
        draw(pipeline)
    pipeline.enable_attention_slicing()
    with gpu_memory.measure("sliced", less_than="3GB"):
        draw(pipeline)
    gpu_memory.ordered("sliced < offloaded < whole")


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.outer = torch.nn.Linear(width, width)

    def forward(self, hidden):
        return self.outer(self.inner(hidden).relu())


class Stack(diffusers.ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, width=256, depth=8):
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
def test_group_offloading(gpu_memory):
    batch = torch.randn(4, 64, device="cuda")
    with gpu_memory.measure("whole"):
        Stack().to("cuda")(batch)
    kinds = {
        "3 blocks": {"offload_type": "block_level", "num_blocks_per_group": 3},
        "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
        "leaf": {"offload_type": "leaf_level"},
    }
    kinds["streamed block"] = {**kinds["block"], "use_stream": True}
    kinds["streamed leaf"] = {**kinds["leaf"], "use_stream": True}
    for kind, options in kinds.items():
        model = Stack()
        model.enable_group_offload(torch.device("cuda"), **options)
        with gpu_memory.measure(kind):
            model(batch)
    gpu_memory.ordered("leaf <= streamed leaf < block <= streamed block < 3 blocks < whole")


@pytest.mark.gpu_memory(card="L4")
@torch.no_grad()
def test_layerwise_casting(gpu_memory):
    float8, bfloat16, float32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
    kinds = {"32": (float32, float32), "8 in 32": (float8, float32), "8 in 16": (float8, bfloat16)}
    for kind, (storage, compute) in kinds.items():
        model = Stack().to("cuda", compute)
        model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=compute)
        with gpu_memory.measure(kind):
            model(torch.randn(4, 64, device="cuda", dtype=compute))
        del model
        gc.collect()  # the hooks of diffusers are in cycles
    gpu_memory.ordered("8 in 16 < 8 in 32 < 32")


@pytest.mark.gpu_memory(card="T4", max_allocated_gib=5e9 / 2**30)
@pytest.mark.parametrize("slices", ["auto", "max", 2, 16 * [2, 3]], ids=str)
@torch.no_grad()
def test_sliced_attention_of_a_unet(slices):
    with torch.device("cuda"):
        unet = diffusers.UNet2DConditionModel(cross_attention_dim=768)
        unet.set_attention_slice(slices)
        unet(torch.randn(4, 4, 64, 64), 1, torch.randn(4, 77, 768))


@pytest.mark.gpu_memory(card="T4")
@pytest.mark.parametrize(("weights", "share"), [("int8", 1 / 1.5), ("int4", 1 / 3)])
def test_quantized_weights(gpu_memory, tmp_path, weights, share):
    Stack(1024).save_pretrained(tmp_path)
    with gpu_memory.measure("whole") as whole:
        model = Stack.from_pretrained(tmp_path).to("cuda")
    del model
    config = diffusers.QuantoConfig(weights_dtype=weights)
    with gpu_memory.measure("quantized", at_most=share, of=whole):
        Stack.from_pretrained(tmp_path, quantization_config=config).to("cuda")


@pytest.mark.gpu_memory(card="T4")
def test_an_unloaded_component_gives_its_memory_back(gpu_memory):
    manager = diffusers.ComponentsManager()
    unet = diffusers.UNet2DConditionModel(cross_attention_dim=768).to("cuda")
    footprint = sum(parameter.nbytes for parameter in unet.parameters())
    component = manager.add("unet", unet)
    del unet
    with gpu_memory.measure("unload", figure="held", at_most=f"before - {0.9 * footprint:.0f}B"):
        manager.remove(component)
