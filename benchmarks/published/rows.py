"""The published rows: data/*.csv, and which step reproduces each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.harness import MIB
from benchmarks.harness import read as csv_rows

CARDS = {
    "GeForce RTX 3060": "RTX 3060",
    "GeForce RTX 4060": "RTX 4060",
    "A100": "A100-80GB",
    "V100-DGXS-32GB": "V100-32GB",
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
TRANSFORMERS, CONV, OTHER = "transformers", "conv nets", "GPT from scratch"
KINDS = TRANSFORMERS, CONV, OTHER


@dataclass(frozen=True)
class Row:
    """A published run, and how to repeat it here; sizes in MiB.

    Attributes:
        real: the measured peak; meaningless for a run that was out of memory.
        call: module, function and arguments of the step here.
        kind: the group in summaries.
        why: the letter of the reason for an error above 1 %.
        memory: the card's memory according to the source, in bytes; 0 for the one in cards.py.
        real_oom: whether the run was out of memory.
        predicted: the peak that the source's own predictor predicted; None without a prediction.
        predicted_oom: whether that predictor predicted out of memory; None without a prediction.
        nearest_only: whether to use only the torch nearest to the row's, not every one.
    """

    name: str
    card: str
    torch: str
    real: float
    call: tuple[str, str, dict[str, Any]]
    kind: str
    why: str = ""
    memory: int = 0
    real_oom: bool = False
    predicted: float | None = None
    predicted_oom: bool | None = None
    nearest_only: bool = False


def read() -> list[Row]:
    """Return the rows of both files."""
    return [*_mixed(), *_xmem()]


def _xmem() -> list[Row]:
    """Return the runs in whole directories of xMem's evaluation (data/README.md names them)."""
    rows = []
    for line in csv_rows("xmem-peaks.csv"):
        name, batch, optimizer = line["model"], int(line["batch"]), line["optimizer"]
        language = "/Transformer/" in line["run"]
        arguments = {"model": name, "batch": batch, "optimizer": optimizer}
        rows.append(
            Row(
                f"{name.rpartition('/')[2]} x{batch} {optimizer}",
                line["card"],
                "2.6.0",
                int(line["real_bytes"]) / MIB,
                (
                    "benchmarks.published.xmem",
                    "transformers_step" if language else "vision_step",
                    arguments,
                ),
                TRANSFORMERS if language else CONV,
                "W" if language else "C",
                int(line["total_memory"]),
                line["real_oom"] == "1",
                int(line["predicted_bytes"]) / MIB if line["predicted_bytes"] else None,
                line["predicted_oom"] == "1" if line["predicted_oom"] else None,
                nearest_only=True,
            )
        )
    return rows


def _mixed() -> list[Row]:
    """Return the rows that were collected one by one."""
    scratch: list[dict[str, Any]] = list(SCRATCH)
    rows = []
    for line in csv_rows("real-gpu-peaks.csv"):
        call, kind, why = _plan(line, scratch)
        short = line["model"].rpartition("/")[2].removeprefix("torchvision.")
        name = f"{short.partition('(')[0]} x{line['batch']} {line['optimizer']}"
        if kind == OTHER:
            name = f"GPT-2 {line['notes'].partition(';')[0]}"
        said = line["notes"].partition("xMem predicted ")[2].partition(" MiB")[0]
        rows.append(
            Row(
                name,
                CARDS[line["gpu"]],
                line["torch_version"].partition("+")[0],
                float(line["value_mib"]),
                call,
                kind,
                why,
                predicted=float(said) if said else None,
            )
        )
    return rows


def _plan(
    line: dict[str, str], scratch: list[dict[str, Any]]
) -> tuple[tuple[str, str, dict[str, Any]], str, str]:
    """Return a row's call, its kind, and the letter of the reason for its error."""
    model = line["model"]
    if line["source"].startswith("pytorch/kineto"):
        return ("benchmarks.published.scratch", "kineto_resnet50", {}), CONV, "A"
    if line["source"].startswith("rasbt"):
        arguments = scratch.pop(0)
        why = "I" if "compiled" in arguments else "?"
        return ("benchmarks.published.scratch", "scratch_gpt", arguments), OTHER, why
    arguments = {"model": model, "batch": int(line["batch"]), "optimizer": line["optimizer"]}
    if line["framework_pkg"] == "transformers":
        return ("benchmarks.published.xmem", "transformers_step", arguments), TRANSFORMERS, "W"
    arguments["model"] = "MnasNet" if "MNASNet" in model else model.partition(".")[2]
    return ("benchmarks.published.xmem", "vision_step", arguments), CONV, "C"
