"""A plugin of pytest for diffusers' own tests: Stable Diffusion 2 in its size, without its weights.

    RUN_SLOW=1 PYTHONPATH=benchmarks/ecosystem/limits_by_hand:. python -m pytest \\
        -p without_weights CHECKOUT/tests/pipelines/stable_diffusion_2/test_stable_diffusion.py

``StableDiffusionPipeline.from_pretrained`` makes a pipeline from configurations, and downloads
nothing. The checkout's tests run unmodified; options of pytest measure them.
benchmarks/results/diffusers_unittest.txt is a recorded run.
"""

from __future__ import annotations

from typing import Any


def pytest_collection_modifyitems() -> None:
    """Replace ``from_pretrained`` once the tests' modules are imported."""
    import diffusers

    diffusers.StableDiffusionPipeline.from_pretrained = staticmethod(pipeline)


def pipeline(name: str, torch_dtype: Any = None, **_options: Any) -> Any:
    """Return a pipeline of Stable Diffusion 2, with random weights, on the CPU."""
    import diffusers
    import torch
    import transformers

    large = name.endswith("stable-diffusion-2")
    unet = diffusers.UNet2DConditionModel(
        sample_size=96 if large else 64,
        cross_attention_dim=1024,
        attention_head_dim=(5, 10, 20, 20),
        use_linear_projection=True,
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        sample_size=768,
    )
    text = transformers.CLIPTextConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=23,
        num_attention_heads=16,
        hidden_act="gelu",
        bos_token_id=0,
        eos_token_id=1,
    )
    words = {word: number for number, word in enumerate(("<|startoftext|>", "<|endoftext|>", "a"))}
    made = diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=77),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return made.to(torch_dtype or torch.float32)
