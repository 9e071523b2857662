"""Steps agree with the count of live tensors that anyone can make by hand."""

import pytest
from helpers.virtual_gpu import CARD_80GIB, MIB, virtual_card

from pytest_gpumem.meter.allocator import settle

N = 3 * MIB
"""elements of each parameter: 12 MiB, which no segment of 20 MiB shares with another"""


@pytest.fixture
def device():
    with virtual_card(CARD_80GIB) as device:
        yield device
        assert device.trouble() is None


def allocated():
    import torch

    return torch.cuda.memory_allocated()


def peak():
    import torch

    return torch.cuda.max_memory_allocated()


def reset():
    import torch

    torch.cuda.reset_peak_memory_stats()


def parameters(count=2):
    import torch

    return [torch.nn.Parameter(torch.randn(N, device="cuda")) for _ in range(count)]


def step(params, optimizer):
    """One step without a matrix product: no workspace; its loss takes 512 bytes."""
    optimizer.zero_grad()
    for param in params:
        param.grad = param.detach() * 2
    optimizer.step()


def rounded(tensor):
    return max(512, -(-tensor.nbytes // 512) * 512)


@pytest.mark.parametrize(
    ("name", "options", "state_bytes", "step_bytes"),
    [
        ("SGD", {"lr": 0.1}, 0, 0),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, 4, 0),
        ("RMSprop", {}, 4, 0),
        ("Adagrad", {}, 4, 0),
        ("Adam", {}, 8, 0),
        ("AdamW", {"foreach": False}, 8, 0),
        ("AdamW", {"foreach": True}, 8, 0),
        ("AdamW", {"amsgrad": True}, 12, 0),
        ("Adam", {"fused": True}, 8, 512),  # its step counter lies on the device
        ("Adam", {"capturable": True}, 8, 512),
    ],
)
def test_training_holds_parameters_gradients_and_optimizer_state(
    device, name, options, state_bytes, step_bytes
):
    """Parameters 4N, gradients 4N, and what the optimizer keeps of each: Adam 8N."""
    import torch

    params = parameters()
    assert allocated() == 2 * 4 * N
    optimizer = getattr(torch.optim, name)(params, **options)
    for _ in range(2):
        step(params, optimizer)
    assert allocated() == 2 * ((4 + 4 + state_bytes) * N + step_bytes)
    optimizer.zero_grad()
    assert allocated() == 2 * ((4 + state_bytes) * N + step_bytes)


def test_the_peak_of_training_comes_with_the_second_step(device):
    """Adam's state comes to life at the end of the first one."""
    import torch

    param = torch.nn.Parameter(torch.randn(N, device="cuda"))
    optimizer = torch.optim.Adam([param], foreach=False)

    def train():
        reset()
        optimizer.zero_grad()
        work = [torch.empty(N, device="cuda") for _ in range(4)]  # "activations" of 16N
        param.grad = param.detach() * 2
        del work
        optimizer.step()
        return peak()

    assert train() == (4 + 4 + 16) * N
    assert train() == (4 + 4 + 8 + 16) * N == train()


def test_a_step_without_gradients_holds_its_input_and_two_results_at_most(device):
    import torch

    x = torch.randn(N, device="cuda")
    reset()
    with torch.no_grad():
        for _ in range(5):
            x = (x * 2).relu().add_(1)
    assert peak() == 3 * 4 * N
    assert allocated() == 4 * N


def test_activations_are_kept_for_the_backward_pass_and_freed_by_it(device):
    import torch

    x = torch.randn(N, device="cuda", requires_grad=True)
    y = x
    for _ in range(4):
        y = y.sigmoid()  # keeps its result
    assert allocated() == (1 + 4) * 4 * N
    loss = y.sum()
    loss.backward()
    assert allocated() == 3 * 4 * N + 512  # x, its gradient, y; the loss
    del y, loss
    assert allocated() == 2 * 4 * N


def test_checkpointing_keeps_the_input_alone(device):
    import torch
    from torch.utils.checkpoint import checkpoint

    def block(x):
        return x.sigmoid().sigmoid().sigmoid().sigmoid()

    x = torch.randn(N, device="cuda", requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False)
    assert allocated() == 2 * 4 * N
    y.sum().backward()
    assert x.grad is not None


def test_batch_memory_grows_linearly(device):
    import torch

    def step_peak(batch):
        x = torch.randn(batch, 1 << 18, device="cuda", requires_grad=True)
        reset()
        x.tanh().mul(3).sum().backward()
        found = peak()
        del x
        settle(1)
        return found

    peaks = [step_peak(batch) for batch in (10, 20, 30)]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1] > 0


def test_a_model_holds_what_its_tensors_hold(device):
    """Every tensor that is alive, rounded up to 512 bytes, and nothing else."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(3, 17, 3), nn.BatchNorm2d(17), nn.ReLU(), nn.Flatten(), nn.LazyLinear(33)
    ).cuda()
    x = torch.randn(5, 3, 14, 14, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch._C._cuda_clearCublasWorkspaces()
    live = [x, *model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    live += [value for state in optimizer.state.values() for value in state.values()]
    assert allocated() == sum(rounded(tensor) for tensor in live)


def test_lower_precision_takes_half(device):
    import torch

    full = torch.empty(N, device="cuda")
    half = full.to(torch.bfloat16)
    assert allocated() == (4 + 2) * N
    del full
    assert allocated() == 2 * N == half.nbytes


def test_accumulating_gradients_halves_the_activations(device):
    import torch

    w = torch.nn.Parameter(torch.randn(1, 1024, device="cuda"))
    x = torch.randn(8192, 1024, device="cuda")

    def activations(parts):
        w.grad = None
        held = allocated()
        reset()
        for part in x.chunk(parts):
            (part * w).sigmoid().sum().backward()
        return peak() - held

    small = 64 * 1024  # losses, and the gradient of the 1024 weights
    assert activations(1) == pytest.approx(4 * x.nbytes, abs=small)
    assert activations(2) == pytest.approx(4 * x.nbytes / 2, abs=small)
