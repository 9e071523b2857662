"""Does the README's test have the right verdicts on an accelerator other than CUDA?

    python -m benchmarks.fidelity.accelerator [--standin | --backend FOLDER [--mask] [--note TEXT]]

It runs on the accelerator that torch finds: XPU, MPS, or an installed package's. With --standin it
builds the tests' stand-in accelerator (tests/programs/standin), and runs on that one. With
--backend it runs on a backend that was built into a folder, with an entry point by which torch
imports it, such as PyTorch's reference backend torch_openreg. That one computes no gradient of
attention without a mask: with --mask the test has one.
The layer is narrower than the README's, as these compute on the CPU.
The tests of tests/meter that run on any device run on it too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT, line, publish, session, table

STEP = """
import pytest
import torch


@pytest.mark.gpu_memory(max_gib=0.5, batch_size=4)
def test_step(gpu_memory):
    layer = torch.nn.TransformerEncoderLayer(256, 4, {width}, batch_first=True)
    layer.to(gpu_memory.device)
    samples = torch.randn(gpu_memory.batch_size, 64, 256, device=gpu_memory.device)
    layer(samples{mask}).sum().backward()
"""
MASK = ", src_mask=torch.zeros(64, 64, device=gpu_memory.device)"
OTHERS = """
import subprocess
import sys

import pytest
import torch

kept = []


def mib(number, device):
    return torch.empty(number << 20, dtype=torch.uint8, device=device)


@pytest.mark.gpu_memory
def test_has_parts(gpu_memory):
    with gpu_memory.measure("5 MiB"):
        mib(5, gpu_memory.device)
    with gpu_memory.measure("50 MiB"):
        mib(50, gpu_memory.device)


@pytest.mark.gpu_memory(max_leak_mib=1)
def test_leaks_3_mib(gpu_memory):
    kept.append(mib(3, gpu_memory.device))


@pytest.mark.gpu_memory
def test_needs_a_pebibyte(gpu_memory):
    mib(1 << 30, gpu_memory.device)


@pytest.mark.gpu_memory(steady=True)
def test_grows(gpu_memory):
    grown = []
    for _ in range(6):
        grown.append(mib(2, gpu_memory.device))
        gpu_memory.step()


CODE = "import sys, torch; torch.empty(7 << 20, dtype=torch.uint8, device=sys.argv[1])"


@pytest.mark.gpu_memory
def test_starts_a_process(gpu_memory):
    subprocess.run([sys.executable, "-c", CODE, str(gpu_memory.device)], check=True)
"""
BUILD = """
import sys
from pathlib import Path

sys.path.insert(0, "tests")
from helpers.standin import build

build(Path(sys.argv[1]))
"""
TOLD = re.compile(
    r"^(?:gpumem: \S+ (?:device|records|counts|is not|does not)\b.*"
    r"|(?:regressed|leaked|out of memory|over budget): .*|E +\w+Error: .*)$",
    re.MULTILINE,
)
STANDIN = "STANDIN"
"""variable with the backend's folder, for the tests of any device (tests/meter/conftest.py)"""
ROW = re.compile(r"^(?:test_\w+|  \(.*?\)) .*\d.*$", re.MULTILINE)


PASSED = re.compile(r"::(test_\w+).* (PASSED|FAILED|ERROR)")


def cases(mask: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return each session's name, test file and options."""
    step, wide = (STEP.format(width=width, mask=mask) for width in (1024, 4096))
    without = [("the README's, without a mask", STEP.format(width=1024, mask=""), ())]
    return [
        *(without if mask else ()),
        ("recorded", step, ("--gpumem-update-baselines",)),
        ("repeated", step, ()),
        ("by two workers of xdist", step, ("-n2", "--dist=each")),
        ("a layer of 4096", wide, ()),
        ("parts, a leak, out of memory, steps, a process", OTHERS, ()),
    ]


def main() -> None:
    """Run the cases, and publish the sessions' verdicts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--standin", action="store_true", help="build the tests' accelerator")
    parser.add_argument("--backend", type=Path, help="folder with a built backend")
    parser.add_argument("--mask", action="store_true", help="give the attention a mask")
    parser.add_argument("--note", help="what the record says of the backend")
    arguments = parser.parse_args()
    rows, device, said = [], "", set[str]()
    with tempfile.TemporaryDirectory() as name:
        folder, built = Path(name, "suite"), arguments.backend
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        environment = {"COLUMNS": "200", "NO_COLOR": "1"}
        if arguments.standin:
            built = Path(name, "standin")
            subprocess.run([sys.executable, "-c", BUILD, built], cwd=ROOT, check=True)
        if built:
            paths = [str(built.resolve()), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for case, source, options in cases(MASK if arguments.mask else ""):
            (folder / "test_step.py").write_text(source, encoding="utf-8")
            words = (*options, "--gpumem-device=accelerator", "--tb=short", "-v")
            done = session(folder, *words, environment=environment)
            found = re.search(r"Peak memory in MiB on ([^,]+),", done.output)
            device = found[1] if found else device
            told = [*TOLD.findall(done.output), *ROW.findall(done.output)]
            told = [sentence for sentence in dict.fromkeys(told) if sentence not in said]
            said |= {sentence for sentence in told if sentence.startswith("gpumem: ")}
            rows += [(case if at == 0 else "", sentence) for at, sentence in enumerate(told)]
        if built:  # in which torch finds it
            tests = ROOT / "tests/meter/test_any_device.py"
            environment = {**os.environ, "COLUMNS": "200", STANDIN: str(built.resolve())}
            done = session(ROOT, str(tests), "-vv", "-p", "no:randomly", environment=environment)
            ended = PASSED.findall(done.output)
            rows += [
                ("" if at else "tests/meter/test_any_device.py", f"{test} {outcome.lower()}")
                for at, (test, outcome) in enumerate(ended)
            ]
    kind = device.partition("-")[0]
    heads = [f"The README's test, with gpu_memory.device, on {device}", line("pytest-xdist")]
    if arguments.note:
        heads.append(arguments.note)
    if arguments.mask:
        heads.append(f"{kind} computes no gradient of attention without a mask: the test has one")
    text = "\n".join(heads) + "\n\n" + table(rows, ("case", "what the session says"), "l")
    publish("accelerator" if arguments.standin else f"accelerator_{kind}", text)


if __name__ == "__main__":
    main()
