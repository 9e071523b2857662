"""Do figures repeat? The same steps many times, in one process, in fresh ones, in other orders.

    python -m benchmarks.fidelity.repeatability [--repeats 5] [--device auto]

The spread in bytes of each step's peaks, over all runs, is the evidence for the default tolerances.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT, line, publish, session, table

SUITE = """
import gc, random, sys
sys.path.insert(0, {root!r})
import pytest
from benchmarks.fidelity import steps

NAMES = {names!r}
junk = []

@pytest.mark.gpu_memory(baseline=False)
@pytest.mark.parametrize("repeat", range({repeats}))
@pytest.mark.parametrize("name", NAMES)
def test_step(name, repeat, gpu_memory):
    if {litter!r}:  # objects and garbage of a length that changes from test to test
        junk.extend([[] for _ in range(random.randrange(50000))])
        del junk[: random.randrange(len(junk) + 1)]
    step = steps.STEPS[name].build()
    for _ in range(3):
        step()
"""
CONFTEST = """
import json, random

def pytest_collection_modifyitems(items):
    if {shuffle!r}:
        random.Random({seed!r}).shuffle(items)

def pytest_gpumem_judged(item, result):
    m = result.measurement
    with open("figures", "a") as file:
        name = item.callspec.params["name"]
        file.write(json.dumps([name, m.peak_allocated, m.peak_reserved]) + "\\n")
"""
NAMES = [
    "mlp-adamw",
    "convnet-fp32",
    "resnet50-fp32",
    "resnet50-fp16-scaler",
    "vit-small-bf16",
    "bert-base-bf16",
    "gpt2-bf16",
    "gpt2-checkpointed",
    "moe-8x2-bf16",
    "unet-bf16",
]


def figures(names: list[str], repeats: int, device: str, *, shuffle: bool, litter: bool) -> list:
    """Run the steps in one session; return each run's name, peak allocated and peak reserved."""
    values = {
        "root": str(ROOT),
        "names": names,
        "repeats": repeats,
        "litter": litter,
        "shuffle": shuffle,
        "seed": random.random(),  # noqa: S311 - an order of tests
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        (folder / "test_steps.py").write_text(SUITE.format(**values), encoding="utf-8")
        (folder / "conftest.py").write_text(CONFTEST.format(**values), encoding="utf-8")
        done = session(folder, "--tb=short", f"--gpumem-device={device}")
        assert done.status == 0, done.output
        return [json.loads(it) for it in (folder / "figures").read_text().splitlines()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    n, device = options.repeats, options.device
    groups = {
        "one process": figures(NAMES, n, device, shuffle=False, litter=False),
        "other orders": [
            row for _ in range(2) for row in figures(NAMES, n, device, shuffle=True, litter=True)
        ],
        "alone": [
            row for name in NAMES for row in figures([name], 1, device, shuffle=False, litter=False)
        ],
    }
    lines = []
    for name in NAMES:
        runs = {k: [row[1:] for row in rows if row[0] == name] for k, rows in groups.items()}
        every = [row for rows in runs.values() for row in rows]
        cells = [name, len(every), every[0][0], every[0][1]]
        for rows in (*runs.values(), every):
            spreads = [max(it[i] for it in rows) - min(it[i] for it in rows) for i in (0, 1)]
            cells.append("/".join(map(str, spreads)))
        lines.append(cells)
    heads = ["step", "runs", "allocated", "reserved", *(f"{it} a/r" for it in groups), "all a/r"]
    text = [
        "Repeated measurements: spread (most less least) of peak allocated / peak reserved, bytes",
        line(),
        "",
        table(lines, heads, "r"),
        "",
        f"one process: {n} runs each, in order; other orders: 2 sessions of {n} runs each,",
        "shuffled, with objects left lying about between tests; alone: a process each, one run.",
    ]
    name = "repeatability" if device != "cuda" else "repeatability-cuda"
    publish(name, "\n".join(text))


if __name__ == "__main__":
    main()
