"""Reserved memory of detectors as Ultralytics' search for a batch size printed it, beside ours.

    pip install --no-deps --target LIBRARIES/8.4.116 ultralytics==8.4.116
    pip install --no-deps --target LIBRARIES/8.4.95 ultralytics==8.4.95
    python -m benchmarks.published detection --python PYTHON --source LIBRARIES

The interpreter needs the rows' torch 2.11 and the packages that Ultralytics imports (torchvision,
opencv, matplotlib, polars, ultralytics-thop). As in the source, a table's batch sizes run in one
process, one after the other, up to the first that runs out of memory. Weights are random here.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import re
import sys
import tempfile
from typing import TYPE_CHECKING

from benchmarks.harness import MIB, line, read, spreads, table
from benchmarks.published.runner import looked, unseen
from pytest_gpumem.devices.cards import CARDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from benchmarks.published.runner import Answers, Process, Row
    from pytest_gpumem.devices.cards import Card

FULL = re.compile(r"memory ([\d.]+) ([GM])iB is allocated by PyTorch, and ([\d.]+) ([GM])iB is")
TITLE = "Reserved memory by Ultralytics' AutoBatch, and what was held when it was out of memory"


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return [
        row | {"row": f"{row['model']} {row['size']} x{row['batch']} {row['run']}"}
        for row in read("detection-reserved.csv")
    ]


def group(row: Row) -> str:
    """Return the table that a row belongs to."""
    return row["run"]


def card(row: Row) -> Card:
    """Return the row's card, with the memory that its source names."""
    return dataclasses.replace(CARDS[row["card"]], total_memory=int(row["total_mib"]) * MIB)


def steps(process: Process) -> Iterator[tuple[str, float | tuple[float, float]]]:
    """Run a table's rows; yield GB as in the table, or GiB held when memory runs out."""
    row = process.rows[0]
    os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    os.environ["YOLO_CONFIG_DIR"] = tempfile.mkdtemp()
    sys.path.insert(0, str(process.source / row["ultralytics"]))
    import torch

    torch.cuda.init()
    import ultralytics

    if ultralytics.__version__ != row["ultralytics"]:
        raise SystemExit(f"Ultralytics {ultralytics.__version__}, not {row['ultralytics']}")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    ultralytics.utils.LOGGER.addHandler(handler)
    reserved = search(trained(row), process.rows)
    held = [found for message in messages if (found := FULL.search(message))]
    for tried, figure in zip(process.rows, reserved, strict=True):
        yield tried["row"], held_in_gib(held.pop(0)) if figure is None else figure


def held_in_gib(message: re.Match[str]) -> tuple[float, float]:
    """Return the GiB allocated and reserved that an out-of-memory message names."""
    allocated, cached = (
        float(message[at]) / (1 if message[at + 1] == "G" else 1024) for at in (1, 3)
    )
    return allocated, allocated + cached


def trained(row: Row) -> torch.nn.Module:
    """Return a row's model as the trainer has it when it searches for a batch size."""
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
    # The trainer's check of mixed precision compares two predictions of another network, whose
    # memory it partly keeps; with random weights they differ, which does not matter here.
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        YOLO("yolo26n.yaml").save("yolo26n.pt")
        check_amp(model)
    return model


def search(model: torch.nn.Module, table: list[Row]) -> list[float | None]:
    """Return the GB of each batch size that the search for the largest one prints."""
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


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    for row in answers.rows:
        figure = answers.figures[""][row["row"]]
        if row["gpu_mem_gb"]:
            kinds = {"reserved GB": (float(row["gpu_mem_gb"]), figure)}
        else:
            held = float(row["oom_allocated_gib"])
            real = held, held + float(row["oom_unallocated_mib"]) / 1024
            heads = "GiB allocated, memory full", "GiB reserved, memory full"
            if not isinstance(figure, list):
                raise SystemExit(f"{row['row']}: out of memory there, {figure} GB here")
            kinds = dict(zip(heads, zip(real, figure, strict=True), strict=True))
        for kind, (there, here) in kinds.items():
            error = 100 * (here / there - 1)
            groups.setdefault(f"{looked(row)}, {kind}", []).append(error)
            cells = [f"{there:.3f}", f"{here:.3f}", f"{error:+.2f}", unseen(row)]
            lines.append([row["row"], row["card"], kind, *cells])
    heads = ["batch size", "card", "figure", "GPU", "virtual", "%", "never looked at"]
    return "\n".join([TITLE, line(), answers.here(), "", table(lines, heads), "", *spreads(groups)])
