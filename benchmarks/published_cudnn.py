"""Published figures of GPUs whose cuDNN cannot be asked, with newer ones asked in its place.

    python benchmarks/published_cudnn.py --python PYTHON --autoencoders PYTHON \
        --cudnn VERSION=/path/to/libcudnn.so.9 ...

``--python`` has torch 2.6.0 and torchvision 0.21.0, for the training runs of convolution nets;
``--autoencoders`` a torch for CUDA 12 and diffusers 0.33. Without workspaces, and with those of
each cuDNN: how far the peaks are off, and which is the nearest. Single convolutions' workspaces
(data/measured-workspaces*.csv) are compared too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict

import measured_workspaces
import published
import published_vae
from provenance import line, publish
from published_rows import KINDS, read
from tabulate import tabulate

NONE = "none"
Errors = dict[str, list[float]]
"""of each cuDNN, in percent"""


def spread(errors: list[float]) -> list[str]:
    """Return the median and the worst error, without sign, and the mean with it."""
    sizes = [abs(error) for error in errors]
    figures = statistics.median(sizes), max(sizes)
    return [*(f"{figure:.2f}" for figure in figures), f"{statistics.mean(errors):+.2f}"]


def summary(errors: Errors) -> str:
    """Return the table of all cuDNNs' errors."""
    lines = [[cudnn, len(each), *spread(each)] for cudnn, each in errors.items()]
    heads = ["cuDNN asked", "figures", "median %", "worst %", "mean, signed %"]
    return tabulate(lines, heads, disable_numparse=True)


def nets(python: str, cudnns: dict[str, str]) -> str:
    """Return the tables of convolution nets' peaks."""
    rows = [row for row in read() if row.kind == KINDS[1] and row.torch == "2.6.0"]
    rows = [row for row in rows if not row.real_oom]
    lines = [[row.name, row.card, f"{row.real:.0f}"] for row in rows]
    errors: Errors = defaultdict(list)
    for cudnn, path in cudnns.items():
        os.environ["GPUMEM_CUDNN"] = path
        server = published.Server(python)
        for row, cells in zip(rows, lines, strict=True):
            peak, *_ = server.ask(row)
            if not isinstance(peak, float):
                cells.append(peak or "out of memory")
                continue
            errors[cudnn].append(published.percent(peak, row.real))
            cells.append(f"{errors[cudnn][-1]:+.2f}")
            print(row.name, cudnn, cells[-1], file=sys.stderr, flush=True)
    table = tabulate(lines, ["step", "card", "real MiB", *cudnns], disable_numparse=True)
    return f"{table}\n\n{summary(errors)}"


def autoencoders(python: str, cudnns: dict[str, str]) -> str:
    """Return the tables of autoencoders' peaks, by precision."""
    errors: dict[tuple[str, str], Errors] = defaultdict(lambda: defaultdict(list))
    for cudnn, path in cudnns.items():
        os.environ["GPUMEM_CUDNN"] = path
        peaks: published_vae.Result = {}
        for model in ("Flux", "Stable Diffusion"):
            figures, versions = published_vae.ask(python, model, "usual", once=True)
            peaks.update(figures)
        print(cudnn, versions, file=sys.stderr, flush=True)
        for row in published_vae.rows():
            name = f"{row['model']} {row['operation']} {row['size']} {row['dtype']}"
            precision = "half precision" if row["dtype"].endswith("float16") else "float32"
            for figure, ours in zip(("allocated", "reserved"), peaks[name], strict=True):
                real = float(row[f"{figure}_mib"])
                errors[precision, figure][cudnn].append(published.percent(ours, real))
    return "\n\n".join(
        f"{precision}, {figure}\n{summary(each)}" for (precision, figure), each in errors.items()
    )


def workspaces(cudnns: dict[str, str]) -> str:
    """Return how many single convolutions come out as measured."""
    asked_from = measured_workspaces.ASKED_FROM
    rows = [
        row
        for row in measured_workspaces.read()
        if measured_workspaces.numbers(row.cudnn) < asked_from and not row.loop
    ]
    counts = dict.fromkeys(cudnns, 0)
    lines = [[row.name, row.cudnn, f"{row.size:,}"] for row in rows]
    for row, cells in zip(rows, lines, strict=True):
        task = {"chip": measured_workspaces.CHIPS[row.gpu], "dtype": row.dtype}
        task |= {"shapes": row.shapes, "bias": row.bias, "padding": row.padding}
        task |= {"loop": False, "asked": row.within > 0}
        for cudnn, path in cudnns.items():
            answer = measured_workspaces.ask(os.environ["WORKSPACES_PYTHON"], path, task)
            if isinstance(answer, str):
                cells.append(answer)
                continue
            counts[cudnn] += abs(answer[0] - row.size) <= row.within
            cells.append(f"{answer[0]:,}")
    heads = ["convolution", "cuDNN", "measured", *cudnns]
    table = tabulate(lines, heads, disable_numparse=True)
    shares = ", ".join(f"{cudnn} {count}" for cudnn, count in counts.items())
    return f"{table}\n\nas measured, of {len(rows)}: {shares}"


def main() -> None:
    """Print and keep the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--autoencoders", default=sys.executable)
    parser.add_argument("--cudnn", action="append", default=[], metavar="VERSION=PATH")
    options = parser.parse_args()
    cudnns = {NONE: NONE} | dict(given.split("=", 1) for given in options.cudnn)
    torch, *_ = measured_workspaces.own(options.python)
    other_torch, *_ = measured_workspaces.own(options.autoencoders)
    os.environ["WORKSPACES_PYTHON"] = options.autoencoders
    text = [
        "Peaks of GPUs whose cuDNN cannot be asked, without workspaces and with another cuDNN's",
        line(),
        f"torch {torch} for the nets, {other_torch} for the rest; errors are virtual less real",
        "",
        "Training runs of convolution nets, torch 2.6.0, cuDNN 9.1.0: errors of peaks in percent",
        nets(options.python, cudnns),
        "",
        "Workspaces of single convolutions in bytes",
        workspaces(cudnns),
        "",
        "Autoencoders on an RTX 4090, torch 2.7.1, cuDNN 9.7.1",
        autoencoders(options.autoencoders, cudnns),
    ]
    publish("published_cudnn", "\n".join(text))


if __name__ == "__main__":
    main()
