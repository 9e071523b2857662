"""Two training steps of ResNet-50 as the benchmarks of speed run them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

CARD = "H100"
BATCH = 32
STEPS = 2


class Task(NamedTuple):
    """A model and what it trains with."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    x: torch.Tensor
    y: torch.Tensor


def task() -> Task:
    """Make the model, the optimizer and a batch on the virtual GPU, or fakes of them."""
    import torch
    import torchvision

    with torch.device("cuda"):
        model = torchvision.models.resnet50()
        x = torch.randn(BATCH, 3, 224, 224)
        y = torch.randint(0, 1000, (BATCH,))
    return Task(model, torch.optim.Adam(model.parameters(), foreach=True), x, y)


def steps(it: Task) -> Iterator[None]:
    """Run the steps; yields after each."""
    from torch.nn.functional import cross_entropy

    for _ in range(STEPS):
        it.optimizer.zero_grad()
        cross_entropy(it.model(it.x), it.y).backward()
        it.optimizer.step()
        yield
