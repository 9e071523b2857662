"""denoising-diffusion-pytorch 0.19.1 has one more stage of full size, and more channels before.

The report suspects an older change.
"""

import pytest
import torch

PACKAGE = "denoising-diffusion-pytorch"
GOOD = "0.15.7"
BAD = "0.22.0"
RELEASE = "0.19.1"
WITH = ("numpy<2",)
REPORTED = "out of memory with 512 x 512 images, which fitted before"
LINKS = ("lucidrains/denoising-diffusion-pytorch#56",)


@pytest.mark.filterwarnings("ignore")  # of old releases
@pytest.mark.gpu_memory(card="A100-80GB")
def test_training_step():
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    model = Unet(dim=32, dim_mults=(1, 2, 4, 8), channels=2)
    diffusion = GaussianDiffusion(model, image_size=128, timesteps=100, loss_type="l1").cuda()
    diffusion(torch.rand(2, 2, 128, 128, device="cuda")).backward()
