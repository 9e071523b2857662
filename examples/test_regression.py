"""A memory regression to switch on, to see how it is reported.

    GPUMEM_EXAMPLE_REGRESSION=1 pytest examples/test_regression.py

The committed baseline is that of the good version. The bad one computes the same values, so that no
other test fails, and on a GPU with room to spare nobody notices.
"""

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

REGRESSION = os.environ.get("GPUMEM_EXAMPLE_REGRESSION", "0") not in {"", "0"}


def network():
    """Return a network for images of 28 x 28 pixels and ten digits."""
    with torch.device("cuda"):
        return nn.Sequential(
            nn.Linear(784, 2048),
            nn.ReLU(),
            nn.Linear(2048, 2048),
            nn.ReLU(),
            nn.Linear(2048, 10),
        )


def batch_of(size):
    """Return as many images and their digits, on the GPU."""
    return torch.rand(size, 784, device="cuda"), torch.randint(10, (size,), device="cuda")


def train(model):
    """Take two training steps."""
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        images, digits = batch_of(1024)
        cross_entropy(model(images), digits).backward()
        optimizer.step()
        optimizer.zero_grad()


def validate(model):
    """Return the mean loss over eight batches."""
    losses = []
    for _ in range(8):
        images, digits = batch_of(1024)
        # Without no_grad, a loss holds on to the activations that its backward pass would read.
        # In a list, it holds on to them until the list goes: eight batches' worth, for nothing.
        with torch.set_grad_enabled(REGRESSION):
            losses.append(cross_entropy(model(images), digits))
    return torch.stack(losses).mean()


@pytest.mark.gpu_memory(batch_size=1024)
def test_training_and_validation(gpu_memory):
    """Validation, which has no backward pass, needs less than training."""
    model = network()
    with gpu_memory.measure("training"):
        train(model)
    with gpu_memory.measure("validation"):
        loss = validate(model)

    # On the virtual GPU no kernel runs, and losses of large tensors are not computed.
    if gpu_memory.computes:
        assert 0 < loss.item() < 10
