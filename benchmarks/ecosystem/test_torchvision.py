"""torchvision: a step of a ResNet, and one over regions that its own CUDA code aligns."""

import pytest
import torch
import torchvision


@pytest.mark.gpu_memory(card="T4")
def test_a_training_step():
    model = torchvision.models.resnet18().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 3, 224, 224, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu_memory(card="T4")
def test_aligned_regions():
    features = torch.randn(2, 64, 128, 128, device="cuda", requires_grad=True)
    regions = torch.tensor([[0.0, 0, 0, 64, 64], [1, 32, 32, 96, 96]], device="cuda")
    torchvision.ops.roi_align(features, regions.repeat(64, 1), 14).sum().backward()
