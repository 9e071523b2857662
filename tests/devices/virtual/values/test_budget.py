"""Programs that decide by values within a test's budget, as with all values; and its end."""

from functools import partial
from pathlib import Path

import pytest
from helpers.virtual_gpu import virtual_card


def minimised(width, search):
    import torch

    torch.manual_seed(0)
    net = torch.nn.Linear(width, width).cuda()
    x = torch.randn(16, width).cuda()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn=search)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        calls.append(loss.item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return len(calls)


def scaled():
    import torch

    net = torch.nn.Linear(64, 64).cuda()
    optimizer, scaler = torch.optim.Adam(net.parameters()), torch.amp.GradScaler("cuda")
    for size in (1e36, 1e36, 1):  # the first two overflow: they are skipped
        scaler.scale(net(torch.full((8, 64), float(size)).cuda()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale()


def mined():
    import torch

    torch.manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(48, 32).cuda(), dim=1)
    labels = torch.arange(48).cuda() % 6
    same = labels[:, None] == labels
    near, far = same.clone().fill_diagonal_(False), ~same
    anchors, positives, negatives = torch.where(near.unsqueeze(2) & far.unsqueeze(1))
    products = points @ points.t()
    gap = products[anchors, positives] - products[anchors, negatives]
    return len(anchors), len(anchors[gap < 0.1])


CASES = [*(partial(minimised, 256, search) for search in (None, "strong_wolfe")), scaled, mined]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of torch 2.8
@pytest.mark.parametrize("program", CASES)
def test_a_small_program_decides_as_with_all_values(program):
    import torch

    answers = []
    with virtual_card() as device:
        for scope in ("full", "auto"):
            device.values.compute(scope)
            torch.cuda.reset_peak_memory_stats()
            answers.append((program(), torch.cuda.max_memory_allocated()))
            assert device.notes(Path.cwd()) == []
    assert answers[0] == answers[1]


@pytest.mark.parametrize("sparse_before", [False, True])
def test_a_test_with_many_unknown_results_is_a_large_one(sparse_before):
    import torch

    with virtual_card() as device:
        if sparse_before:
            device.values.compute("auto")
            torch.eye(4, device="cuda").to_sparse()
        device.values.compute("auto")
        medium = torch.ones(1024, 1024, device="cuda")
        assert (medium * 2).sum().item() == 1 << 21
        large = torch.randn(3000, 3000, device="cuda")
        for _ in range(4):
            large = large * 2
        assert device.notes(Path.cwd()) == []
        assert (medium * 2).sum().item() != 1 << 21
        assert device.notes(Path.cwd()) != []  # on a value that was assumed
        assert torch.arange(9, device="cuda").sum().item() == 36
        device.values.renew()
        assert (medium * 2).sum().item() == 1 << 21


def test_the_budget_of_a_large_test_ends_once(monkeypatch):
    import torch

    from pytest_gpumem.devices.virtual.values.budget import Budget

    end, ends = Budget.end, []

    def counted(budget):
        ends.append(budget)
        end(budget)

    monkeypatch.setattr(Budget, "end", counted)
    with virtual_card() as device:
        device.values.compute("auto")
        for count in (1, 2):
            large = torch.randn(3000, 3000, device="cuda")
            for _ in range(12):
                large = large * 2
            assert len(ends) == count
            device.values.renew()


@pytest.mark.parametrize("count", [1 << 16, (1 << 17) - 1, 1 << 17, 1 << 18])
def test_constants_of_the_shape_of_unknown_values_are_known(count):
    """As the map of a mixture's tokens is, into which indices are scattered."""
    import torch

    with virtual_card() as device:
        device.values.compute("auto")
        device.values._mode.host.budget.end()
        unknown = torch.randn(2 * count, device="cuda")[:count]
        for dtype in (torch.float32, torch.bool):
            assert torch.zeros_like(unknown, dtype=dtype).sum().item() == 0
            assert torch.full_like(unknown, 3, dtype=dtype).sum().item() == (
                count if dtype is torch.bool else 3 * count
            )
        assert unknown.new_full((count,), 2).sum().item() == 2 * count
        scores = torch.randn(count // 8, 8, device="cuda")
        experts = scores.topk(3, dim=-1).indices
        if experts.nbytes <= 512 << 10:  # larger ones are unknown, which a note says
            routed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, experts, True)
            assert routed.sum().item() == 3 * (count // 8)
