"""einops: rearranged and reduced tensors."""

import einops
import pytest
import torch


@pytest.mark.gpu_memory(card="T4")
def test_patches():
    images = torch.randn(8, 3, 224, 224, device="cuda", requires_grad=True)
    patches = einops.rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=16, q=16)
    einops.reduce(patches, "b n d -> b d", "mean").sum().backward()
