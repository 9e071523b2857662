"""timm: a step of a ResNet and one of a vision transformer."""

import pytest
import timm
import timm.optim
import torch


@pytest.mark.gpu_memory(card="T4")
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_a_training_step(name):
    model = timm.create_model(name, pretrained=False).cuda()
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw")
    for _ in range(2):
        model(torch.randn(4, 3, 224, 224, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
