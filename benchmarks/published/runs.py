"""Training runs that others measured with NVML, and a few more, beside the virtual GPU's.

    python -m benchmarks.published runs [--python PATH ...]

The rows are those of data/real-gpu-peaks.csv and data/xmem-peaks.csv (rows.py). Each step runs on
the row's card in a fork of a process that has imported torch and the models' packages. Rows of
whole directories run with the torch nearest to theirs, all other rows with every torch: that of
this interpreter, and those of ``--python``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness import MIB, ROOT, in_fork, line, percent, table
from benchmarks.published.rows import KINDS, Row, read
from pytest_gpumem.devices.virtual.cudnn_notes import CUDNN_MARGIN
from pytest_gpumem.measurement import Peak
from pytest_gpumem.replay.size_range import widened

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from pytest_gpumem.devices.base import RangeEnd
    from pytest_gpumem.devices.virtual.device import VirtualDevice

WHY = {
    "C": "C  convolutions: the row is NVML's figure, kernels loaded late in it. The row's cuDNN, "
    "9.1.0 with torch 2.6, cannot be asked for its workspaces, which are zero here; that of torch "
    "2.15 is asked, and is another (workspace_sweep.txt: another version's answer is often "
    "another). Where workspaces lie among PyTorch's blocks, other segments are used again, so the "
    "real figure may also be the smaller one",
    "W": "W  cuBLAS's workspaces, 8 MiB for each of two threads: with the small ones the error is "
    "under 1 %, so in the real run they did not lie among PyTorch's blocks; a block that lies "
    "elsewhere decides whether a segment for the logits, up to 900 MiB, is used again",
    "V": "V  this torch or this transformers is not the row's (torch 2.6.0, transformers 4.51.3): "
    "with those the row has an error under 1 %",
    "?": "?  not explained",
    "A": "A  torch 1.9 with cudnn.benchmark: the row's trace shows workspaces of convolutions",
    "I": "I  torch.compile: not explained. With the row's own torch 2.6, and so its Inductor, "
    "the row is as far off",
}


SMALL = ":16:8"
"""the smaller one of two values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS is deterministic"""


@dataclass(frozen=True)
class Found:
    """A row's figures on the virtual GPU of one interpreter.

    Attributes:
        peak: MiB; None if out of memory.
        small: MiB with cuBLAS's small workspaces, if the row also ran with them.
        ends: MiB between which a convolution net's peak lies if its own cuDNN is not queried.
    """

    row: Row
    torch: str
    peak: float | None
    small: float | None = None
    ends: tuple[float, float] | None = None

    @property
    def error(self) -> float | None:
        """The error in percent; None if the row or the run has no peak."""
        if self.peak is None or self.row.real_oom:
            return None
        return 100 * (self.peak - self.row.real) / self.row.real


def serve() -> None:
    """Run the step of each line of standard input in a fork of its own; print its figures."""
    from pytest_gpumem.devices.cards import CARDS
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.load(CARDS["RTX 3060"])
    with suppress(ImportError):  # so that forks need not import them; an interpreter may lack some
        from benchmarks.published import xmem

        xmem.import_models()
    for text in sys.stdin:
        answer = in_fork(work, device, json.loads(text))
        if isinstance(answer, dict):
            answer = [answer["ended"], 0, 0, False]
        print(json.dumps(answer), flush=True)


def work(device: VirtualDevice, task: list[Any]) -> Iterator[list[Any]]:
    """Run one step in this process, and yield its figures.

    They are the peak, the peak allocated, and the card's memory if workspaces of convolutions have
    a range, all in MiB, and whether a workspace did not fit.
    """
    name, memory, module, function, arguments, end, environment = task
    from pytest_gpumem.devices.cards import find_card

    os.environ.update(environment)
    card = find_card(name)
    if memory:
        card = dataclasses.replace(card, total_memory=memory)
    device.open(card, 1)
    device.gpu_choices.assume_sizes(end)
    import torch

    try:
        step = getattr(importlib.import_module(module), function)
        value = step(**arguments)
    except torch.OutOfMemoryError:
        value = None
    except Exception as error:  # noqa: BLE001 - the row's, recorded
        value = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:120]
    if unsupported := sorted(device.library.unsupported()):
        value = f"not supported: {', '.join(unsupported)}"
    ran = device.library.convolutions()
    room = card.total_memory / MIB if ran.ranged else 0
    yield [value, torch.cuda.max_memory_allocated() / MIB, room, ran.unfit > 0]


def versions_of(python: str) -> dict[str, str]:
    """Return an interpreter's versions of torch and of the models' packages, if installed."""
    ask = (
        "import importlib.metadata as m, json\n"
        "names = {d.name for d in m.distributions()} & {'torch', 'torchvision', 'transformers'}\n"
        "print(json.dumps({n: m.version(n).partition('+')[0] for n in sorted(names)}))"
    )
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


class Server:
    """An interpreter that runs rows, each in a fork: importing torch costs more than most rows."""

    def __init__(self, python: str) -> None:
        environment = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["OPENBLAS_NUM_THREADS"] = "1"  # its other threads would not exist in forks
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.published.runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(
        self, row: Row, end: RangeEnd = "usual", **environment: str
    ) -> tuple[float | str | None, float, float, bool]:
        """Return a row's figures; the peak is None if out of memory, or the reason for no peak."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        task = json.dumps([row.card, row.memory, *row.call, end, environment])
        self._process.stdin.write(f"{task}\n")
        self._process.stdin.flush()
        while (answer := self._process.stdout.readline()) and answer[0] != "[":
            pass  # a line that a library printed
        return tuple(json.loads(answer)) if answer else ("the interpreter ended", 0, 0, False)


def distance(row: Row, version: str) -> int:
    """Return how many minor versions of torch 2 lie between a row's torch and ``version``."""

    def minor(text: str) -> int:
        return int(text.split(".")[1]) if text.startswith("2.") else 0

    return abs(minor(row.torch) - minor(version))


def run(rows: list[Row], pythons: dict[str, str]) -> tuple[list[Found], list[str]]:
    """Run the rows; return the figures, and the rows that could not be run."""
    found, failures = [], []
    servers = {version: Server(python) for version, python in pythons.items()}
    for row in rows:
        nearest = min(pythons, key=lambda version, row=row: distance(row, version))
        for version, server in servers.items():
            if row.nearest_only and version != nearest:
                continue
            value, allocated, room, _ = server.ask(row)
            if isinstance(value, str):
                failures.append(f"{row.name}, torch {version}: {value}")
                continue
            small, ends = None, None
            if row.why == "W" and version == row.torch and value is not None:
                said, *_ = server.ask(row, CUBLAS_WORKSPACE_CONFIG=SMALL)
                small = None if isinstance(said, str) else said
            if room and value is not None:
                largest, _, _, unfit = server.ask(row, "most")
                if isinstance(largest, str):
                    failures.append(f"{row.name}, torch {version}, largest: {largest}")
                    continue
                high = Peak(0, round(max(value, largest or 0) * MIB))
                full = unfit or largest is None
                high = widened(high, CUDNN_MARGIN, round(room * MIB), full=full)
                ends = min(allocated, value), high.reserved / MIB
            found.append(Found(row, version, value, small, ends))
            seen = [row.name, row.card, f"{row.real:.0f}", version, value, small, ends]
            print(*seen, file=sys.stderr, flush=True)
    return found, failures


def why(it: Found) -> str:
    """Return the letter of the reason for an error above 1 %."""
    if it.error is None or abs(it.error) <= 1:
        return ""
    if it.row.why != "W":
        return it.row.why
    if it.torch != it.row.torch:
        return "V"
    return "W" if it.small is not None and abs(percent(it.small, it.row.real)) <= 1 else "?"


def peaks(found: list[Found]) -> str:
    """Return the table of peaks."""
    heads = ["step", "card", "torch", "real MiB", "torch here", "virtual", "%", "why"]
    heads += ["range", "small workspaces", "real less that", "xMem %"]
    lines = []
    for it in found:
        row = it.row
        if it.error is None:
            continue
        said = "" if row.predicted is None else f"{percent(row.predicted, row.real):+.2f}"
        one = [row.name, row.card, row.torch, f"{row.real:.0f}", it.torch, f"{it.peak:.0f}"]
        one += [f"{it.error:+.2f}", why(it)]
        one += [f"{it.ends[0]:.0f} to {it.ends[1]:.0f}" if it.ends else ""]
        small = ["", ""] if it.small is None else [f"{it.small:.0f}", f"{row.real - it.small:.0f}"]
        lines.append([*one, *small, said])
    return table(lines, heads)


def with_p95(errors: list[float]) -> str:
    """Return the median, the 95th percentile and the largest of errors in percent."""
    sizes = sorted(abs(error) for error in errors)
    upper = sizes[min(len(sizes) - 1, round(0.95 * (len(sizes) - 1)))]
    return f"median {statistics.median(sizes):.2f} %, p95 {upper:.2f} %, worst {sizes[-1]:.2f} %"


def summaries(found: list[Found]) -> list[str]:
    """Return the errors by kind and torch, beside those of the source's predictor on these rows."""
    text = []
    for kind in KINDS:
        for version in dict.fromkeys(it.torch for it in found):
            these = [it for it in found if (it.row.kind, it.torch) == (kind, version)]
            errors = [it.error for it in these if it.error is not None]
            if not errors:
                continue
            text.append(f"{kind}, torch {version}: {len(errors)} rows, {with_p95(errors)}")
            rows = [it.row for it in these if it.error is not None]
            said = [percent(row.predicted, row.real) for row in rows if row.predicted is not None]
            if said:
                text.append(f"    xMem on {len(said)} of them: {with_p95(said)}")
    return text


def ranges(found: list[Found]) -> list[str]:
    """Return how many rows lie in the ranges of a report, and how wide the ranges are."""
    these = [it for it in found if it.ends is not None and not it.row.real_oom]
    if not these:
        return []
    outside = [it for it in these if it.ends and not it.ends[0] <= it.row.real <= it.ends[1]]
    beyond = [it.row.real / it.ends[1] for it in these if it.ends]
    widths = [100 * (it.ends[1] - it.ends[0]) / it.row.real for it in these if it.ends]
    text = (
        f"Ranges of {KINDS[1]} whose own cuDNN was not asked: {len(these) - len(outside)} of "
        f"{len(these)} rows lie in them; they are {statistics.median(widths):.0f} % of the real "
        f"figure wide in the median, and it is {100 * max(beyond):.0f} % of the upper end at most"
    )
    return [
        text,
        *(f"    outside: {it.row.name}, {it.row.card}, torch {it.torch}" for it in outside),
    ]


def offsets(found: list[Found]) -> list[str]:
    """Return by how much NVML's figures exceed those with small workspaces here, by card."""
    text = []
    these = [it for it in found if it.small is not None and it.row.kind == KINDS[0]]
    for card in dict.fromkeys(it.row.card for it in these):
        over = [
            round(it.row.real - (it.small or 0))
            for it in these
            if it.row.card == card and not it.row.real_oom
        ]
        often = statistics.mode(over)
        rest = sorted({it for it in over if it != often})
        text.append(
            f"    {card}: {often} MiB in {over.count(often)} of {len(over)}"
            + (f", else {', '.join(map(str, rest))}" if rest else "")
        )
    if not text:
        return []
    head = f"{KINDS[0]}, CUBLAS_WORKSPACE_CONFIG={SMALL}: what NVML saw more than is reserved here"
    return [head, *text]


def verdicts(found: list[Found]) -> list[str]:
    """Return how often runs of whole directories were out of memory in both, or in neither."""
    these = [it for it in found if it.row.nearest_only]
    if not these:
        return []
    alike = sum((it.peak is None) == it.row.real_oom for it in these)
    known = [it.row for it in these if it.row.predicted_oom is not None]
    theirs = sum(row.predicted_oom == row.real_oom for row in known)
    failed = sum(it.row.real_oom for it in these)
    text = [
        f"Whether it fits: {len(these)} runs on real cards, {failed} of them out of memory",
        f"    the virtual GPU says the same of {alike}; xMem of {theirs} of {len(known)}",
    ]
    for it in these:
        if (it.peak is None) != it.row.real_oom:
            mine = "out of memory" if it.peak is None else f"fits, {it.peak:.0f} MiB"
            real = "out of memory" if it.row.real_oom else f"fits, {it.row.real:.0f} MiB"
            text.append(f"    {it.row.name}, {it.row.card}: real {real}; virtual {mine}")
    return text


def main(options: argparse.Namespace) -> str:
    """Run the rows; return the tables."""
    rows = [row for row in read() if options.only in row.name]
    there = {python: versions_of(python) for python in (sys.executable, *options.python)}
    pythons = {versions["torch"]: python for python, versions in there.items()}
    found, failures = run(rows, pythons)
    text = [
        "Published peaks of real GPUs and the virtual GPU's",
        line(),
        *(", ".join(f"{name} {it}" for name, it in each.items()) for each in there.values()),
        "",
        peaks(found),
        "",
        *summaries(found),
        "",
        *offsets(found),
        "",
        *ranges(found),
        "",
        *verdicts(found),
        "",
        "Errors over 1 %:",
        *(WHY[it] for it in dict.fromkeys(map(why, found)) if it in WHY),
    ]
    if failures:
        text += ["", "Not reproduced:", *failures]
    return "\n".join(text)


if __name__ == "__main__":
    serve()
