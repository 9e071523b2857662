"""transformers 4.32.0 multiplies all queries with all pixels: an einsum did not keep these."""

import pytest
import torch

PACKAGE = "transformers"
GOOD = "4.31.0"
BAD = "4.32.1"
RELEASE = "4.32.0"
WITH = ("numpy<2", "scipy")
REPORTED = "out of memory in inference: tried to allocate 56.25 GiB"
LINKS = ("huggingface/transformers#25709",)


@pytest.mark.gpu_memory(card="A100-80GB")
def test_mask2former_inference():
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(
        image_size=384,
        embed_dim=32,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 4, 8],
        window_size=12,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(backbone_config=backbone, encoder_layers=1, decoder_layers=3)
    model = Mask2FormerForUniversalSegmentation(config).cuda().eval()
    with torch.no_grad():
        model(torch.rand(1, 3, 384, 384, device="cuda"))
