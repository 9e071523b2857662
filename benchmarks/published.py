"""Peaks that others measured on real GPUs, beside the virtual GPU's of the same steps.

    python benchmarks/published.py [--also /path/to/another/python ...]

The rows are data/real-gpu-peaks.csv (with the source of each). Each step runs in a process of its
own, on the row's card; the torch versions here are those of the interpreters, not the rows'.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import ROOT, line, publish
from tabulate import tabulate

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "real-gpu-peaks.csv"
CARDS = {
    "GeForce RTX 3060": "RTX 3060",
    "GeForce RTX 4060": "RTX 4060",
    "A100": "A100-80GB",
    "V100-DGXS-32GB": "V100-32GB",
}
GPT = {"n_layer": 6}
NEO = {
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "attention_types": [[["global", "local"], 6]],
    "window_size": 256,
}
SCRATCH = (
    {"own": True, "keep_mask": True, "fused": False, "half": False},
    {"own": True, "fused": False, "half": False},
    {"own": True, "fused": True, "half": False},
    {"own": True, "fused": True, "half": True},
    {"own": False, "fused": True, "half": True},
    {"own": False, "sdpa": True, "fused": True, "half": True},
    {"own": False, "sdpa": True, "fused": True, "half": True, "compiled": True},
)

WHY = {
    "C": "C  convolutions: the row is NVML's figure, cuDNN's workspaces and kernels loaded "
    "late in it; the virtual GPU takes cuDNN's workspaces as zero, and which kernels PyTorch has "
    "for a convolution (cuDNN's or its own) is its choice",
    "N": "N  the row is NVML's figure: kernels that are loaded late are in it, some 100 MiB that "
    "no prediction of the allocator has; the row's version of transformers is not recorded",
    "A": "A  torch 1.9 with cudnn.benchmark: the row's trace shows workspaces of convolutions",
    "I": "I  torch.compile: which operations are fused, and which buffers reused, is decided "
    "by that version of Inductor",
}


@dataclass(frozen=True)
class Row:
    """One published figure and how to make ours."""

    name: str
    card: str
    torch: str
    metric: str
    real: float
    call: tuple[str, dict[str, Any]]
    why: str = ""


def plan(row: dict[str, str], scratch: list[dict[str, Any]]) -> tuple[str, dict[str, Any], str]:
    """Return the function of published_steps.py for a row, its arguments, and why it errs."""
    model, batch, optimizer = row["model"], int(row["batch"]), row["optimizer"]
    if row["source"].startswith("pytorch/kineto"):
        return "kineto_resnet50", {}, "A"
    if row["source"].startswith("rasbt"):
        arguments = scratch.pop(0)
        return "scratch_gpt", arguments, "I" if "compiled" in arguments else "?"
    if "gpt-neo" in model:
        return (
            "transformers_step",
            {"config": "GPTNeoConfig", "batch": batch, "optimizer": optimizer, **NEO},
            "N",
        )
    if "distilgpt2" in model:
        return (
            "transformers_step",
            {"config": "GPT2Config", "batch": batch, "optimizer": optimizer, **GPT},
            "N",
        )
    name = "mnasnet" if "MNASNet" in model else model.partition(".")[2]
    return "torchvision_step", {"model": name, "batch": batch, "optimizer": optimizer}, "C"


def read() -> list[Row]:
    """Return the published rows."""
    scratch = list(SCRATCH)
    rows = []
    with DATA.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            function, arguments, why = plan(row, scratch)
            short = row["model"].rpartition("/")[2].removeprefix("torchvision.")
            name = f"{short.partition('(')[0]} x{row['batch']} {row['optimizer']}"
            if function == "scratch_gpt":
                name = f"GPT-2 {row['notes'].partition(';')[0]}"
            rows.append(
                Row(
                    name,
                    CARDS[row["gpu"]],
                    row["torch_version"].partition("+")[0],
                    row["metric"],
                    float(row["value_mib"]),
                    (function, arguments),
                    why,
                )
            )
    return rows


def work(text: str) -> None:
    """Run one step here and print its figure."""
    card, function, arguments = json.loads(text)
    from pytest_gpumem.context import use_virtual_gpu
    from pytest_gpumem.devices.virtual import VirtualDevice

    use_virtual_gpu(card)
    import published_steps
    import torch

    value = getattr(published_steps, function)(**arguments)
    unsupported = VirtualDevice.loaded().library.unsupported()
    print(json.dumps([value, torch.__version__, sorted(unsupported)]))


def ask(python: str, row: Row) -> tuple[float, str] | str:
    """Return our figure and the torch that made it, or why there is none."""
    task = json.dumps([row.card, *row.call])
    done = subprocess.run(
        [python, __file__, "--worker", task],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return lines[-1][:120]
    value, version, unsupported = json.loads(done.stdout.strip().splitlines()[-1])
    if unsupported:
        return f"not supported: {', '.join(unsupported)}"
    return value, version.partition("+")[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--also", nargs="*", default=[], metavar="PYTHON")
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    table, failures, errors = [], [], {}
    for row in read():
        for python in (sys.executable, *options.also):
            found = ask(python, row)
            if isinstance(found, str):
                failures.append(f"{row.name}, {Path(python).parents[1].name}: {found}")
                continue
            value, version = found
            error = 100 * (value - row.real) / row.real
            errors.setdefault(version, []).append(error)
            why = row.why if abs(error) > 1 else ""
            table.append(
                [
                    row.name,
                    row.card,
                    row.torch,
                    f"{row.real:.0f}",
                    version,
                    f"{value:.0f}",
                    f"{error:+.2f}",
                    why,
                ]
            )
            print(table[-1], file=sys.stderr, flush=True)
    heads = ["step", "card", "torch", "real MiB", "torch here", "virtual", "%", "why"]
    text = [
        "Published peaks of real GPUs and the virtual GPU's",
        line("torchvision", "transformers"),
        "",
        tabulate(table, heads, disable_numparse=True),
        "",
    ]
    for version, values in errors.items():
        sizes = [abs(it) for it in values]
        figures = f"median {statistics.median(sizes):.2f} %, worst {max(sizes):.2f} %"
        text.append(f"torch {version}: {len(values)} rows, {figures}")
    text += ["", "Errors over 1 %:", *WHY.values()]
    if failures:
        text += ["", "Not reproduced:", *failures]
    publish("published", "\n".join(text))


if __name__ == "__main__":
    main()
