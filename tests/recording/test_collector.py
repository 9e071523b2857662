"""Python's collector runs when it would without the measurement's own objects."""

import gc
import itertools
import json

import pytest
from helpers.sources import WITHOUT
from helpers.virtual_gpu import run_python

from pytest_gpumem.recording.collector import Uncounted

STEPS = """
import gc, json, torch

class Cycle:
    def __init__(self):
        self.itself = self

def made():
    \"\"\"Return a model and its optimizer, with all made that is made once.\"\"\"
    layers = [(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(6)]
    model = torch.nn.Sequential(*(layer for pair in layers for layer in pair)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer

def step(model, optimizer):
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def passes(model, optimizer):
    \"\"\"Train, and make cycles; return the step of each pass of the collector's, and which.\"\"\"
    seen, number = [], 0

    def see(phase, info):
        if phase == "start":
            seen.append((number, info["generation"]))

    thresholds = gc.get_threshold()
    gc.set_threshold(100, 2, 1)
    gc.callbacks.append(see)
    for number in range(80):
        for _ in range(28):  # a pass that is due by a few objects may come within a step
            Cycle()
        step(model, optimizer)
    gc.callbacks.remove(see)
    gc.set_threshold(*thresholds)
    return seen
"""
PROGRAM = f"""
import os, pathlib, pytest_gpumem
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.virtual.device import VirtualDevice
VirtualDevice.load(CARDS["H100"])
{STEPS}
import torch._dynamo  # which the first optimizer imports

def tell(values):
    pytest_gpumem.use_virtual_gpu(values=values)
    trained = made()
    with pytest_gpumem.measure():
        seen = passes(*trained)
    pathlib.Path(values).write_text(json.dumps(seen))

for values in ("off", "full", "auto"):
    process = os.fork()  # each has the same old objects, and no CUDA yet
    if not process:
        tell(values)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


@pytest.fixture
def passes_of(tmp_path, monkeypatch):
    """The passes of a step by the values that are computed."""
    monkeypatch.chdir(tmp_path)
    # No fork of the warm process: there the collector hardly has old objects, and a few new ones
    # decide whether a pass is a full one.
    done = run_python(PROGRAM)
    assert done.returncode == 0, done.stderr
    return {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}


def test_computed_values_move_no_pass(passes_of):
    """Each operator makes some ten objects where values are computed: 20 passes would be 80.

    PyTorch keeps the Python object of a tensor that only C++ holds (a weight's transpose, saved
    for the backward pass) once an operator of ours was called with it. Five here, which the
    collector counts: a pass that is within five objects of a step's end comes in that step.
    """
    expected = passes_of["off"]
    assert {generation for _, generation in expected} >= {0, 1}
    for values in ("full", "auto"):
        # A pass that comes a step earlier may be one more at the end.
        seen = passes_of[values][: len(expected)]
        assert len(passes_of[values]) <= len(expected) + 1
        assert [generation for _, generation in seen] == [generation for _, generation in expected]
        early = [later - step for (later, _), (step, _) in zip(expected, seen, strict=True)]
        assert set(early) <= {0, 1}


PRODUCTS = """
import pytest_gpumem
pytest_gpumem.use_virtual_gpu(values="auto")
import gc, torch
matrix = torch.randn(64, 64, device="cuda")
with pytest_gpumem.measure():
    gc.set_threshold(10**6, 10, 10)
    for number in range(1200):
        if number == 200:  # what is made once is made
            count = gc.get_count()[0]
        matrix @ matrix
    print(gc.get_count()[0] - count)
    gc.callbacks.clear()  # a step's own code may do so
"""


def test_the_count_of_operations_leaves_the_collector_s_count_as_it_was():
    done = run_python(PRODUCTS, warm=True)
    assert done.returncode == 0, done.stderr
    assert abs(int(done.stdout)) < 50


RECORDED = f"""
import pathlib, pytest
{STEPS}
def kept(model, optimizer):
    \"\"\"Train; return by how much each step has raised the collector's count.\"\"\"
    gc.collect()
    gc.disable()
    counts = [gc.get_count()[0] for _ in range(25) if step(model, optimizer) is None]
    gc.enable()
    return [after - before for before, after in zip(counts, counts[1:])][4:]

def measure(name):
    trained = made()
    seen = dict(passes=passes(*trained), kept=kept(*trained))
    pathlib.Path(name).write_text(json.dumps(seen))

def test_unmarked():
    measure("unmarked.json")

@pytest.mark.gpu_memory
def test_marked():
    measure("marked.json")
"""


SESSIONS = """
import os, sys

import pytest
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.virtual.device import VirtualDevice
VirtualDevice.load(CARDS["H100"])
import torch, torch._dynamo

for values in ("off", "auto"):
    process = os.fork()
    if not process:
        os.chdir(values)
        os._exit(pytest.main([*sys.argv[1:], f"--gpumem-values={values}"]))
    assert os.waitpid(process, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What a marked test tells and an unmarked one, by the values that are computed."""
    folder = tmp_path_factory.mktemp("recorded")
    for values in ("off", "auto"):
        (folder / values).mkdir()
        (folder / values / "test_it.py").write_text(RECORDED, encoding="utf-8")
    command = f"import os; os.chdir({str(folder)!r})\n{SESSIONS}"
    done = run_python(command, *WITHOUT, "--gpumem-visible=session", "--gpumem-device=virtual")
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        values: [
            json.loads((folder / values / f"{name}.json").read_text())
            for name in ("unmarked", "marked")
        ]
        for values in ("off", "auto")
    }


@pytest.mark.parametrize("values", ["off", "auto"])
def test_the_record_of_a_marked_test_moves_no_pass(recorded, values):
    """It notes modules' calls, passes, steps and tensors: 29 objects a step, if each was one.

    Within a step there are a few more for a while: a pass that is due by them comes a step early.
    """
    unmarked, marked = recorded[values]
    assert intervals(marked["passes"]) == intervals(unmarked["passes"])
    # The sum over the steps: an object that Python reuses may count for the step after instead.
    assert sum(marked["kept"]) <= sum(unmarked["kept"]) + 1


def intervals(passes):
    """The steps between two passes; the first pass comes by what was made before the steps."""
    pairs = itertools.pairwise(number for number, _ in passes[1:19])
    return [after - before for before, after in pairs]


UNCOUNTED = """
import gc, json
from pytest_gpumem.recording.collector import Uncounted, begin_count, uncounted

class Thing:
    "An object that the collector counts."

def counted(work):
    begin_count()
    before = gc.get_count()[0]
    work()
    return gc.get_count()[0] - before

def make():
    with Uncounted():
        kept.extend([Thing() for _ in range(900)])  # more than begin a pass

def make_nothing():
    for _ in range(100):
        with Uncounted():
            pass

kept = []
print(json.dumps([counted(make), len(kept), counted(make_nothing)]))
kept = [Thing() for _ in range(300)]
print(json.dumps([counted(uncounted(kept.clear)), len(kept)]))
"""


@pytest.fixture(scope="module")
def uncounted_work():
    """What work adds to the collector's count; its process has no other thread, which may add."""
    done = run_python(UNCOUNTED, warm=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_made_and_kept_is_not_counted(uncounted_work):
    added, kept, _ = uncounted_work[0]
    assert abs(added) <= 2
    assert kept == 900


def test_a_block_without_objects_is_not_counted(uncounted_work):
    assert abs(uncounted_work[0][2]) <= 2


def test_what_is_freed_is_counted_as_before(uncounted_work):
    added, kept = uncounted_work[1]
    assert abs(added) <= 2
    assert kept == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_switched_on_again_only_where_it_was_on(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(LookupError), Uncounted():
            assert not gc.isenabled()
            raise LookupError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
