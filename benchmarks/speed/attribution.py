"""What it costs to find out where a peak comes from: ResNet-50 and GPT-2 steps, recorded or not.

    python -m benchmarks.speed.attribution [--virtual] [--repeats 7] [--dry]

Runs of two steps alternate: without attribution and computed values (a real GPU always computes
values), like a test without attribution, and recorded (hooks, and the allocator's history;
``--gpumem-attribution=on``). The explanation itself, once per test, is timed separately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from benchmarks.harness import line, publish, table

STEPS = 2
KINDS = ("bare", "plain", "recorded")
MODELS = ("resnet50-fp32", "gpt2-fp32")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--virtual", action="store_true", help="on the virtual H100")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.cuda import CudaDevice
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.explain.explanations import explanations
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.run import Run

    device = VirtualDevice.load(find_card("H100")) if options.virtual else CudaDevice()
    import torch

    from benchmarks.fidelity import steps

    rows = []
    for name in MODELS:
        times: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "explained")}
        for _ in range(options.repeats + 1):
            for kind in KINDS:
                with Run.open(MemorySpec(), device, Path.cwd(), record=kind == "recorded") as run:
                    device.values.compute("off" if kind == "bare" else "auto")
                    run.start()
                step = steps.STEPS[name].build()
                step()
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(STEPS):
                    step()
                torch.cuda.synchronize()
                times[kind].append(1000 * (time.perf_counter() - started) / STEPS)
                run.measurement()
                started = time.perf_counter()
                explanations(run.recorded([""]), Path.cwd(), timelines=False)
                if kind == "recorded":
                    times["explained"].append(1000 * (time.perf_counter() - started))
                del step
                run.close()
        bare, plain, recorded, explained = (
            statistics.median(values[1:])
            for values in times.values()  # the first run imports
        )
        rows.append(
            [
                *(name, f"{bare:.1f}", f"{plain:.1f}", f"{recorded:.1f}"),
                *(f"{recorded / plain:.2f}", f"{explained:.1f}"),
            ]
        )
    where = "the virtual H100" if options.virtual else torch.cuda.get_device_name()
    titles = ["step", "without values", "with values", "recorded", "ratio", "explanation"]
    text = [
        f"A training step with and without attribution, on {where}, ms",
        f"(medians of {options.repeats} runs of {STEPS} steps)",
        line("torchvision"),
        "",
        table(rows, titles),
        "",
        "the explanation comes once a test, after its last step",
    ]
    name = f"attribution-{'virtual' if options.virtual else 'cuda'}"
    publish(name, "\n".join(text), keep=not options.dry)


if __name__ == "__main__":
    main()
