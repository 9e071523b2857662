"""Training steps of segmentation networks, measured on an L40S, beside the virtual GPU's.

The interpreter needs segmentation-models-pytorch 0.5.0 and the rows' torch 2.11. All rows run in
one process, one after the other, as tests do, so cuBLAS's workspaces stay allocated. They run with
one group of parameters in AdamW, again without querying cuDNN, and with the groups of the
repository's own trainer: the source does not say which groups its script used.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from benchmarks.harness import line, percent, read, spread, table

if TYPE_CHECKING:
    from benchmarks.published.runner import Answers, Process, Row

CARD = "L40S"
VARIANTS = {
    "one group": {},
    "one group, cuDNN not asked": {"GPUMEM_CUDNN": "none"},
    "four groups": {},
}
PACKAGES = ("segmentation-models-pytorch",)
NO_DECAY = ("bias", "norm", "bn", "pos_embed", "gamma")
"""parts of the names of parameters without weight decay; one-dimensional ones have none either"""
TITLE = "Peaks of bytes allocated, AdamW, bf16 autocast, torch 2.11 and cuDNN 9.19 on an L40S"


def rows() -> list[Row]:
    """Return the rows, in the order of their source."""
    return [row | {"row": f"{row['decoder']} {row['encoder']}"} for row in read("smp-peaks.csv")]


def group(_row: Row) -> str:
    """Return the same group for all rows."""
    return "all"


def step(row: Row, process: Process) -> int:
    """Run a row's four steps; return the peak in bytes."""
    import segmentation_models_pytorch as smp
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    make = getattr(smp, row["decoder"])
    model = make(encoder_name=row["encoder"], encoder_weights=None, in_channels=3, classes=5)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != int(row["parameters"]):
        raise SystemExit(f"{count} parameters, not {row['parameters']}: another version of it")
    model = model.train().cuda()
    parameters = groups(model) if process.variant == "four groups" else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.05)
    before = [parameter.detach().clone() for parameter in model.segmentation_head.parameters()]
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
    return torch.cuda.max_memory_allocated()


def groups(model: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - torch is not imported yet
    """Return AdamW's groups: the encoder's parameters and the others, with and without decay."""
    found: dict[tuple[bool, bool], list[Any]] = {}
    for name, parameter in model.named_parameters():
        head = name.startswith(("decoder.", "segmentation_head."))
        decay = parameter.ndim > 1 and not any(part in name.lower() for part in NO_DECAY)
        found.setdefault((head, decay), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": 0.05 if key[1] else 0.0}
        for key, parameters in sorted(found.items())
    ]


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines, errors = [], []
    for row in answers.rows:
        real = int(row["bytes"])
        peaks = [figures[row["row"]] for figures in answers.figures.values()]
        errors.append([percent(peak, real) for peak in peaks])
        cells = [row["row"], f"{real:,}", f"{peaks[0]:,}", f"{peaks[0] - real:+,}"]
        lines.append([*cells, *[f"{error:+.3f}" for error in errors[-1]]])
    heads = ["four steps", "L40S", "virtual", "difference", *[f"{name} %" for name in VARIANTS]]
    columns = zip(VARIANTS, zip(*errors, strict=True), strict=True)
    sums = [f"{title}: {spread(column, 4, 3)}" for title, column in columns]
    return "\n".join([TITLE, line(), answers.here(), "", table(lines, heads), "", *sums])
