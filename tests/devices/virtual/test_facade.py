"""The virtual GPU's facade: another tool needs nothing else, and its import is light."""

import ast
import json
import subprocess
import sys

import pytest
from helpers.pages import blocks
from helpers.paths import ROOT
from helpers.virtual_gpu import MIB
from helpers.warm import warm_python

(PROGRAM,) = blocks("architecture.md", "python")
"""of another tool, that wants a step's peak on a card: nothing but torch and the facade"""
TELL = """
import json
ours = [name for name in sys.modules if name.startswith("pytest_gpumem.")]
print(json.dumps([card.name, peak, problems, torch.cuda.is_available(), ours]))
"""
WORKSPACES = {"T4": 8 * MIB + 128 * 1024, "H100": 32 * MIB}
"""of cuBLAS, by the card"""
NOT_NEEDED = {"explain", "baselines", "cli", "fit", "judge", "meter", "plugin", "testrun"}
"""rooms"""


def python(program, *arguments, warm=False):
    """What a program of a process of its own prints: which modules are loaded is the matter."""
    command = [warm_python() if warm else sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def test_a_short_program_needs_nothing_of_the_package_but_the_facade():
    peaks = {}
    for card in WORKSPACES:
        name, peak, problems, visible, modules = python(PROGRAM + TELL, card, warm=bool(peaks))
        assert (name, problems, visible) == (card, [None], False)
        if not peaks:
            assert "pytest_gpumem.devices.virtual.device" in modules
            assert not {name.split(".")[1] for name in modules} & NOT_NEEDED
        peaks[card] = peak
    # Before torch 2.15 autograd's thread has a workspace of its own.
    number, rest = divmod(peaks["H100"] - peaks["T4"], WORKSPACES["H100"] - WORKSPACES["T4"])
    assert (number in {1, 2}, rest) == (True, 0)
    # Weights, gradients and momentum; the batch, the result and its square.
    assert 12 * MIB < peaks["T4"] - number * WORKSPACES["T4"] < 16 * MIB


@pytest.mark.parametrize("kind", ["none", "cuda"])
def test_a_session_without_the_virtual_gpu_imports_its_facade_alone(kind):
    program = f"""
import json, sys
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.select import choose
from pytest_gpumem.devices import children
choose({kind!r}, CARDS["T4"])
print(json.dumps([name for name in sys.modules if "devices.virtual" in name]))
"""
    assert python(program) == ["pytest_gpumem.devices.virtual"]


ROOMS = ("baselines", "explain", "fit", "judge", "meter", "report", "testrun")

KINDS = ("virtual", "cuda", "accelerator", "xpu", "mps")


def kinds_asked(tree):
    """The comparisons in a module with a kind of GPU, or with a device's class."""
    for node in ast.walk(tree):
        is_isinstance = isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if not (is_isinstance or isinstance(node, (ast.Compare, ast.Match))):
            continue
        words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
        words |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if words & {*KINDS, "VirtualDevice", "CudaDevice"}:
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "source", ['info.kind == "virtual"', "k in {'cuda'}", "isinstance(d, CudaDevice)"]
)
def test_the_check_knows_a_question_for_the_kind(source):
    assert list(kinds_asked(ast.parse(source)))


def test_the_code_that_measures_and_judges_does_not_know_which_gpu_it_has():
    """Rule 8 of docs/architecture.md; a device or its record has a property for each reason."""
    asked = [
        f"{path}: {question}"
        for room in ROOMS
        for path in (ROOT / "pytest_gpumem" / room).rglob("*.py")
        for question in kinds_asked(ast.parse(path.read_text("utf-8")))
    ]
    assert asked == []
