"""``gpumem fit``: whether a step function fits on cards, outside of pytest."""

from __future__ import annotations

import re
import sys

import pytest
from helpers.virtual_gpu import run_python

STEPS = """
import torch

def step(n):
    tensors = [torch.empty(n << 28, dtype=torch.uint8, device="cuda") for _ in range(2)]

def whole():
    step(32)

def wrong(a, b):
    pass

def on_the_cpu(n):
    torch.empty(n)

def evenly(n):
    step(2)

class Trainer:
    @staticmethod
    def step(n, more=0, *rest, **options):
        step(2 * n)

number = 3
"""
TRANSFORM = """
def step(n):
    torch.fft.fft(torch.zeros(n, 4096, device="cuda"))
"""
READS_BACK = """
def reads(n):
    step(n)
    if not torch.ones(n).cuda().all():
        step(2 * n)
"""
UNSUPPORTED = """
def step(n):
    import ctypes
    torch.ones(n).cuda()
    ctypes.CDLL("libcuda.so.1").cuGreenCtxCreate()
"""
GPUMEM = "import sys; from pytest_gpumem.cli.main import main; sys.exit(main())"


SLOW = f"""
import itertools, types
import pytest_gpumem.fit.prober as prober
prober.time = types.SimpleNamespace(monotonic=itertools.count(0, 60).__next__)
{GPUMEM}
"""
"""a command whose clock goes on by a minute with each look"""


@pytest.fixture
def fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "steps.py").write_text(STEPS)

    def run(*arguments):
        done = run_python(GPUMEM, "fit", *arguments, warm=True)
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_largest_size_on_each_card(fit):
    status, out, err = fit("steps:step", "--card=T4, l4", "--card", "A100-80GB")
    assert status == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:3] == ["card", "for", "a"]
    assert [(line[0], line[-2]) for line in lines[2:-1]] == [
        ("T4", "28"),
        ("L4", "43"),
        ("A100-80GB", "157"),
    ]


def test_a_size_that_is_asked_for_fits_or_the_largest_is_said(fit):
    status, out, _ = fit("steps.py:step", "--card=T4,L4", "--size=40")
    assert status == 1
    rows = {line.split()[0]: line for line in out.splitlines()[2:]}
    assert " no " in rows["T4"]
    assert rows["T4"].split()[-2] == "28"
    assert " yes " in rows["L4"]
    assert "20.00 GiB" in rows["L4"]


def test_a_step_of_no_argument(fit):
    assert fit("steps:whole", "--card=L4")[0] == 0
    status, out, _ = fit("steps:whole", "--card=T4")
    assert status == 1
    assert " no" in out
    status, _, err = fit("steps:whole", "--size=3")
    assert status == 2
    assert "--size=3: steps:whole takes no argument" in err


def test_limits_multiples_and_methods(fit):
    _, out, _ = fit("steps:Trainer.step", "--card=T4")
    assert out.splitlines()[2].split()[-2] == "14"
    _, out, _ = fit("steps:step", "--card=T4", "--max-gib=4", "--multiple=3")
    assert out.splitlines()[2].split()[-2] == "6"
    _, out, _ = fit("steps:step", "--card=T4", "--limit=5", "--start=2")
    assert out.splitlines()[2].split()[-2] == "5"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["steps"], "steps: this is not MODULE:FUNCTION; write for example train.py:step"),
        (
            ["steps:nope"],
            "no function or class nope; name one of these: step, whole, wrong, on_the_cpu",
        ),
        (["steps:number"], "steps:number: this module has no function or class number"),
        (["steps:wrong"], "steps:wrong: this function needs the arguments a, b"),
        (["builtins:max"], "builtins:max: the arguments of this function are unknown"),
        (["none.py:step"], "none.py:step: there is no file none.py"),
        (["none.at.all:step"], "none.at.all:step: there is no module none"),
        (["steps:step", "--card=Voodoo"], "no card has this name"),
        (["steps:step", "--max-gib=-1"], "--max-gib=-1.0: this is not a size"),
        (["steps:step", "--start=0"], "start must be a whole number"),
        (["steps:step", "--size=0"], "size must be a whole number"),
    ],
)
@pytest.mark.usefixtures("virtual_gpu")
def test_bad_input_ends_with_2_and_one_line(here, gpumem, monkeypatch, arguments, error):
    (here / "steps.py").write_text(STEPS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    status, out, err = gpumem("fit", *arguments)
    sys.modules.pop("steps", None)
    assert (status, out) == (2, "")
    assert error in err
    assert "Traceback" not in err


def test_an_error_of_the_step_is_shown_as_python_shows_it(fit, tmp_path):
    (tmp_path / "steps.py").write_text("def step(n):\n    raise LookupError('mine')\n")
    status, out, err = fit("steps:step")
    assert (status, out) == (2, "")
    frames = [line.split(", ")[0] for line in err.splitlines() if line.startswith("  File ")]
    assert frames == [f'  File "{tmp_path / "steps.py"}"']
    assert "LookupError: mine" in err
    assert err.endswith("gpumem: steps:step failed, so its memory is unknown\n")


def test_what_a_prediction_leaves_out_is_said(fit, tmp_path):
    (tmp_path / "steps.py").write_text(f"{STEPS}\n{TRANSFORM}")
    status, out, err = fit("steps:step", "--card=T4,L4", "--limit=4")
    assert status == 0, err
    assert out.count("note: the workspaces of cuFFT are estimates") == 1  # of both cards
    assert out.endswith("memory is predicted; kernels did not run\n")
    (tmp_path / "steps.py").write_text(f"{STEPS}\n{READS_BACK}")
    out = fit("steps:reads", "--limit=4", "--values=off")[1]
    assert re.search(r"note: \d values were read back from the virtual GPU \(steps.py:\d+\)", out)


def test_a_step_decides_by_values_as_on_a_gpu(fit, tmp_path):
    (tmp_path / "steps.py").write_text(f"{STEPS}\n{READS_BACK}")
    status, out, err = fit("steps:reads", "--card=T4", "--size=16")
    assert status == 0, err
    assert "8192.00 MiB" in out
    assert "note" not in out


def test_a_step_that_does_what_the_virtual_gpu_cannot_is_no_answer(fit, tmp_path):
    (tmp_path / "steps.py").write_text(f"{STEPS}\n{UNSUPPORTED}")
    status, out, err = fit("steps:step", "--limit=4")
    assert (status, out) == (2, "")
    assert "steps:step: the virtual GPU does not support cuGreenCtxCreate" in err
    assert err.endswith("run it on a real GPU (--device=cuda)\n")


@pytest.mark.parametrize("arguments", [["steps:on_the_cpu"], ["steps:on_the_cpu", "--size=8"]])
def test_a_step_without_memory_of_the_device_is_no_answer(fit, arguments):
    status, out, err = fit(*arguments)
    assert (status, out) == (2, "")
    assert "steps:on_the_cpu: this function allocated no memory on" in err
    assert "creates the model and its data on the GPU" in err


def test_memory_that_does_not_grow_with_the_size_is_said(fit):
    status, out, _ = fit("steps:evenly", "--card=T4")
    assert status == 0
    assert "memory does not grow with the value" in out


def test_a_long_search_shows_its_probes_on_the_error_stream(fit):
    done = run_python(SLOW, "fit", "steps:step", "--card=T4", warm=True)
    assert done.returncode == 0
    assert "gpumem: T4: probe 1: 1 fits, 512.00 MiB of 14.44 GiB reserved\n" in done.stderr
    assert "probe 1" not in done.stdout


def test_an_interrupted_search_says_what_it_knows_and_ends_as_shells_have_it(fit, tmp_path):
    (tmp_path / "steps.py").write_text(
        STEPS + "\ndef stops(n):\n    if n > 4:\n        raise KeyboardInterrupt\n    step(n)\n"
    )
    status, _, err = fit("steps:stops", "--card=T4", "--limit=100")
    assert status == 130
    assert "gpumem: T4: interrupted after" in err
    assert "Traceback" not in err
