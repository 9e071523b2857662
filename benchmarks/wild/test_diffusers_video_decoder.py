"""diffusers 0.31.0 keeps what CogVideoX's convolutions need for the next frames, of all layers."""

import pytest
import torch

PACKAGE = "diffusers"
GOOD = "0.30.1"
BAD = "0.31.0"
RELEASE = "0.31.0"
WITH = ("transformers==4.44.2", "huggingface_hub<0.26", "numpy<2")
REPORTED = "out of memory on 80 GB with few frames"
LINKS = ("huggingface/diffusers#10091", "huggingface/diffusers#10035")


@pytest.mark.filterwarnings("ignore")  # of what it imports
@pytest.mark.gpu_memory(card="A100-80GB")
def test_decoding_of_nine_frames():
    from diffusers import AutoencoderKLCogVideoX

    model = AutoencoderKLCogVideoX(
        block_out_channels=(32, 64, 64, 128), layers_per_block=1, norm_num_groups=8
    )
    decoder = model.to(dtype=torch.bfloat16).eval().cuda()
    with torch.no_grad():
        decoder.decode(torch.randn(1, 16, 9, 30, 45, device="cuda", dtype=torch.bfloat16))
