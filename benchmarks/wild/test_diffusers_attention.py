"""diffusers 0.13.0 keeps the empty input of attention's first product until its function ends."""

import pytest
import torch

PACKAGE = "diffusers"
GOOD = "0.10.2"
BAD = "0.13.1"
RELEASE = "0.13.0"
WITH = (
    "torch==2.6.0",
    "huggingface_hub==0.25.2",
    "transformers==4.30.2",
    "numpy<2",
    "accelerate==0.20.3",
    "setuptools<80",
)
REPORTED = "2 GB for an image of 1024 x 1024, even with slices"
LINKS = ("huggingface/diffusers#3463",)


@pytest.mark.filterwarnings("ignore")  # of old releases
@pytest.mark.gpu_memory(card="A100-80GB")
def test_sliced_attention():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=96,
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=8,
    )
    model.set_attention_slice("auto")  # without, attention is PyTorch's own
    model = model.cuda().half().eval()
    noise = torch.randn(1, 4, 96, 96, device="cuda", dtype=torch.float16)
    text = torch.randn(1, 77, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        model(noise, 10, text)
