"""The memory equation of training in fp32 with Adam, for a network of N parameters.

    memory = 4N parameters + 4N gradients + 8N Adam + (batch data + activations) * batch size

A number takes four bytes, Adam keeps two numbers for each parameter, and only what is in brackets
grows with the batch. The tests below measure each term.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

WIDTH = 1024
CLASSES = 16
BATCH_SIZES = [256, 512, 1024, 2048]

# PyTorch's allocator hands out memory in multiples of 512 bytes: a bias of 16 numbers takes 512
# bytes, not 64. (A tensor above 1 MiB can also get up to 1 MiB that was not worth splitting off.)
# The sizes here are powers of two, which leaves little to round.
ROUNDING = 512


def network():
    """Return a network of 8.4 million parameters, in six tensors."""
    with torch.device("cuda"):  # made where it is used
        return nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.ReLU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )


def batch_of(size):
    """Return as many samples and their classes, on the GPU."""
    samples = torch.rand(size, WIDTH, device="cuda")
    classes = torch.randint(CLASSES, (size,), device="cuda")
    return samples, classes


def train_one_step(model, batch, optimizer):
    """Take one training step."""
    samples, classes = batch
    loss = cross_entropy(model(samples), classes)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def warm_up(model):
    """Multiply once: cuBLAS takes a workspace, which some versions of PyTorch keep from then on."""
    samples, classes = batch_of(8)
    cross_entropy(model(samples), classes).backward()
    model.zero_grad()


class Growth:
    """Tells by how much memory has grown since it was asked before."""

    def __init__(self, gpu_memory):
        self.gpu_memory = gpu_memory
        self.before = gpu_memory.allocated

    def __call__(self):
        """Return it in bytes."""
        now = self.gpu_memory.allocated
        growth, self.before = now - self.before, now
        return growth


@pytest.mark.gpu_memory
def test_parameters_gradients_and_adam(gpu_memory):
    """4N bytes, 4N bytes, 8N bytes."""
    grown = Growth(gpu_memory)
    model = network()
    n = sum(p.numel() for p in model.parameters())
    a_little = 6 * ROUNDING  # the most that rounding up six tensors can add
    assert 4 * n <= grown() <= 4 * n + a_little

    warm_up(model)
    optimizer = torch.optim.Adam(model.parameters())
    samples, classes = batch_of(256)
    grown()

    loss = cross_entropy(model(samples), classes)
    loss.backward()  # gradients come, activations go
    del loss
    assert 4 * n <= grown() <= 4 * n + a_little

    optimizer.step()  # Adam's state comes with its first step, ...
    assert 8 * n <= grown() <= 8 * n + 2 * a_little

    optimizer.zero_grad()  # ... and stays, while gradients come and go
    assert 4 * n <= -grown() <= 4 * n + a_little

    train_one_step(model, (samples, classes), optimizer)
    assert grown() == 0  # from here on every step leaves what it found


@pytest.mark.gpu_memory
def test_batch_data_and_activations_are_lines_over_the_batch_size(gpu_memory):
    """Twice the batch, twice the batch data and twice the activations, to the byte."""
    model = network()
    warm_up(model)
    grown = Growth(gpu_memory)
    data, activations = {}, {}
    for size in BATCH_SIZES:
        samples, classes = batch_of(size)
        data[size] = grown()
        loss = cross_entropy(model(samples), classes)
        activations[size] = grown()
        del samples, classes, loss
        grown()

    # A sample is 1024 numbers of four bytes; its class is an integer of eight.
    assert data == {size: (4 * WIDTH + 8) * size for size in BATCH_SIZES}

    # What the backward pass will read: the output of both hidden layers, and the logarithms of the
    # probabilities. What does not grow is two single numbers of 512 bytes each: the loss, and the
    # sum of weights that it was divided by.
    sample = 4 * (4 * WIDTH + WIDTH + CLASSES)
    assert activations == {size: sample * size + 2 * ROUNDING for size in BATCH_SIZES}


@pytest.mark.gpu_memory
def test_the_peak_is_flat_first_and_then_a_line(gpu_memory):
    """A smaller batch helps only where the batch is what makes the peak."""
    model = network()
    n = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    train_one_step(model, batch_of(8), optimizer)  # Adam's state is there from now on

    def peak_without_data(size):
        batch = batch_of(size)
        with gpu_memory.measure(f"batch size {size}", batch_size=size) as part:
            train_one_step(model, batch, optimizer)
        return part.peak_allocated - sum(tensor.nbytes for tensor in batch)

    # With a small batch the peak is in optimizer.step(), when all activations are gone.
    small, twice = peak_without_data(64), peak_without_data(128)
    assert small > 4 * n + 4 * n + 8 * n
    assert twice == pytest.approx(small, rel=0.01)

    # With a large batch it is in loss.backward(): twice the batch, twice the growth.
    large = [peak_without_data(size) for size in (8192, 16384, 32768)]
    assert large[2] - large[1] == pytest.approx(2 * (large[1] - large[0]), rel=0.001)


@pytest.mark.gpu_memory
@pytest.mark.parametrize(("implementation", "bytes_each"), [("foreach", 4), ("fused", 0)])
def test_what_adam_borrows_while_it_steps(gpu_memory, implementation, bytes_each):
    """The term that the equation leaves out: foreach, the default on a GPU, works on a copy."""
    model = network()
    n = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), **{implementation: True})
    samples, classes = batch_of(256)
    train_one_step(model, (samples, classes), optimizer)

    cross_entropy(model(samples), classes).backward()
    with gpu_memory.measure("optimizer.step()") as part:
        optimizer.step()
    borrowed = part.peak_allocated - gpu_memory.allocated
    assert borrowed == pytest.approx(bytes_each * n, rel=0.001)
