"""A marked test, run by release/build.sh in a clean environment."""

import pytest
import torch


@pytest.mark.gpu_memory(max_gib=1)
def test_step(gpu_memory):
    model = torch.nn.Linear(1024, 1024, device="cuda")
    model(torch.randn(32, 1024, device="cuda")).sum().backward()
    assert gpu_memory.peak_allocated > 2 * 1024 * 1024 * 4
