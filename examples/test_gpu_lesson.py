"""The GPU lesson: what makes a fully connected network run out of GPU memory, and what does not.

The images are those of MNIST in size: 28 x 28 pixels, ten digits, 60,000 of them to learn from.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

PIXELS = 28 * 28
DIGITS = 10
TRAINING_SET = 60_000


def network(hidden, depth=2):
    """Return a fully connected network with `depth` hidden layers of `hidden` neurons each."""
    with torch.device("cuda"):  # made where it is used
        layers = [nn.Linear(PIXELS, hidden), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(hidden, DIGITS))


def batch_of(size):
    """Return as many images and their digits, on the GPU."""
    images = torch.rand(size, PIXELS, device="cuda")
    digits = torch.randint(DIGITS, (size,), device="cuda")
    return images, digits


def train(model, images, digits):
    """Take two steps: the first one makes Adam's state, the second one has it from its start."""
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        loss = cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# The marker is all that a test needs: its peak memory is measured, and held to its baseline.


@pytest.mark.gpu_memory(batch_size=32)
def test_hidden_size_2000():
    """5.6 million parameters."""
    train(network(hidden=2000), *batch_of(32))


@pytest.mark.gpu_memory(batch_size=32)
def test_hidden_size_5000():
    """29 million parameters: 2.5 times the neurons, more than five times the memory."""
    train(network(hidden=5000), *batch_of(32))


@pytest.mark.gpu_memory(batch_size=32)
def test_depth_5_of_5000_neurons():
    """104 million parameters: each hidden layer more is 25 million more."""
    train(network(hidden=5000, depth=5), *batch_of(32))


@pytest.mark.gpu_memory(max_gib=4, batch_size=TRAINING_SET)
@pytest.mark.xfail(raises=torch.OutOfMemoryError, strict=True, reason="too large for 4 GiB")
def test_whole_training_set_as_one_batch():
    """With max_gib=4 a test has 4 GiB, however large the GPU is.

    A batch of 32 takes a seventh of that, all 60,000 images at once do not fit. That is expected:
    `raises` and `strict` make this test fail on any other error, and when it does fit.
    """
    train(network(hidden=5000), *batch_of(TRAINING_SET))


# The fixture gpu_memory is for tests that want to know of their own memory.


@pytest.mark.gpu_memory(max_gib=4)
def test_what_of_it_does_not_fit(gpu_memory):
    """It is not the data that is too large, but what the layers make of it."""
    model, (images, digits) = network(hidden=5000), batch_of(TRAINING_SET)
    assert gpu_memory.allocated < 0.1 * 4 * 2**30  # network and training set: a tenth of the memory

    with pytest.raises(torch.OutOfMemoryError):
        train(model, images, digits)

    train(model, images[:32], digits[:32])  # out of memory is no crash: a smaller batch goes on


@pytest.mark.gpu_memory
def test_what_grows_with_what(gpu_memory):
    """Parameters grow with the square of the width, activations with width, depth and batch."""

    def parameters(hidden):
        before = gpu_memory.allocated
        model = network(hidden)
        assert model
        return gpu_memory.allocated - before

    def activations(hidden, batch, depth=2):
        """Return the bytes that the forward pass leaves for the backward pass to read."""
        model, (images, digits) = network(hidden, depth), batch_of(batch)
        before = gpu_memory.allocated
        loss = cross_entropy(model(images), digits)
        assert loss.requires_grad  # the loss is what holds on to them
        return gpu_memory.allocated - before

    activations(100, batch=32)  # cuBLAS takes a workspace at its first product, and may keep it

    # Between two hidden layers there is a weight for each pair of neurons, 2.5 * 2.5 times as many;
    # the first layer only has 2.5 times as many.
    assert 2.5 < parameters(5000) / parameters(2000) < 2.5 * 2.5

    some = activations(2000, batch=3000)
    assert activations(5000, batch=3000) == pytest.approx(2.5 * some, rel=0.02)
    assert activations(2000, batch=6000) == pytest.approx(2 * some, rel=0.02)
    assert activations(2000, batch=3000, depth=4) == pytest.approx(2 * some, rel=0.02)

    # With a batch of 32 nearly all is parameters, with the whole training set it is activations.
    assert parameters(5000) > 50 * activations(5000, batch=32)
    assert activations(5000, batch=TRAINING_SET) > 15 * parameters(5000)
