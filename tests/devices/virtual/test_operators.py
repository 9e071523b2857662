"""PyTorch's operators on the virtual GPU: a part of those of benchmarks/operators."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from helpers.paths import ROOT
from helpers.warm import HANGS, warm_python

SWEEP = "benchmarks.operators.sweep"
SIZES = "benchmarks.operators.results"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tabulate") is None, reason="tabulate is not installed"
)


def sweep(*options):
    command = [warm_python(), "-m", SWEEP, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)


def outcomes(text):
    """Return how many operators had each outcome."""
    table = text.split("---\n", 1)[1].split("\n\n")[0]
    rows = (row.rsplit(maxsplit=1) for row in table.splitlines())
    return {what: int(count) for what, count in rows}


def test_no_operator_crashes_or_is_unsupported():
    """Each twentieth of some 700, forwards and backwards."""
    done = sweep("--every", "20", "--samples", "1", "--types", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcomes(done.stdout)
    assert found["operators"] > 25
    assert found["runs"] > 0.95 * found["operators"]


def test_an_operator_that_looks_at_values_is_named():
    done = sweep("--only", "add", "linalg.eig", "--samples", "1", "--types", "float32")
    assert done.returncode == 0, done.stderr
    assert outcomes(done.stdout) == {"runs": 1, "fails, having read values": 1, "operators": 2}
    assert "linalg.eig: float32: RuntimeError: torch.linalg.eig: input tensor" in done.stdout


def test_no_operator_has_a_wrong_size_without_a_note():
    """Each fortieth of some 1,000 under the default options, and some that read values back."""
    sized = ["nonzero", "masked_select", "unique", "to_sparse", "torchvision nms", "bincount"]
    options = ["--values", "auto", "--samples", "1", "--types", "float32,bool"]
    for chosen in (["--every", "40"], ["--only", *sized]):
        command = [warm_python(), "-m", SIZES, *options, *chosen]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"^differs in silence +0 +0$", done.stdout, re.MULTILINE)
        assert int(re.search(r"^the same +(\d+)", done.stdout, re.MULTILINE)[1]) >= 8


def test_a_wrong_size_without_a_note_is_named(tmp_path):
    """Where no value of a test is computed, and no decision by one is noted."""
    program = tmp_path / "silent.py"
    program.write_text(
        f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
from benchmarks.operators import results
from pytest_gpumem.devices.virtual.decisions import Decisions
from pytest_gpumem.devices.virtual.value_engine import VirtualValues

compute = VirtualValues.compute
VirtualValues.compute = lambda engine, scope: compute(
    engine, "off" if scope == "auto" else scope
)
Decisions.notes = lambda *_arguments: []
options = ["--values", "auto", "--samples", "2", "--types", "float32", "--only", "unique"]
sys.exit(results.main(options))
"""
    )
    done = subprocess.run(
        [warm_python(), str(program)], capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "differs in silence:\n    unique: " in done.stdout


def test_a_crash_and_a_hang_are_named_and_the_rest_goes_on(tmp_path):
    """The sweep's own part: what becomes of an operator that ends its process."""
    program = tmp_path / "crashing.py"
    program.write_text(
        f"""
import json, os, signal, sys, time

sys.path.insert(0, {str(ROOT)!r})
from benchmarks.operators import sweep

def attempt(name):
    if name == "crashing":
        os.abort()
    if name == "hanging":  # less time than all have, who may wait for a busy machine
        assert signal.alarm(1) > 1
        time.sleep(60)
    return {{"ran": 1, "reason": "", "missing": []}}

found = sweep.swept(lambda: attempt, ["one", "crashing", "two", "hanging", "three"], {HANGS})
print(json.dumps({{name: sweep.verdict(it) for name, it in found.items()}}))
"""
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert json.loads(done.stdout or "{}") == {
        "one": "runs",
        "crashing": "crashes or hangs",
        "two": "runs",
        "hanging": "crashes or hangs",
        "three": "runs",
    }, done.stderr
