"""What a measurement adds to a real training step: a hand-made ResNet-50, batch 32.

    python -m benchmarks.speed.overhead [--virtual CARD] [--repeats 9] [--dry]

Ten steps with and without ``measure()`` around them alternate; the time of each part is shown.
Times are CPU seconds, which other processes on the machine do not lengthen.

Most of the overhead is a full garbage collection, as garbage may hold device memory. On the virtual
GPU the last two tables show the effect of freezing objects once (``gc.freeze``), so that
collections do not traverse them. Each row is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

from benchmarks.harness import MIB, line, publish, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

STEPS = 10
FULL = 2
"""the collector's oldest generation"""
SLOW = 0.001
"""seconds: a collection of all objects takes longer, one within the block takes less"""
HELD = 600_000
"""number of objects besides those of imports, such as a list of a data set's samples"""
ITERATIONS = 3000
"""steps of the program that leaves reference cycles; the first half warms up, as Python decides on
full collections by the number of objects in the last one"""
WINDOW = 20
"""number of records that the program keeps"""
RECORD = 300
"""number of objects in a record, besides a tensor of 8 MiB"""


class FullCollections:
    """Records full garbage collections in a ``with`` block."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def __enter__(self) -> Self:
        """Start recording."""
        gc.callbacks.append(self._see)
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop recording."""
        gc.callbacks.remove(self._see)

    def _see(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == FULL:
            if phase == "start":
                self._began = time.thread_time()
            else:
                self.seconds.append(time.thread_time() - self._began)


def leave_cycles(*, freeze: bool) -> list[object]:
    """Run a program that leaves reference cycles, without ``measure()``; return its row."""
    import torch

    from benchmarks.fidelity import steps

    steps.STEPS["resnet50-fp32"].build()()  # imports what a training step imports
    held: list[list[object]] = [[] for _ in range(HELD)]
    gc.collect()
    if freeze:
        gc.freeze()
    records: deque[list[object]] = deque(maxlen=WINDOW)
    with FullCollections() as collections:
        for iteration in range(ITERATIONS):
            if iteration == ITERATIONS // 2:
                collections.seconds.clear()
                torch.cuda.reset_peak_memory_stats()
            record: list[object] = [[] for _ in range(RECORD)]
            record += [record, torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")]
            records.append(record)
    del held
    name = "all objects of before are frozen" if freeze else "as Python does it"
    return [name, len(collections.seconds), torch.cuda.max_memory_allocated() // MIB]


def leave_model(*, freeze: bool) -> list[object]:
    """Measure a block after a model in a reference cycle became garbage; return its row."""
    import torch

    from pytest_gpumem.meter.block import measure

    model: list[object] = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")]
    model.append(model)
    if freeze:
        gc.freeze()
    del model
    with measure() as m:
        torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    name = "all objects of before are frozen" if freeze else "garbage is collected"
    return [name, m.peak_allocated // MIB]


def on_virtual_gpu(card: str, function: Callable[..., list[object]], freeze: bool) -> list[object]:
    """Call a function in a new process with a virtual GPU."""
    from pytest_gpumem.meter.block import use_virtual_gpu

    use_virtual_gpu(card, values="off")
    return function(freeze=freeze)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--virtual", metavar="CARD")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    from pytest_gpumem.meter.block import measure, use_virtual_gpu

    if options.virtual:
        use_virtual_gpu(options.virtual, values="off")
    import torch

    from benchmarks.fidelity import steps

    step = steps.STEPS["resnet50-fp32"].build()

    def plain() -> float:
        began = time.process_time()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        return time.process_time() - began

    plain()
    with measure():
        plain()
    objects = len(gc.get_objects())
    times: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        parts = {"ten steps alone": plain()}
        began = time.process_time()
        with FullCollections() as collections, measure():
            begun = time.process_time()
            parts["ten steps inside"] = plain()
            ended = time.process_time()
        parts["the end"] = time.process_time() - ended
        full = [seconds for seconds in collections.seconds if seconds > SLOW]
        parts["full collections of garbage"] = sum(full)
        parts["the rest of the beginning"] = begun - began - sum(full)
        parts["measured"] = time.process_time() - began
        parts["a measurement adds"] = parts["measured"] - parts["ten steps alone"]
        for name, seconds in parts.items():
            times.setdefault(name, []).append(1000 * seconds)
    where = f"{'the virtual ' if options.virtual else ''}{torch.cuda.get_device_name(0)}"
    rows = [[name, f"{statistics.median(ms):.1f}", f"{min(ms):.1f}"] for name, ms in times.items()]
    text = [
        f"{STEPS} steps of ResNet-50, batch 32, on {where}, ms",
        line(),
        "",
        table(rows, ["", "median", "least"], "lr"),
        "",
        f"The collector looks at {objects:,} objects; {len(full)} full collection a measurement.",
        "The cache is empty at the beginning: the first step inside fills it again.",
    ]
    if options.virtual:
        context = multiprocessing.get_context("spawn")
        for function, heads in (
            (leave_cycles, ["a program that is not measured", "full collections", "peak MiB"]),
            (leave_model, ["measured after a model was dropped", "peak MiB"]),
        ):
            answers = []
            for freeze in (False, True):
                with context.Pool(1) as pool:
                    call = options.virtual, function, freeze
                    answers.append(pool.apply(on_virtual_gpu, call))
            text += ["", table(answers, heads, "lr")]
    publish(
        f"overhead-{'virtual' if options.virtual else 'cuda'}",
        "\n".join(text),
        keep=not options.dry,
    )


if __name__ == "__main__":
    main()
