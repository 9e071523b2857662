"""Does the README's test have the right verdicts on an accelerator other than CUDA?

    python -m benchmarks.fidelity.accelerator [--standin]

It runs on the accelerator that torch finds: XPU, MPS, or an installed package's. With --standin it
builds the tests' stand-in accelerator (tests/programs/standin), and runs on that one.
The layer is narrower than the README's, as the stand-in computes on the CPU.
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
    layer(samples).sum().backward()
"""
OTHERS = """
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
"""
BUILD = """
import sys
from pathlib import Path

sys.path.insert(0, "tests")
from helpers.standin import build

build(Path(sys.argv[1]))
"""
CASES = (
    ("recorded", STEP.format(width=1024), ("--gpumem-update-baselines",)),
    ("repeated", STEP.format(width=1024), ()),
    ("by two workers of xdist", STEP.format(width=1024), ("-n2", "--dist=each")),
    ("a layer of 4096", STEP.format(width=4096), ()),
    ("parts, a leak, out of memory", OTHERS, ()),
)
TOLD = re.compile(
    r"^(?:(?:regressed|leaked|out of memory|over budget): .*|E +\w+Error: .*)$", re.MULTILINE
)
ROW = re.compile(r"^(?:test_\w+|  \(.*?\)) .*\d.*$", re.MULTILINE)


def main() -> None:
    """Run the cases, and publish the sessions' verdicts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--standin", action="store_true", help="build the tests' accelerator")
    arguments = parser.parse_args()
    rows, device = [], ""
    with tempfile.TemporaryDirectory() as name:
        folder, built = Path(name, "suite"), Path(name, "standin")
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        environment = {"COLUMNS": "200", "NO_COLOR": "1"}
        if arguments.standin:
            subprocess.run([sys.executable, "-c", BUILD, built], cwd=ROOT, check=True)
            paths = [str(built), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for case, source, options in CASES:
            (folder / "test_step.py").write_text(source, encoding="utf-8")
            words = (*options, "--gpumem-device=accelerator", "--tb=short", "-v")
            done = session(folder, *words, environment=environment)
            found = re.search(r"Peak memory in MiB on ([^,]+),", done.output)
            device = found[1] if found else device
            told = [*ROW.findall(done.output), *dict.fromkeys(TOLD.findall(done.output))]
            rows += [(case if at == 0 else "", sentence) for at, sentence in enumerate(told)]
    text = f"The README's test, with gpu_memory.device, on {device}\n{line('pytest-xdist')}\n\n"
    publish("accelerator", text + table(rows, ("case", "what the session says"), "l"))


if __name__ == "__main__":
    main()
