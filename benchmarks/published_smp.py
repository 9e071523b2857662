"""Training steps of segmentation networks, measured on an L40S, beside the virtual GPU's.

    python benchmarks/published_smp.py --python /path/to/python

The rows are those of data/smp-peaks.csv (data/README.md says where they are from). The interpreter
needs segmentation-models-pytorch 0.5.0 and the rows' torch 2.11. All rows run in one process, one
after the other, as tests do: what cuBLAS was given once stays. They run with one group of
parameters in AdamW, the same without asking cuDNN, and with the groups of the repository's own
trainer; which of them the rows' script had is not said there.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import statistics
import subprocess
import sys

from provenance import ROOT, line, publish
from tabulate import tabulate

DATA = ROOT / "benchmarks" / "data" / "smp-peaks.csv"
KINDS = ("one group", "one group, cuDNN not asked", "four groups")
NO_DECAY = ("bias", "norm", "bn", "pos_embed", "gamma")
"""parts of names whose parameters, besides those of one dimension, have a group without decay"""


def work(kind: str) -> None:
    """Run all rows here; print their peaks, and the versions."""
    from pytest_gpumem.devices.cards import CARDS
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.load(CARDS["L40S"])
    device.open(CARDS["L40S"], 1)
    import segmentation_models_pytorch as smp
    import torch

    peaks = []
    for row in rows():
        torch.cuda.reset_peak_memory_stats()
        steps(row, grouped=kind == KINDS[2])
        peaks.append(torch.cuda.max_memory_allocated())
        gc.collect()
        torch.cuda.empty_cache()
    if unsupported := sorted(device.library.unsupported()):
        raise SystemExit(f"not supported: {', '.join(unsupported)}")
    versions = f"torch {torch.__version__}, cuDNN {device.library.cudnn_found()}"
    print(json.dumps([peaks, f"{versions}, segmentation-models-pytorch {smp.__version__}"]))


def steps(row: dict[str, str], *, grouped: bool) -> None:
    """Run a row's four steps."""
    import segmentation_models_pytorch as smp
    import torch

    make = getattr(smp, row["decoder"])
    model = make(encoder_name=row["encoder"], encoder_weights=None, in_channels=3, classes=5)
    found = sum(it.numel() for it in model.parameters())
    if found != int(row["parameters"]):
        raise SystemExit(f"{found} parameters, not {row['parameters']}: another version of it")
    model = model.train().cuda()
    parameters = groups(model) if grouped else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.05)
    before = [it.detach().clone() for it in model.segmentation_head.parameters()]
    size = int(row["size"])
    for _ in range(4):
        images = torch.randn(2, 3, size, size, device="cuda")
        labels = torch.randint(0, 5, (2, size, size), device="cuda")
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(images)
            loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
    del before


def groups(model) -> list[dict]:  # noqa: ANN001 - torch is not imported yet
    """Return AdamW's groups: the encoder's parameters and the others, with and without decay."""
    found: dict[tuple[bool, bool], list] = {}
    for name, it in model.named_parameters():
        head = name.startswith(("decoder.", "segmentation_head."))
        decay = it.ndim > 1 and not any(part in name.lower() for part in NO_DECAY)
        found.setdefault((head, decay), []).append(it)
    return [
        {"params": these, "weight_decay": 0.05 if key[1] else 0.0}
        for key, these in sorted(found.items())
    ]


def rows() -> list[dict[str, str]]:
    """Return the rows, in the order of their source."""
    with DATA.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def ask(python: str, kind: str) -> tuple[list[int], str]:
    """Return the peaks that a worker found, and its versions."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    if kind == KINDS[1]:
        environment["GPUMEM_CUDNN"] = "none"
    done = subprocess.run(
        [python, __file__, "--worker", kind],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    peaks, versions = json.loads(done.stdout.strip().splitlines()[-1])
    return peaks, versions


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    found = [ask(args.python, kind) for kind in KINDS]
    table, errors = [], []
    for row, *peaks in zip(rows(), *[peaks for peaks, _ in found], strict=True):
        real = int(row["bytes"])
        errors.append([100 * (it - real) / real for it in peaks])
        one = [f"{row['decoder']} {row['encoder']}", f"{real:,}", f"{peaks[0]:,}"]
        table.append([*one, f"{peaks[0] - real:+,}", *[f"{it:+.3f}" for it in errors[-1]]])
    heads = ["four steps", "L40S", "virtual", "difference", *[f"{it} %" for it in KINDS]]
    text = ["Peaks of bytes allocated, AdamW, bf16 autocast, torch 2.11 and cuDNN 9.19 on an L40S"]
    text += [line(), f"here: {found[0][1]}", "", tabulate(table, heads, disable_numparse=True), ""]
    for title, column in zip(KINDS, zip(*errors, strict=True), strict=True):
        sizes = [abs(it) for it in column]
        middle, most = statistics.median(sizes), max(sizes)
        text.append(f"{title}: median {middle:.4f} %, worst {most:.3f} %")
    publish("published_smp", "\n".join(text))


if __name__ == "__main__":
    main()
