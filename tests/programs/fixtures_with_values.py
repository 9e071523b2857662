import pytest
import torch


def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)


RUNS = []


@pytest.fixture(scope="module")
def mask():
    return torch.ones(4, 2048, dtype=torch.long, device="cuda")


@pytest.fixture(scope="module")
def large():
    return torch.ones(1024, 1024, dtype=torch.bool, device="cuda")


@pytest.fixture(scope="module")
def name():
    assert torch.arange(3, device="cuda").sum() == 3
    return "none"


@pytest.mark.gpu_memory
def test_plain(name):
    RUNS.append(name)
    torch.randn(300, 300, device="cuda")


@pytest.mark.gpu_memory
def test_mask(mask):
    RUNS.append("mask")
    mib(300 if not mask.bool().all() else 20)


@pytest.mark.gpu_memory
def test_between():
    RUNS.append("between")
    torch.randn(300, 300, device="cuda")


def test_unmarked(large):
    pass


@pytest.mark.gpu_memory
def test_both(mask, large):
    RUNS.append("both")
    mib(300 if not (mask.bool().all() and large.all()) else 30)


@pytest.mark.gpu_memory
def test_asks_late(request):
    RUNS.append("late")
    ones = torch.ones(3, device="cuda")
    mib(300 if not (ones.all() and request.getfixturevalue("large").all()) else 40)


def test_runs():
    assert RUNS == ["none", "mask", "between", "both", "late"]
