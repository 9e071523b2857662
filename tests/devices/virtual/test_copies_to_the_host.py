"""What PyTorch reads back from the virtual GPU: bytes that it put there, or zeros and a note."""

from pathlib import Path

import pytest
from helpers.virtual_gpu import virtual_card


@pytest.fixture
def device():
    with virtual_card() as device:
        yield device


def notes(device):
    return [note.text for note in device.notes(Path(__file__).parent)]


def test_what_was_put_there_is_read_back_and_no_note_is_made(device):
    import torch

    five = torch.tensor(5, device="cuda")
    points = torch.arange(6.0).reshape(2, 3)
    there = points.to("cuda")
    assert five.item() == 5
    assert torch.equal(there.cpu(), points)
    assert torch.equal(there.clone().cpu(), points)  # a copy on the device
    assert there[1].tolist() == [3, 4, 5]
    assert not notes(device)


def test_after_a_kernel_nothing_is_known_and_a_note_is_made(device):
    import torch

    five = torch.tensor(5, device="cuda")
    torch.ones(3, device="cuda")  # a kernel fills it, for all that is known over the five as well
    assert five.item() == 0
    (note,) = notes(device)
    begin = "1 value was read back from the virtual GPU (test_copies_to_the_host.py:"
    assert note.startswith(begin)


def test_a_matrix_product_is_a_kernel_as_well(device):
    import torch

    x = torch.tensor([[2.0]], device="cuda")
    y = x @ x
    assert x.item() == y.item() == 0
    assert len(notes(device)) == 1


def test_a_gradient_scaler_steps_and_a_note_says_that_a_gpu_may_skip_steps(device):
    """Zero is what it is told when no gradient has overflowed."""
    import torch

    weight = torch.nn.Parameter(torch.randn(1000, device="cuda"))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.state[weight]  # it did step
    (note,) = notes(device)
    assert note.endswith(
        "it skips the optimizer's first steps, and the optimizer's state is allocated later"
    )


def test_the_scale_that_it_is_asked_for_is_noted(device):
    import torch

    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones(1, device="cuda"))
    torch.ones(1, device="cuda")
    assert scaler.get_scale() == 0
    assert len(notes(device)) == 1
