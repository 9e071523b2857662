"""On a real GPU: figures are torch.cuda's own, limits are real, one step runs at a time."""

import json
from itertools import pairwise

import pytest

from pytest_gpumem.devices.cards import CARDS

STEP = """
import torch

def train(model, x, loss, steps=3):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

def mlp():
    net = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)
    )
    train(net, torch.randn(2048, 1024, device="cuda"), lambda y: y.square().mean())

def convnet():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10),
    )
    train(net, torch.randn(16, 3, 96, 96, device="cuda"), lambda y: y.square().mean())

def attention():
    q, k, v = (
        torch.randn(8, 12, 512, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    for _ in range(3):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
"""
NAMES = ("mlp", "convnet", "attention")
MARKED = "import pytest\n" + "".join(
    f"@pytest.mark.gpu_memory(baseline=False)\ndef test_{name}():\n    {name}()\n\n"
    for name in NAMES
)


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_those_of_a_plain_script(machine, name):
    """What the plugin says of a step is what torch.cuda says of the same step by itself."""
    code = f"""
{name}()
print("peaks", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""
    peaks = tuple(map(int, machine.script(STEP + code).rpartition("peaks")[2].split()))
    session = machine.pytest(STEP + MARKED, "-k", f"test_{name}")
    assert session.figures == {f"test_{name}": peaks}


def test_figures_are_alike_in_any_order_and_after_a_failure(machine):
    """A failed test that pins memory, and another order, change nothing."""
    failing = """
def test_0_fails():
    kept = torch.empty(64 << 20, device="cuda")
    raise ValueError(kept.shape)
"""
    alone = {}
    for name in NAMES:
        alone |= machine.pytest(STEP + MARKED, "-k", f"test_{name}").figures
    in_order = machine.pytest(STEP + MARKED)
    after = machine.pytest(STEP + failing + MARKED, "-p", "no:randomly")
    assert in_order.figures == alone
    assert after.figures == alone
    assert after.outcomes["failed"] == 1


def test_max_gib_runs_out_of_memory_for_real(machine):
    """The allocator refuses what is beyond the limit, and the report says what is needed."""
    source = """
import pytest, torch

@pytest.mark.gpu_memory(max_gib=1, batch_size=3, baseline=False)
def test_too_large():
    parts = [torch.empty(512 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]

@pytest.mark.gpu_memory(max_gib=1, baseline=False)
def test_fits():
    parts = [torch.empty(512 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
"""
    session = machine.pytest(source)
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert "out of memory: batch size 3 does not fit in max_gib=1 (1024.00 MiB)" in session.out
    assert "it needs 1536.00 MiB" in session.out


def test_running_out_of_the_gpu_itself_is_a_verdict(machine, properties):
    """With no limit declared, the GPU's own memory is one."""
    source = f"""
import pytest, torch

@pytest.mark.gpu_memory(baseline=False)
def test_too_large():
    torch.empty({properties.total}, dtype=torch.uint8, device="cuda")
"""
    session = machine.pytest(source)
    assert session.outcomes == {"failed": 1}
    assert "out of memory: the step does not fit on" in session.out


def test_a_card_is_a_limit_on_a_larger_gpu(machine, properties):
    """card="T4" leaves a step what a T4 leaves it, whatever GPU it runs on."""
    usable = CARDS["T4"].usable_memory
    if properties.total < usable + (2 << 30):
        pytest.skip(f"needs a GPU larger than a T4, this is {properties.name}")
    source = f"""
import pytest, torch

@pytest.mark.gpu_memory(card="T4", baseline=False)
@pytest.mark.parametrize("size", [{usable - (64 << 20)}, {usable + (64 << 20)}])
def test_it(size):
    torch.empty(size, dtype=torch.uint8, device="cuda")
"""
    session = machine.pytest(source)
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert "does not fit in card='T4'" in session.out


@pytest.mark.parametrize("limit", ["card='T4'", "max_gib=14"])
def test_a_wide_fixture_beyond_a_limit_ends_a_test_alike_in_every_order(machine, properties, limit):
    if properties.total < 40 << 30:
        pytest.skip(f"this {properties.name} has no room for 20 GiB")
    source = f"""
import pytest, torch

@pytest.fixture(scope="module")
def wide():
    return torch.empty(20 << 30, dtype=torch.uint8, device="cuda")

@pytest.mark.gpu_memory(baseline=False)
def test_has_room(wide): pass

@pytest.mark.gpu_memory({limit}, baseline=False)
def test_over(wide): pass
"""
    after, alone = machine.pytest(source), machine.pytest(source, "-k", "over")
    assert (after.outcomes["failed"], alone.outcomes["failed"]) == (1, 1)
    for session in (after, alone):
        assert "over budget: peak reserved of 20.00 GiB is " in session.out
        assert session.figures["test_over"] == (20 << 30, 20 << 30)


def test_values_are_computed(machine):
    """A real GPU computes, and the fixture says so."""
    if machine.fake:
        pytest.skip("needs a real GPU: the virtual one in its place computes nothing")
    source = """
import torch

def test_it(gpu_memory):
    assert gpu_memory.computes
    assert torch.ones(10, device=gpu_memory.device).sum().item() == 10
"""
    assert machine.pytest(source).outcomes == {"passed": 1}


def test_one_step_at_a_time_under_xdist(machine):
    """Workers that share a GPU take turns: no two measured steps overlap."""
    pytest.importorskip("xdist")
    source = """
import json, os, pytest, time, torch

@pytest.mark.gpu_memory(baseline=False)
@pytest.mark.parametrize("n", range(6))
def test_it(n):
    started = time.monotonic()
    held = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    time.sleep(0.3)
    with open("spans", "a") as file:
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        file.write(json.dumps([started, time.monotonic(), worker]) + "\\n")
"""
    session = machine.pytest(source, "-n", "2")
    lines = (machine.path / "spans").read_text().splitlines()
    spans = sorted(map(json.loads, lines))
    assert session.outcomes == {"passed": 6}
    assert {worker for *_, worker in spans} == {"gw0", "gw1"}
    overlaps = [b for a, b in pairwise(spans) if b[0] < a[1]]
    assert overlaps == []


def test_workers_on_several_gpus_run_side_by_side(machine):
    """Each has another GPU first, and a test on two of them takes turns with both."""
    pytest.importorskip("xdist")
    count = int(machine.script("import torch; print(torch.cuda.device_count())").splitlines()[-1])
    if count < 2 or machine.fake:
        pytest.skip(f"needs two GPUs, this machine shows {count}")
    source = """
import json, pytest, torch

@pytest.mark.gpu_memory(baseline=False)
@pytest.mark.parametrize("n", range(8))
def test_it(n):
    with open("gpus", "a") as file:
        file.write(str(torch.cuda.get_device_properties(0).uuid) + "\\n")

@pytest.mark.gpu_memory(baseline=False, devices=2)
@pytest.mark.parametrize("n", range(4))
def test_two(n):
    torch.empty(1 << 20, device="cuda:1")
"""
    session = machine.pytest(source, "-n", "2")
    assert session.outcomes == {"passed": 12}
    assert len(set((machine.path / "gpus").read_text().split())) == 2


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_the_virtual_gpu_predicts_this_one(machine, properties, name):
    """Where cuDNN takes no part, peak allocated is predicted to 0.1 %, reserved to 2 %."""
    cards = [card.name for card in CARDS.values() if card.device_name == properties.name]
    if not cards:
        pytest.skip(f"no profile of {properties.name}")
    real = machine.pytest(STEP + MARKED, "-k", f"test_{name}").figures[f"test_{name}"]
    options = ("-k", f"test_{name}", f"--gpumem-card={cards[0]}")
    virtual = machine.pytest(STEP + MARKED, *options, device="virtual").figures[f"test_{name}"]
    assert virtual[0] == pytest.approx(real[0], rel=0.001)
    assert virtual[1] == pytest.approx(real[1], rel=0.02)


def test_a_breakdown_adds_up_to_the_peak(machine):
    """The history of a real GPU's allocator is replayed to the byte, as the virtual one's is."""
    machine.pytest(STEP + MARKED.replace("baseline=False", ""), "--gpumem-update-baselines")
    (path,) = machine.path.glob("baselines/*/*.json")
    tests = json.loads(path.read_text())["tests"]
    assert set(tests) == {f"test_{name}" for name in NAMES}
    for name, entry in tests.items():
        (breakdown,) = entry["breakdown"]
        assert sum(breakdown["categories"].values()) == entry["peak_allocated"][0], name
        assert breakdown["categories"].keys() & {"parameters", "activations", "other"}
