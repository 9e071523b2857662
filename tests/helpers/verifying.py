"""Run ``gpumem verify`` with few steps, without a real GPU.

A virtual GPU stands in for the real one, as in tests/gpu (``fake_gpu``).
"""

from __future__ import annotations

import os
import subprocess
import sys

from helpers.paths import TESTS
from helpers.warm import HANGS

# Only the child process that measures imports the stand-in; the one that predicts does not.
STAND_IN = """
import sys
if sys.orig_argv[-1].endswith("measured.json"):
    import fake_gpu
"""
FEW = ("matrix product, float32", "attention, float32", "convolutions in 1D, float32")
NOTED = "a transform"
"""an additional step, on which the virtual GPU has a note"""
ONLY_FEW = f"""
from pytest_gpumem.cli.verify import battery
for name in set(battery.STEPS) - set({FEW!r}):
    del battery.STEPS[name]

def transform():
    import torch
    torch.fft.fft(torch.zeros(1 << 20, device="cuda"))

battery.STEPS[{NOTED!r}] = transform
"""


def verify(folder, *arguments, card="L4"):
    """Run the command in a new process, with few steps and a stand-in for the real GPU."""
    (folder / "sitecustomize.py").write_text(STAND_IN + ONLY_FEW, encoding="utf-8")
    environment = {
        **os.environ,
        "GPUMEM_FAKE_GPU": card,
        "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS / "gpu")]),
    }
    words = [sys.executable, "-m", "pytest_gpumem", "verify", *arguments]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False, timeout=HANGS
    )
