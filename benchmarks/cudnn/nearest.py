"""Published figures of GPUs whose cuDNN cannot be asked, with newer ones asked in its place.

    python -m benchmarks.cudnn.nearest --python PYTHON --autoencoders PYTHON \
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

from benchmarks.cudnn import asking, measured
from benchmarks.harness import line, percent, publish, table
from benchmarks.published import runner, runs, vae
from benchmarks.published.rows import KINDS, read

NONE = "none"
Errors = dict[str, list[float]]
"""of each cuDNN, in percent"""


def summary(errors: Errors) -> str:
    """Return the table of all cuDNNs' errors: median and worst without sign, and the mean."""
    lines = []
    for cudnn, each in errors.items():
        sizes = [abs(error) for error in each]
        figures = f"{statistics.median(sizes):.2f}", f"{max(sizes):.2f}"
        lines.append([cudnn, len(each), *figures, f"{statistics.mean(each):+.2f}"])
    return table(lines, ["cuDNN asked", "figures", "median %", "worst %", "mean, signed %"])


def nets(python: str, cudnns: dict[str, str]) -> str:
    """Return the tables of convolution nets' peaks."""
    rows = [row for row in read() if row.kind == KINDS[1] and row.torch == "2.6.0"]
    rows = [row for row in rows if not row.real_oom]
    lines = [[row.name, row.card, f"{row.real:.0f}"] for row in rows]
    errors: Errors = defaultdict(list)
    for cudnn, path in cudnns.items():
        os.environ["GPUMEM_CUDNN"] = path
        server = runs.Server(python)
        for row, cells in zip(rows, lines, strict=True):
            peak, *_ = server.ask(row)
            if not isinstance(peak, float):
                cells.append(peak or "out of memory")
                continue
            errors[cudnn].append(percent(peak, row.real))
            cells.append(f"{errors[cudnn][-1]:+.2f}")
            print(row.name, cudnn, cells[-1], file=sys.stderr, flush=True)
    drawn = table(lines, ["step", "card", "real MiB", *cudnns])
    return f"{drawn}\n\n{summary(errors)}"


def autoencoders(python: str, cudnns: dict[str, str]) -> str:
    """Return the tables of autoencoders' peaks, by precision."""
    errors: dict[str, Errors] = defaultdict(lambda: defaultdict(list))
    given = argparse.Namespace(python=[python], source=[])
    for cudnn, path in cudnns.items():
        os.environ["GPUMEM_CUDNN"] = path
        for group, rows in runner.processes(vae, vae.rows()).items():
            peaks, versions = runner.answer(vae, given, group, rows, vae.ONCE)
            print(cudnn, versions, file=sys.stderr, flush=True)
            for row in rows:
                precision = "half precision" if vae.is_half(row) else "float32"
                for kind, ours in zip(("allocated", "reserved"), peaks[row["row"]], strict=True):
                    error = percent(ours, float(row[f"{kind}_mib"]))
                    errors[f"{precision}, {kind}"][cudnn].append(error)
    return "\n\n".join(f"{name}\n{summary(each)}" for name, each in errors.items())


def workspaces(python: str, cudnns: dict[str, str]) -> str:
    """Return how many single convolutions come out as measured."""
    rows = [
        row
        for row in measured.read()
        if asking.numbers(row.cudnn) < asking.ASKED_FROM and not row.loop
    ]
    counts = dict.fromkeys(cudnns, 0)
    lines = [[row.name, row.cudnn, f"{row.size:,}"] for row in rows]
    for row, cells in zip(rows, lines, strict=True):
        for cudnn, path in cudnns.items():
            answer = asking.ask(python, path, row.task(asked=row.within > 0))
            if isinstance(answer, str):
                cells.append(answer)
                continue
            counts[cudnn] += abs(answer[0] - row.size) <= row.within
            cells.append(f"{answer[0]:,}")
    shares = ", ".join(f"{cudnn} {count}" for cudnn, count in counts.items())
    drawn = table(lines, ["convolution", "cuDNN", "measured", *cudnns])
    return f"{drawn}\n\nas measured, of {len(rows)}: {shares}"


def main() -> None:
    """Print and keep the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--autoencoders", default=sys.executable)
    parser.add_argument("--cudnn", action="append", default=[], metavar="VERSION=PATH")
    options = parser.parse_args()
    cudnns = {NONE: NONE} | dict(given.split("=", 1) for given in options.cudnn)
    torch, *_ = asking.own(options.python)
    other_torch, *_ = asking.own(options.autoencoders)
    text = [
        "Peaks of GPUs whose cuDNN cannot be asked, without workspaces and with another cuDNN's",
        line(),
        f"torch {torch} for the nets, {other_torch} for the rest; errors are virtual less real",
        "",
        "Training runs of convolution nets, torch 2.6.0, cuDNN 9.1.0: errors of peaks in percent",
        nets(options.python, cudnns),
        "",
        "Workspaces of single convolutions in bytes",
        workspaces(options.autoencoders, cudnns),
        "",
        "Autoencoders on an RTX 4090, torch 2.7.1, cuDNN 9.7.1",
        autoencoders(options.autoencoders, cudnns),
    ]
    publish("published_cudnn", "\n".join(text))


if __name__ == "__main__":
    main()
