"""Steps of diffusers: a UNet and a transformer in training, an autoencoder whole and in tiles."""

import diffusers
import pytest
import torch

pytestmark = pytest.mark.gpu_memory(card="L4", values="off")


def test_a_unet_s_training_step():
    model = diffusers.UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 128, 128, 128), cross_attention_dim=64
    ).cuda()
    latents = torch.randn(2, 4, 32, 32, device="cuda")
    prompt = torch.randn(2, 77, 64, device="cuda")
    model(latents, 10, prompt).sample.sum().backward()


def test_a_transformer_s_training_step():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=64, in_channels=4, num_layers=4, sample_size=32
    ).cuda()
    latents = torch.randn(2, 4, 32, 32, device="cuda")
    label = torch.zeros(2, dtype=torch.long, device="cuda")
    model(latents, timestep=label, class_labels=label).sample.sum().backward()


@pytest.mark.parametrize("tiled", [False, True])
def test_an_autoencoder(tiled):
    model = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=128,
    ).cuda()
    if tiled:
        model.enable_tiling()
    with torch.no_grad():
        latents = model.encode(torch.randn(1, 3, 512, 512, device="cuda")).latent_dist.mode()
        model.decode(latents)
