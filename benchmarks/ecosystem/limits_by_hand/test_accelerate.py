"""accelerate: memory that is given back, and tied weights that are moved once."""

import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import release_memory

WIDTH = 5000
WEIGHT = WIDTH * WIDTH * 4


@pytest.mark.gpu_memory(card="T4")
def test_released_memory(gpu_memory):
    with gpu_memory.measure("whole", figure="held", at_most="before"):
        with gpu_memory.measure("model", figure="held", more_than="before"):
            model = torch.nn.Linear(3, 4).to("cuda")
        release_memory(model)
        del model


class Tied(torch.nn.Sequential):
    """Layers that share one weight, except the second layer."""

    def __init__(self, layers, own=None):
        super().__init__(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        for number, layer in enumerate(self):
            if number != own:
                layer.weight = self[0].weight


@pytest.mark.gpu_memory(card="T4", devices=2)
@torch.no_grad()
def test_tied_weights_are_moved_once(gpu_memory):
    model = Tied(5, own=1)
    with gpu_memory.measure("dispatch", at_most=f"before + {WEIGHT + 50_000_000}B"):
        model = dispatch_model(model, {str(number): int(number == 1) for number in range(5)})
    model(torch.randn(1, WIDTH))


class Offloaded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.resident, self.offloaded = Tied(4), Tied(4)

    def forward(self, hidden):
        return self.offloaded(self.resident(hidden))


@pytest.mark.gpu_memory(card="T4")
@torch.no_grad()
def test_tied_weights_that_stay_on_the_cpu(gpu_memory):
    places = {"resident": 0, "offloaded": "cpu"}
    with gpu_memory.measure("dispatch", figure="held", less_than="before + 130MB"):
        model = dispatch_model(Offloaded(), places)
    with gpu_memory.measure("forward", at_most=f"before + {WEIGHT + 150_000_000}B"):
        output = model(torch.randn(1, WIDTH))
    with gpu_memory.measure("after", figure="held", less_than="dispatch + 130MB"):
        del output
