import pytest
import torch


def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)


RUNS = []


@pytest.fixture(autouse=True)
def run(request):
    RUNS.append(request.node.name)


@pytest.mark.gpu_memory
def test_mask():
    RUNS.append("body of test_mask")
    mask = torch.ones(4, 2048, dtype=torch.long, device="cuda")
    if not mask.bool().all():
        mib(300)
    mib(20)


@pytest.mark.gpu_memory
def test_assertion():
    x = torch.arange(4, device="cuda")
    assert x.sum() == 6
    assert torch.isfinite(torch.randn(4, device="cuda")).all()


@pytest.mark.gpu_memory
def test_wrong_assertion():
    x = torch.arange(4, device="cuda")
    assert x.sum().item() == 7


@pytest.mark.gpu_memory
def test_sizes():
    x = torch.arange(1000, device="cuda")
    large = x[x > 499]
    rows = large.nonzero()
    mib(rows.numel() // 50)


@pytest.mark.gpu_memory
def test_logged():
    x = torch.randn(1000, 1000, device="cuda")
    print("loss", x.mean().item())
    losses, total = [], 0.0
    losses.append(x.mean().item())
    total += x.mean().item()


@pytest.mark.gpu_memory
def test_assumed():
    x = torch.randn(3000, 3000, device="cuda")
    if x.mean() > 2:
        mib(300)


@pytest.mark.gpu_memory
def test_computed():
    x = torch.full((1000, 1000), 3.0, device="cuda")
    if x.mean() > 2:
        mib(30)


@pytest.mark.gpu_memory
def test_kept():
    table, sums = torch.ones(1024, 2048, device="cuda"), []
    mask = torch.arange(1024, device="cuda") > 255
    sums.append(table[mask].sum().item())


def test_runs():
    assert len(RUNS) == len(set(RUNS)) == 10
