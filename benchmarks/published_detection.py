"""Reserved memory of detectors as Ultralytics' search for a batch size printed it, beside ours.

    pip install --no-deps --target LIBRARIES/8.4.116 ultralytics==8.4.116
    pip install --no-deps --target LIBRARIES/8.4.95 ultralytics==8.4.95
    python benchmarks/published_detection.py --python /path/to/python --libraries LIBRARIES

The rows are those of data/detection-reserved.csv (data/README.md says where they are from). The
interpreter needs their torch 2.11 and what Ultralytics imports (torchvision, opencv, matplotlib,
polars, ultralytics-thop). As there, a table's batch sizes run in one process, one after the other,
up to the one that is out of memory; its weights are random here. ``--seen`` leaves the rows out
that nobody had looked at, though the process runs them for those behind them.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from provenance import ROOT, line, publish
from tabulate import tabulate
from workers import errors_by_group

if TYPE_CHECKING:
    import torch

DATA = ROOT / "benchmarks" / "data" / "detection-reserved.csv"
GIB, MIB = 2**30, 2**20
FULL = re.compile(r"memory ([\d.]+) ([GM])iB is allocated by PyTorch, and ([\d.]+) ([GM])iB is")
TITLE = "Reserved memory by Ultralytics' AutoBatch, and what was held when it was out of memory"
Result = dict[str, "float | tuple[float, float]"]
"""by batch size: GB as that table has them, or GiB allocated and reserved when memory is full"""


def rows() -> list[dict[str, str]]:
    """Return the rows, in the order of the file."""
    with DATA.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def work(run: str) -> None:
    """Run a table's rows here; print their figures, and the versions."""
    table = [row for row in rows() if row["run"] == run]
    row = table[0]
    from pytest_gpumem.devices.cards import CARDS
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    card = dataclasses.replace(CARDS[row["card"]], total_memory=int(row["total_mib"]) * MIB)
    device = VirtualDevice.load(card)
    device.open(card, 1)
    import torch

    torch.cuda.init()
    import ultralytics

    if ultralytics.__version__ != row["ultralytics"]:
        raise SystemExit(f"Ultralytics {ultralytics.__version__}, not {row['ultralytics']}")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    ultralytics.utils.LOGGER.addHandler(handler)
    reserved = search(trained(row), table)
    held = [found for message in messages if (found := FULL.search(message))]
    result: Result = {}
    for tried, figure in zip(table, reserved, strict=True):
        result[tried["batch"]] = held_in_gib(held.pop(0)) if figure is None else figure
    if unsupported := sorted(device.library.unsupported()):
        raise SystemExit(f"not supported: {', '.join(unsupported)}")
    print(json.dumps([result, f"torch {torch.__version__}, cuDNN {device.library.cudnn_found()}"]))


def held_in_gib(message: re.Match[str]) -> tuple[float, float]:
    """Return GiB that were allocated and reserved, by a message that memory is full."""
    allocated, cached = (
        float(message[at]) / (1 if message[at + 1] == "G" else 1024) for at in (1, 3)
    )
    return allocated, allocated + cached


def trained(row: dict[str, str]) -> torch.nn.Module:
    """Return a row's model as the trainer has it when it looks for a batch size."""
    from ultralytics import YOLO
    from ultralytics.nn import tasks
    from ultralytics.utils.checks import check_amp
    from ultralytics.utils.torch_utils import init_seeds

    init_seeds(1, deterministic=True)
    kind = tasks.SegmentationModel if row["model"].endswith("-seg") else tasks.DetectionModel
    classes = int(row["classes"])
    model = kind(f"{row['model']}.yaml", nc=classes, ch=3, verbose=False).cuda()
    model.names = {number: str(number) for number in range(classes)}
    for name, parameter in model.named_parameters():
        if ".dfl" in name:
            parameter.requires_grad = False
    # Its check of mixed precision compares two predictions of another network, and leaves a part
    # of their memory; with random weights they differ, which does not matter here.
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        YOLO("yolo26n.yaml").save("yolo26n.pt")
        check_amp(model)
    return model


def search(model: torch.nn.Module, table: list[dict[str, str]]) -> list[float | None]:
    """Return GB for each batch size, as the search for the largest prints them."""
    from copy import deepcopy

    import torch
    from ultralytics.utils.torch_utils import autocast, profile_ops

    size, objects = int(table[0]["size"]), int(table[0]["objects"])
    images = [torch.empty(int(row["batch"]), 3, size, size) for row in table]
    with autocast(enabled=True):
        copy = deepcopy(model).train()
        gc.collect()
        results = profile_ops(images, copy, n=1, device=torch.device(0), max_num_obj=objects)
    return [result and result[2] for result in results]


def ask(python: str, libraries: Path, run: str, version: str) -> tuple[Result, str]:
    """Return the figures of a worker, and its versions."""
    places = [str(ROOT), str(libraries / version), os.environ.get("PYTHONPATH")]
    settings = {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, __file__, "--worker", run],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={
                **os.environ,
                **settings,
                "YOLO_CONFIG_DIR": folder,
                "PYTHONPATH": os.pathsep.join(filter(None, places)),
            },
        )
    result, versions = json.loads(done.stdout.strip().splitlines()[-1])
    return result, versions


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--libraries", type=Path, default=Path())
    parser.add_argument("--seen", action="store_true")
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    runs = {row["run"]: row["ultralytics"] for row in rows()}
    libraries = options.libraries.resolve()
    results = {run: ask(options.python, libraries, run, runs[run]) for run in runs}
    text = report({run: result for run, (result, _) in results.items()}, seen=options.seen)
    (versions,) = {versions for _, versions in results.values()}
    text = "\n".join([TITLE, line(), f"here: {versions}", "", text])
    if options.seen:
        print(text)
    else:
        publish("published_detection", text)


def report(results: dict[str, Result], *, seen: bool) -> str:
    """Return the table and its summaries."""
    table, groups = [], {}
    for row in rows():
        unseen = row["unseen"] == "1"
        if unseen and seen:
            continue
        name = f"{row['model']} {row['size']} x{row['batch']} {row['run']}"
        figure = results[row["run"]][row["batch"]]
        if row["gpu_mem_gb"]:
            kinds = {"reserved GB": (float(row["gpu_mem_gb"]), figure)}
        else:
            held = float(row["oom_allocated_gib"])
            real = held, held + float(row["oom_unallocated_mib"]) / 1024
            heads = "GiB allocated, memory full", "GiB reserved, memory full"
            if not isinstance(figure, list):
                raise SystemExit(f"{name}: out of memory there, {figure} GB here")
            kinds = dict(zip(heads, zip(real, figure, strict=True), strict=True))
        for kind, (there, here) in kinds.items():
            error = 100 * (here / there - 1)
            group = "never looked at" if unseen else "looked at"
            groups.setdefault(f"{group}, {kind}", []).append(abs(error))
            shown = [f"{there:.3f}", f"{here:.3f}", f"{error:+.2f}", "yes" if unseen else ""]
            table.append([name, row["card"], kind, *shown])
    heads = ["batch size", "card", "figure", "GPU", "virtual", "%", "never looked at"]
    lines = [tabulate(table, heads, disable_numparse=True), ""]
    return "\n".join([*lines, *errors_by_group(groups)])


if __name__ == "__main__":
    main()
