"""accelerate: a prepared model, optimizer and loader, with gradient accumulation."""

import pytest
import torch
from accelerate import Accelerator


@pytest.mark.gpu_memory(card="T4")
def test_a_loop_with_accumulation():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 1024))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
