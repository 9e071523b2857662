"""Workspaces of convolutions measured on real GPUs, beside what the virtual GPU's cuDNN takes.

    python benchmarks/measured_workspaces.py [--cudnn VERSION=PATH ...] [--python PATH ...]

The rows are those of data/measured-workspaces.csv and data/measured-workspaces-more.csv
(data/README.md says where they are from). Each runs in a process of its own on the row's chip, in
the interpreter whose torch is nearest to the row's. ``--cudnn`` gives cuDNNs by path of their
libcudnn.so.9, installed with what they depend on; those of the interpreters are there anyway. A
row asks the cuDNN of its version; where that is not given, all that are, the nearest first. Then a
sweep counts how often the versions agree (workspace_sweep.py).
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace

import workspace_sweep
from provenance import ROOT, line, publish
from tabulate import tabulate

CHIPS = {
    "NVIDIA GeForce RTX 3090 Ti": ("RTX A6000", 84),
    "NVIDIA RTX PRO 5000 72GB Blackwell": ("RTX 5090", 110),
    "NVIDIA A100": ("A100-80GB", 108),
    "NVIDIA A100-SXM4-40GB": ("A100-40GB", 108),
    "not said": ("H100", 132),
}
"""a profile with the limits of the row's chip, and its SMs (NVIDIA's data sheets). "not said": a
comment whose figure without cuDNN has the 32 MiB of cuBLAS workspace of Hopper"""


ASKED_FROM = (9, 8)
"""the first cuDNN that plans for a device that is not there"""


@dataclass(frozen=True)
class Row:
    """One convolution that was measured.

    Attributes:
        loop: the figure is the peak of the report's whole script, else the workspace.
        size: what was measured, in bytes.
        within: how far the figure was rounded, in bytes.
    """

    name: str
    gpu: str
    torch: str
    cudnn: str
    dtype: str
    shapes: tuple[list[int], list[int]]
    bias: bool
    padding: int
    loop: bool
    size: int
    within: int


@dataclass(frozen=True)
class Found:
    """What one cuDNN said of a row; ``size`` in bytes, or why there is none."""

    row: Row
    cudnn: str
    torch: str
    size: int | str


def read() -> list[Row]:
    """Return the rows of both files, products of matrices left out."""
    data = ROOT / "benchmarks" / "data"
    rows = []
    with (data / "measured-workspaces.csv").open(encoding="utf-8") as lines:
        for it in csv.DictReader(lines):
            if it["operator"] != "aten::convolution":
                continue
            torch, dtype = ast.literal_eval(it["torch"])[0], ast.literal_eval(it["dtypes"])[0]
            shapes = tuple(ast.literal_eval(it["shapes"]))
            name, _, _ = it["id"].partition(".")
            one = (name, it["gpu"], torch, named(int(it["cudnn"])), dtype.removeprefix("torch."))
            rows.append(Row(*one, shapes, False, 1, False, int(it["bytes"]), 0))
    with (data / "measured-workspaces-more.csv").open(encoding="utf-8") as lines:
        for it in csv.DictReader(lines):
            shapes = (ast.literal_eval(it["input"]), ast.literal_eval(it["weight"]))
            one = (it["id"], it["gpu"], it["torch"], it["cudnn"], it["dtype"], shapes)
            more = (it["bias"] == "1", int(it["padding"]), it["figure"] == "loop")
            rows.append(Row(*one, *more, int(it["bytes"]), int(it["within"])))
    return rows


def named(version: int) -> str:
    """Return cuDNN's version as it is written: 91002 is 9.10.2."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version."""
    return tuple(int(it) for it in re.findall(r"\d+", version.partition("+")[0]))


def nearest_first(given: list[str], wanted: str) -> list[str]:
    """Return versions by their distance from one: major and minor count, then the patch."""
    major, minor, patch = numbers(wanted)[:3]

    def distance(version: str) -> tuple[int, int, int]:
        other = numbers(version)
        return abs(other[0] - major), abs(other[1] - minor), abs(other[2] - patch)

    return sorted(given, key=distance)


# -- in a process of its own --


def work(task: dict) -> None:
    """Run one row here; print the bytes and cuDNN's version."""
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    card, sms = task["chip"]
    profile = replace(find_card(card), sm_count=sms)
    device = VirtualDevice.load(profile)
    device.open(profile, 1)
    device.workspaces.take(task.get("end", "usual"))
    import workspace_figures

    figure = workspace_figures.peak if task["loop"] else workspace_figures.workspace
    told = {name: task[name] for name in ("bias", "padding", "asked")}
    size = figure(task["shapes"], task["dtype"], **told)
    version = device.library.cudnn_found()
    print(json.dumps([size, named(version) if version else "none"]))


# -- the processes --


def ask(python: str, cudnn: str, task: dict) -> list | str:
    """Return what a worker printed, or why it did not."""
    done = subprocess.run(
        [python, __file__, "--worker", json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GPUMEM_CUDNN": cudnn},
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return lines[-1][:120]
    return json.loads(done.stdout.strip().splitlines()[-1])


def own(python: str) -> tuple[str, str, str]:
    """Return an interpreter's torch, its cuDNN's version, and where that is."""
    code = (
        "import nvidia.cudnn as n, torch\n"
        "print(torch.__version__, torch.backends.cudnn.version(), list(n.__path__)[0])"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    torch, version, path = done.stdout.split(maxsplit=2)
    return torch, named(int(version)), f"{path.strip()}/lib/libcudnn.so.9"


def run(rows: list[Row], pythons: dict[str, str], cudnns: dict[str, str]) -> list[Found]:
    """Return what each cuDNN of interest says of the rows."""
    found = []
    for row in rows:
        minor = numbers(row.torch)[1]
        torch = min(pythons, key=lambda it, minor=minor: abs(numbers(it)[1] - minor))
        ordered = nearest_first(list(cudnns), row.cudnn)
        for version in ordered[:1] if row.cudnn in cudnns else ordered:
            task = {"chip": CHIPS[row.gpu], "dtype": row.dtype, "shapes": row.shapes}
            task |= {"bias": row.bias, "padding": row.padding, "loop": row.loop}
            task["asked"] = row.within > 0 and not row.loop
            said = ask(pythons[torch], cudnns[version], task)
            if not isinstance(said, str):
                said = said[0] if said[1] == version else f"cuDNN {said[1]} was asked"
            found.append(Found(row, version, torch, said))
            print(row.name, version, torch, said, row.size, file=sys.stderr, flush=True)
    return found


def table(found: list[Found]) -> str:
    """Return measured and virtual workspaces side by side."""
    heads = ["convolution", "GPU", "cuDNN", "asked", "torch here", "measured", "within"]
    heads += ["virtual", "difference"]
    lines = []
    for it in found:
        row = it.row
        one = [f"{row.name}{' (peak)' if row.loop else ''}", row.gpu, row.cudnn, it.cudnn, it.torch]
        one += [f"{row.size:,}", f"{row.within:,}" if row.within else "exact"]
        if isinstance(it.size, str):
            lines.append([*one, it.size, ""])
            continue
        off = it.size - row.size
        lines.append([*one, f"{it.size:,}", "none" if abs(off) <= row.within else f"{off:+,}"])
    return tabulate(lines, heads, disable_numparse=True)


def summary(found: list[Found]) -> list[str]:
    """Return how many rows come out as measured, with their own cuDNN and with others."""
    said = []
    same = [it for it in found if it.cudnn == it.row.cudnn]
    text = "rows whose own cuDNN was asked"
    for name, these in ((text, same), *others(found)):
        right = [it for it in these if isinstance(it.size, int)]
        right = [it for it in right if abs(it.size - it.row.size) <= it.row.within]
        said.append(f"{name}: {len(right)} of {len(these)} as measured")
    return said


def others(found: list[Found]) -> list[tuple[str, list[Found]]]:
    """Return what was asked of another version than the row's, by both versions."""
    pairs = dict.fromkeys((it.row.cudnn, it.cudnn) for it in found if it.row.cudnn != it.cudnn)
    return [
        (
            f"rows of cuDNN {real}, {asked} asked",
            [it for it in found if (it.row.cudnn, it.cudnn) == (real, asked)],
        )
        for real, asked in pairs
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    parser.add_argument("--cudnn", action="append", default=[], metavar="VERSION=PATH")
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--only", help="rows with this in their name; nothing is kept in results/")
    parser.add_argument("--shapes", type=int, default=120, help="of the sweep; 0: none")
    parser.add_argument("--sweep-only", action="store_true", help="no rows")
    args = parser.parse_args()
    if args.worker:
        task = json.loads(args.worker)
        (workspace_sweep.work if "sweep" in task else work)(task)
        return
    seen = [(python, *own(python)) for python in [sys.executable, *args.python]]
    pythons = {torch: python for python, torch, _, _ in seen}
    cudnns = {version: path for _, _, version, path in seen}
    cudnns |= dict(it.split("=", 1) for it in args.cudnn)
    ordered = sorted((it for it in cudnns if numbers(it) >= ASKED_FROM), key=numbers)
    cudnns = {version: cudnns[version] for version in ordered}
    if not args.sweep_only:
        compare_rows(args.only, pythons, cudnns)
    if args.shapes and not args.only:
        text = workspace_sweep.compare(args.shapes, sys.executable, cudnns, ask)
        publish("workspace_sweep", "\n".join([line(), "", *text]))


def compare_rows(only: str | None, pythons: dict[str, str], cudnns: dict[str, str]) -> None:
    """Print the rows' table; keep it if it is of all rows."""
    rows = [it for it in read() if not only or only in it.name]
    found = run(rows, pythons, cudnns)
    title = "Workspaces of convolutions, in bytes, measured on real GPUs and by cuDNN's plans here"
    text = "\n".join([title, line(), "", table(found), "", *summary(found)])
    if only:
        print(text)
    else:
        publish("measured_workspaces", text)


if __name__ == "__main__":
    main()
