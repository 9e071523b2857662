import pytest
import torch

RUNS = []


def losses(device, steps):
    torch.manual_seed(3)
    model = torch.nn.Linear(300, 300).to(device)
    x = torch.randn(8, 300).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


@pytest.mark.gpu_memory
def test_trains(gpu_memory):
    RUNS.append(gpu_memory.computes)
    history = losses("cuda", 4)
    assert history == pytest.approx(losses("cpu", 4), rel=1e-4)
    assert history == sorted(history, reverse=True)


@pytest.mark.gpu_memory
def test_decides():
    x = torch.full((400, 400), 2.0, device="cuda")
    if not x.square().mean() == 4:
        raise ValueError("not 4")


@pytest.mark.gpu_memory
def test_size():
    x = torch.full((400, 400), 2.0, device="cuda")
    (x.square().mean(1) > 3).nonzero()[:, 0].view(400, 1)


@pytest.mark.gpu_memory
def test_wrong():
    RUNS.append("wrong")
    assert losses("cuda", 1)[0] < 0


@pytest.mark.gpu_memory
def test_negative():
    loss = -torch.nn.Linear(400, 400, device="cuda").weight.square().mean()
    history = [loss.item()]  # assumed values are positive
    assert history[0] > 0


def test_runs():
    assert RUNS == [False, "wrong"]
