"""Steps of timm: convolutional networks and vision transformers."""

import pytest
import timm
import torch


@pytest.mark.gpu_memory(card="L4", values="off")
@pytest.mark.parametrize(
    "name", ["resnet50", "convnext_atto", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"]
)
def test_a_training_step(name):
    model = timm.create_model(name, pretrained=False).cuda()
    model(torch.randn(4, 3, 224, 224, device="cuda")).sum().backward()
