"""Whether the ranges of workspaces are what a run of the step with such workspaces takes.

    python -m benchmarks.cudnn.replay [STEP ...]

Each step of fidelity/ runs on a virtual H100 without cuDNN, so that every convolution has a range.
Its requests are served again with the smallest and the largest workspaces
(replay/allocator_replay.py); then the step itself runs with these workspaces. The benchmark fails
if a peak differs by a byte. Networks of torchvision run in benchmark mode, with cuDNN.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import ask, line, publish, table

if TYPE_CHECKING:
    from collections.abc import Callable

BENCHMARK = ("resnet18", "resnet50", "mobilenet_v2", "deeplabv3_resnet50", "densenet121", "vgg11")
NO_RANGE = ("compiled",)
"""parts of the names of steps that other benchmarks compare"""


def timed_plans(name: str) -> Callable[[], None]:
    """Return a function that runs two steps of a network in benchmark mode."""

    def run() -> None:
        import torch
        import torchvision

        models = torchvision.models
        build = getattr(models, name, None) or getattr(models.segmentation, name)
        torch.backends.cudnn.benchmark = True
        try:
            network = build(weights=None, weights_backbone=None) if "deeplab" in name else build()
            network = network.cuda()
            optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
            for _ in range(2):
                out = network(torch.zeros(4, 3, 224, 224, device="cuda"))
                (out["out"] if isinstance(out, dict) else out).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.backends.cudnn.benchmark = False

    return run


def recorded_step(name: str) -> Callable[[], None]:
    """Return a function that runs a step of fidelity/steps.py twice."""

    def run() -> None:
        from benchmarks.fidelity import steps

        step = steps.STEPS[name].build()
        step()
        step()

    return run


def compare(name: str, step: Callable[[], None]) -> list[str]:
    """Return a row of the table."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.replay.allocator_replay import AllocatorReplay
    from pytest_gpumem.replay.match_alternatives import NoRangeError
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.run import Run

    device = VirtualDevice.loaded()
    assert device is not None
    with Run.open(MemorySpec(), device, Path.cwd(), record=True) as run:
        run.start()
    try:
        step()
        gc.collect()
        found = device.alternatives()
        number = sum(
            (block.least < block.usual) + (block.most > block.usual) for block in found.blocks or ()
        )
        usual, recording = run.peaks_of(""), run.meter.recording.stop()
        assert recording is not None
        if not found.smaller and not found.larger:
            return []
        began = time.perf_counter()
        ends = {}
        try:
            with AllocatorReplay(run, recording, [""], found).checked() as replay:
                for end, differs in (("least", found.smaller), ("most", found.larger)):
                    if differs:
                        ends[end] = replay.peaks(end)[0][""]
        except NoRangeError as error:
            return [name, str(number), "", "", "", str(error)]
        served = time.perf_counter() - began
        figures, difference = [], ""
        began = time.perf_counter()
        for end in ("least", "most"):
            if end not in ends:
                figures.append("")
                continue
            run.begin_again(record=False)
            device.gpu_choices.assume_sizes(end)
            step()
            gc.collect()
            real = run.peaks_of("")
            figures.append(f"{ends[end][0].allocated:,} / {ends[end][0].reserved:,}")
            if real != ends[end]:
                difference = f"{end} takes {real[0].allocated:,} / {real[0].reserved:,}"
        ran = time.perf_counter() - began
        del usual
        times = f"{1000 * served:.0f} / {1000 * ran:.0f}"
        return [name, str(number), *figures, times, difference or "equal"]
    finally:
        run.close()
        gc.collect()


def work(kind: str, names: list[str]) -> list[list[str]]:
    """Compare steps in this process; return a row each."""
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    VirtualDevice.load(find_card("H100"))
    rows = []
    for name in names:
        step = timed_plans(name) if kind == "benchmark" else recorded_step(name)
        with contextlib.suppress(ImportError):
            rows.append(compare(f"{name} ({kind})" if kind == "benchmark" else name, step))
    return [row for row in rows if row]


def main() -> None:
    """Print and keep the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="*")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    parser.add_argument("--work", choices=("steps", "benchmark"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work, options.steps)))
        return
    from benchmarks.fidelity import steps

    module, none = "benchmarks.cudnn.replay", {"GPUMEM_CUDNN": "none"}
    names = [name for name in steps.STEPS if not any(word in name for word in NO_RANGE)]
    rows = ask(sys.executable, module, "--work", "steps", *(options.steps or names), **none)
    if not options.steps:
        rows += ask(sys.executable, module, "--work", "benchmark", *BENCHMARK)
    equal = sum(row[-1] == "equal" for row in rows)
    heads = ["step", "ranges", "least", "most", "replayed / run ms", "a run with these sizes"]
    text = [
        "Ends of ranges by the requests of one run, and by runs; bytes allocated / reserved",
        line("torchvision"),
        "",
        table(rows, heads),
        "",
        f"{equal} of {len(rows)} steps have the same peaks, to the byte",
    ]
    publish("workspace_replay", "\n".join(text), keep=not options.dry)
    if equal < len(rows):
        sys.exit("a peak differs")


if __name__ == "__main__":
    main()
