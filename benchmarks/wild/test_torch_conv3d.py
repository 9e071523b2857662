"""torch 2.9 no longer gives bfloat16 convolutions in 3D to cuDNN: it unfolds their inputs."""

import pytest
import torch

PACKAGE = "torch"
GOOD = "2.8.0"
BAD = "2.9.1"
RELEASE = "2.9.0"
VERSIONS = ("2.8.0", "2.9.0", "2.9.1")
WITH = ()
REPORTED = "9.26 and 12.67 GB where 2.8 takes less"
LINKS = ("pytorch/pytorch#166643", "pytorch/pytorch#177406", "pytorch/pytorch#132300")


@pytest.mark.gpu_memory(card="A100-80GB")
def test_bfloat16_conv3d():
    convolution = torch.nn.Conv3d(64, 64, 3, padding=1).cuda().bfloat16()
    with torch.no_grad():
        convolution(torch.randn(1, 64, 17, 256, 256, device="cuda", dtype=torch.bfloat16))
