"""With everything computed, small models train on the virtual GPU to the CPU's losses."""

import pytest
import torch
from helpers.virtual_gpu import virtual_card
from torch import nn
from torch.nn import functional

from pytest_gpumem.devices.virtual.values import budget as budget_module
from pytest_gpumem.devices.virtual.values import host_computer
from pytest_gpumem.devices.virtual.values.mode import ValueMode

STEPS = 4


@pytest.fixture(scope="module")
def device():
    with virtual_card() as device:
        yield device


class Last(nn.Module):
    """A recurrent network's answer to the last value of a sequence."""

    def __init__(self, network, width):
        super().__init__()
        self.network, self.head = network, nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.network(x)[0][:, -1])


class Stepped(nn.Module):
    """A recurrent cell's answer to a sequence."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(8, 3)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        parts = self.heads(x).reshape(4, 7, 3, 2, 4).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.head(seen.transpose(1, 2).reshape(4, 7, 8)[:, -1])


GENERATOR = torch.Generator().manual_seed(1)  # of other data a first step may overflow in float16
SEQUENCE, IMAGES, ROWS = (
    torch.randn(*shape, generator=GENERATOR) for shape in ((4, 7, 8), (4, 3, 12, 12), (4, 8))
)
MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)),
        ROWS,
    ),
    "rms": (lambda: nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 3)), ROWS),
    "convnet": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(8, 3)),
        ),
        IMAGES,
    ),
    "lstm": (lambda: Last(nn.LSTM(8, 8, 2, batch_first=True), 8), SEQUENCE),
    "gru": (lambda: Last(nn.GRU(8, 6, batch_first=True, bidirectional=True), 12), SEQUENCE),
    "rnn": (lambda: Last(nn.RNN(8, 8, batch_first=True), 8), SEQUENCE),
    "lstm cell": (lambda: Stepped(nn.LSTMCell(8, 8)), SEQUENCE),
    "gru cell": (lambda: Stepped(nn.GRUCell(8, 8)), SEQUENCE),
    "attention": (Attention, SEQUENCE),
    "embedding bag": (
        lambda: nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 3)),
        torch.arange(20).reshape(4, 5),
    ),
}
TARGETS = torch.tensor([0, 1, 2, 1])


def losses(model, x, device, dtype=None, optimizer=torch.optim.AdamW, **options):
    """The losses of some steps; of half precision with a scaler."""
    model = model.to(device)
    optimizer = optimizer(model.parameters(), 1e-2, **options)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16 and device == "cuda")
    seen = []
    for _ in range(STEPS):
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = functional.cross_entropy(model(x.to(device)), TARGETS.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def compared(device, name, dtype, **options):
    make, x = MODELS[name]
    torch.manual_seed(3)
    host = make()
    there = make()
    there.load_state_dict(host.state_dict())
    mode = ValueMode(device.library, "full")
    with mode:
        result = losses(there, x, "cuda", dtype, **options)
    assert mode.host.unknown.failures == {}
    tolerance = 1e-4 if dtype is None else 2e-2
    on_host = torch.bfloat16 if dtype is not None else None
    with torch.backends.mkldnn.flags(enabled=dtype is None):  # which lacks LSTM in bfloat16 on some
        expected = losses(host, x, "cpu", on_host, **options)
    assert result == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_the_cpus(device, name):
    compared(device, name, None, fused=True)


@pytest.mark.parametrize("name", ["mlp", "convnet", "lstm", "attention"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_the_gpus_types(device, name, dtype):
    compared(device, name, dtype, foreach=True)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop]
)
def test_optimizers_step_as_on_the_cpu(device, optimizer):
    compared(device, "mlp", None, optimizer=optimizer)


def test_large_tensors_are_computed_too(device):
    with ValueMode(device.library, "full") as mode:
        x = torch.ones(1 << 22, device="cuda")
        assert (x * 2).sum().item() == 1 << 23
    assert mode.notes() == []


def test_what_the_host_has_no_room_for_is_told(device, monkeypatch):
    monkeypatch.setattr(host_computer, "available_memory", lambda: 8 << 20)
    with ValueMode(device.library, "full") as mode:
        x = torch.ones(2 << 20, device="cuda")
        assert not mode.values.is_known(x)
    (note,) = mode.notes()
    assert note.startswith("8.00 MiB of values did not fit into the host's free memory")


def test_what_the_host_has_no_room_to_compute_is_told_and_not_tried(device, monkeypatch):
    monkeypatch.setattr(budget_module, "available_memory", lambda: 300 << 20)
    with ValueMode(device.library, "full") as mode:
        small = torch.full((30 << 20,), 2.0, device="cuda")  # 120 MiB, and a copy of them
        large = torch.full((50 << 20,), 2.0, device="cuda")
        assert mode.values.is_known(small)
        assert not mode.values.is_known(large)
    (note,) = mode.notes()
    assert note.startswith("200.00 MiB of values did not fit into the host's free memory")


def test_an_extensions_operator_is_named_once(device):
    library = torch.library.Library("gpumem_tests", "FRAGMENT")
    library.define("extension(Tensor x) -> Tensor")
    library.impl("extension", torch.empty_like, "CUDA")
    with ValueMode(device.library, "full") as mode:
        x = torch.ones(3, device="cuda")
        for _ in range(2):
            result = torch.ops.gpumem_tests.extension(x)
        assert not mode.values.is_known(result)
    (note,) = mode.notes()
    assert note == (
        "the results of these operators were not computed, so their values are unknown "
        "(extension: the CPU does not have it)"
    )
