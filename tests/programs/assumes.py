import pytest
import torch


def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)


@pytest.mark.gpu_memory
def test_loss():
    large = mib(256)
    assert torch.randn(3000, 3000, device="cuda").mean() > 2


@pytest.mark.gpu_memory
def test_wrong():
    assert torch.arange(4, device="cuda").sum() == 7


@pytest.mark.gpu_memory(values="full")
def test_full(gpu_memory):
    x = torch.full((1000, 1000), 3.0, device="cuda")
    assert gpu_memory.computes
    assert x.mean() > 2


@pytest.mark.gpu_memory
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_masks(gpu_memory, share):
    gpu_memory.assume(masks=share)
    scores = torch.randn(5000, 1000, device="cuda").mean(0)
    assert gpu_memory.computes is False
    chosen = torch.nonzero(scores > 0)
    rows = torch.nonzero(torch.randn(20, 500, 500, device="cuda")[0] > 0)
    assert len(rows) == 250_000 * share
    mib(100 + len(chosen) // 10)


@pytest.mark.gpu_memory
@pytest.mark.parametrize("routed", [True, False])
def test_experts(routed):
    weights = [torch.nn.Parameter(torch.randn(1024, 512, device="cuda")) for _ in range(2)]
    x = torch.randn(5000, 1024, device="cuda")
    if routed and x.mean() > 2:
        weights.reverse()
    (x @ weights[0]).sum().backward()
    torch.optim.SGD(weights).step()


@pytest.mark.gpu_memory
def test_no_fraction(gpu_memory):
    with pytest.raises(ValueError, match="masks=2.* not a fraction"):
        gpu_memory.assume(masks=2)
