"""Are figures the same without NVIDIA's packages?

    python -m benchmarks.fidelity.light_figures [PYTHON ...] [--steps '*' --sweep 120]

``--steps '*'`` are all of the fidelity matrix; without a PYTHON it takes this environment.

Each environment has all packages. Two others are made of links to its files, by
tests/helpers/light.py: without NVIDIA's packages and Triton, and the same with cuDNN. All three run
the README's test, steps of the fidelity matrix, and convolutions drawn at random
(cudnn/agreement.py). The rows of a torch that runs again replace its rows in
benchmarks/results/light_figures.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import RESULTS, ROOT, line, publish, table

CARD = "H200"
STEPS = (
    *("convnet-fp32", "unet-bf16", "vit-small-bf16", "gpt2-bf16", "gpt2-sdpa-cudnn"),
    *("moe-8x2-bf16", "lstm-lm-fp32", "mlp-adamw"),
)
SWEPT = ("T4", "L4", "H100", "RTX 5090")
"""cards of the sweep"""
KINDS = ("all packages", "light with cuDNN", "light")
MAKE = """
import sys
from pathlib import Path
from helpers.light import light_environment
print(light_environment(Path(sys.argv[1]), cudnn=sys.argv[2] == "cudnn"))
"""
README_STEP = """
import json
from pytest_gpumem import use_virtual_gpu
use_virtual_gpu("T4")
import torch
layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True).cuda()
layer(torch.randn(32, 256, 1024, device="cuda")).sum().backward()
version = torch.version.cuda, torch.__version__
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), *version]))
"""
SWEEP = """
import json, sys
from benchmarks.cudnn import agreement
print(json.dumps(agreement.measure({"sweep": int(sys.argv[1]), "card": sys.argv[2]})))
"""


def output_of(command: list[str]) -> str:
    """Run a command that has to succeed, with the benchmarks importable; return its output."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "benchmarks", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def last_line(python: str, program: str, *words: str) -> str:
    """Run a program; return the last line of its output."""
    return output_of([python, "-c", program, *words]).splitlines()[-1]


def figures(python: str, steps: list[str], sweep: int) -> dict[str, dict[str, object]]:
    """Return allocated and reserved bytes, or what came of it, by group and step."""
    allocated, reserved, *_ = json.loads(last_line(python, README_STEP))
    groups: dict[str, dict[str, object]] = {"README": {"": (allocated, reserved)}}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        options = ["--virtual", CARD, "--out", str(out), "--only", *steps]
        output_of([python, "-m", "benchmarks.fidelity.run", *options])
        matrix = json.loads(out.read_text(encoding="utf-8"))["steps"]
    groups["steps"] = {
        name: (step["allocated"], step["reserved"]) if step["status"] == "ok" else step["status"]
        for name, step in matrix.items()
    }
    groups["convolutions"] = {}
    for card in SWEPT if sweep else ():
        answers, _ = json.loads(last_line(python, SWEEP, str(sweep), card))
        groups["convolutions"] |= {f"{card} {key}": value for key, value in answers.items()}
    return groups


def rows_of(python: str, steps: list[str], sweep: int) -> list[list[str]]:
    """Return a table's rows: one for each kind of environment that a Python has."""
    *_, cuda, torch = json.loads(last_line(python, README_STEP))
    with tempfile.TemporaryDirectory() as folder:
        pythons = [python]
        pythons += [last_line(python, MAKE, f"{folder}/{kind}", kind) for kind in ("cudnn", "no")]
        all_figures = [figures(one, steps, sweep) for one in pythons]
    whole = all_figures[0]
    rows = []
    for kind, groups in zip(KINDS, all_figures, strict=True):
        (allocated, reserved) = groups["README"][""]
        row = [torch, cuda, kind, f"{allocated:,} / {reserved:,}"]
        for group in ("steps", "convolutions"):
            same = sum(groups[group][key] == value for key, value in whole[group].items())
            row.append(f"{same} of {len(whole[group])}")
        other = [key for key, value in whole["steps"].items() if groups["steps"][key] != value]
        rows.append([*row, ", ".join(other)])
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Run all environments that are named, and keep the rows of the others."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), help="names, with wildcards")
    parser.add_argument("--sweep", type=int, default=0, help="convolutions drawn (0: none)")
    options = parser.parse_args()
    heads = ["torch", "CUDA", "environment", "README's test, bytes", "steps", "convolutions"]
    path = RESULTS / "light_figures.txt"
    tables = {}
    if path.exists():
        before = path.read_text(encoding="utf-8").split("\n\n")[1:]
        first_cell = re.compile(r"^\d+\.\d+\S*", re.MULTILINE)
        tables = {first_cell.search(table)[0]: table.rstrip() for table in before}
    for python in options.pythons:
        rows = rows_of(python, options.steps, options.sweep)
        drawn = table(rows, [*heads, "steps that differ"])
        tables[rows[0][0]] = f"{line()}\n{drawn}"
        title = (
            f"{__doc__.splitlines()[0]}\nAllocated and reserved bytes on the virtual T4 (README) "
            f"and {CARD}; how many steps and workspaces of\nconvolutions "
            f"({', '.join(SWEPT)}) are those of the environment with all packages."
        )
        publish("light_figures", "\n\n".join([title, *tables.values()]))


if __name__ == "__main__":
    main()
