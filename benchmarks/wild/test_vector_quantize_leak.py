"""vector-quantize-pytorch 1.6.12 keeps the graph of each step in the averages of its codes."""

import pytest
import torch

PACKAGE = "vector-quantize-pytorch"
GOOD = "1.6.10"
BAD = "1.6.15"
RELEASE = "1.6.12"
WITH = ("numpy",)
REPORTED = "out of memory after several iterations, a leak"
LINKS = ("lucidrains/vector-quantize-pytorch#56",)


@pytest.mark.filterwarnings("ignore")  # of what it imports
@pytest.mark.gpu_memory(card="A100-80GB")
def test_eight_steps():
    from vector_quantize_pytorch import GroupedResidualVQ

    encoder = torch.nn.Linear(64, 256).cuda()
    quantizer = GroupedResidualVQ(dim=256, num_quantizers=4, codebook_size=512, groups=2).cuda()
    for _ in range(8):
        quantized, _, loss = quantizer(encoder(torch.randn(4, 1024, 64, device="cuda")))
        (quantized.mean() + loss.sum()).backward()
