"""What a measurement adds to a real training step: a hand-made ResNet-50, batch 32.

    python -m benchmarks.speed.overhead [--virtual CARD] [--repeats 9]

Ten steps with and without ``measure()`` around them, by turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.harness import line, publish, table

STEPS = 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--virtual", metavar="CARD")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    from pytest_gpumem.meter.block import measure, use_virtual_gpu

    if options.virtual:
        use_virtual_gpu(options.virtual, values="off")
    import torch

    from benchmarks.fidelity import steps

    step = steps.STEPS["resnet50-fp32"].build()

    def plain() -> None:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()

    def measured() -> None:
        with measure():
            plain()

    plain()
    times: dict[str, list[float]] = {"plain": [], "measured": []}
    for _ in range(options.repeats):
        for name, run in (("plain", plain), ("measured", measured)):
            started = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - started))
    rows = [
        [name, f"{statistics.median(values):.1f}", f"{min(values):.1f}"]
        for name, values in times.items()
    ]
    medians = {name: statistics.median(values) for name, values in times.items()}
    share = 100 * (medians["measured"] / medians["plain"] - 1)
    text = [
        f"{STEPS} steps of ResNet-50, batch 32, on {torch.cuda.get_device_name(0)}, ms",
        line(),
        "",
        table(rows, ["", "median", "least"]),
        "",
        f"a measurement adds {medians['measured'] - medians['plain']:.1f} ms, {share:+.1f} %",
        "(a full garbage collection first, and an empty cache, which the first measured step fills",
        "again)",
    ]
    publish(f"overhead-{'virtual' if options.virtual else 'cuda'}", "\n".join(text))


if __name__ == "__main__":
    main()
