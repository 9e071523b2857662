"""Python's collector runs when it would without the measurement's own objects."""

import gc
import itertools
import json

import pytest
from helpers.virtual_gpu import run_python

from pytest_gpumem.collector import Uncounted, begin_count, uncounted

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
import sys, pytest_gpumem
pytest_gpumem.use_virtual_gpu(values=sys.argv[1])
{STEPS}
trained = made()
with pytest_gpumem.measure():
    seen = passes(*trained)
print(json.dumps(seen))
"""


def passes(values, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    # No fork of the warm process: there the collector hardly has old objects, and a few new ones
    # decide whether a pass is a full one.
    done = run_python(f"import sys, runpy; sys.argv = ['', '{values}']; runpy.run_path('{path}')")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_computed_values_move_no_pass(tmp_path):
    """Each operator makes some ten objects where values are computed: 20 passes would be 80.

    PyTorch keeps the Python object of a tensor that only C++ holds (a weight's transpose, saved
    for the backward pass) once an operator of ours was called with it. Five here, which the
    collector counts: a pass that is within five objects of a step's end comes in that step.
    """
    expected = passes("off", tmp_path)
    assert {generation for _, generation in expected} >= {0, 1}
    for values in ("full", "auto"):
        seen = passes(values, tmp_path)
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


@pytest.mark.parametrize("values", ["off", "auto"])
def test_the_record_of_a_marked_test_moves_no_pass(suite, values):
    """It notes modules' calls, passes, steps and tensors: 29 objects a step, if each was one.

    Within a step there are a few more for a while: a pass that is due by them comes a step early.
    """
    options = ("--gpumem-visible=session", f"--gpumem-values={values}")
    assert suite.run_apart(*options, source=RECORDED).outcomes["passed"] == 2
    unmarked, marked = (
        json.loads((suite.path / f"{name}.json").read_text()) for name in ("unmarked", "marked")
    )
    assert intervals(marked["passes"]) == intervals(unmarked["passes"])
    # A marked test begins with objects that Python keeps for reuse; an unmarked one makes them.
    assert max(marked["kept"]) <= max(unmarked["kept"])


def intervals(passes):
    """The steps between two passes; the first pass comes by what was made before the steps."""
    pairs = itertools.pairwise(number for number, _ in passes[1:19])
    return [after - before for before, after in pairs]


class Thing:
    """An object that the collector counts."""


def test_what_is_made_and_kept_is_not_counted():
    begin_count()
    kept, count = [], gc.get_count()[0]
    with Uncounted():
        kept += [Thing() for _ in range(900)]  # more than begin a pass
    assert abs(gc.get_count()[0] - count) <= 2
    assert len(kept) == 900


def test_a_block_without_objects_is_not_counted():
    begin_count()
    count = gc.get_count()[0]
    for _ in range(100):
        with Uncounted():
            pass
    assert abs(gc.get_count()[0] - count) <= 2


def test_what_is_freed_is_counted_as_before():
    begin_count()
    kept = [Thing() for _ in range(300)]
    count = gc.get_count()[0]
    uncounted(kept.clear)()
    assert abs(gc.get_count()[0] - count) <= 2


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
