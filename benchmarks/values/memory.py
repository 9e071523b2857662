"""Whether computed values change the memory of steps that do not depend on values.

    python -m benchmarks.values.memory [--only 'gpt2-*' ...] [--skip 'tv-*' ...] [--dry]

Steps of the fidelity matrix run without values and with values of small tensors, three times each,
every run in a process of its own. PyTorch's peaks and segments are compared to the byte. Mixtures
of experts may differ, as their routing depends on values.
"""

from __future__ import annotations

import argparse
import importlib.util
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from benchmarks.harness import in_fork, line, publish, table

if TYPE_CHECKING:
    from collections.abc import Iterator

CARD = "H200"
SCOPES = ("off", "auto")
FIGURES = ("allocated", "reserved", "segments")


def figures_of(name: str, scope: str) -> Iterator[list[object]]:
    """Run a step in this process, which has not used CUDA yet; yield its figures or error."""
    import torch

    from benchmarks.fidelity import steps
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.loaded()
    device.values.initial = scope
    device.show_always(1)
    try:
        step = steps.STEPS[name].build()
        for _ in range(steps.COUNT):
            step()
    except Exception as error:  # noqa: BLE001 - the step's own, recorded
        yield [f"{type(error).__name__}: {error}"[:80]]
        return
    stats = torch.cuda.memory_stats_as_nested_dict()
    kinds = ("allocated_bytes", "reserved_bytes", "segment")
    yield [stats[kind]["all"]["peak"] for kind in kinds]


def main() -> None:
    """Compare the steps, and publish the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=["*"], help="names of steps, with wildcards")
    parser.add_argument("--skip", nargs="*", default=[], help="names to leave out")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    VirtualDevice.load(find_card(CARD))  # each fork shows and initializes it
    from benchmarks.fidelity import steps

    rows, same, differ = [], 0, 0
    for name, step in steps.STEPS.items():
        chosen = any(fnmatch(name, pattern) for pattern in options.only)
        left_out = any(fnmatch(name, pattern) for pattern in options.skip)
        if not chosen or left_out or not all(map(importlib.util.find_spec, step.needs)):
            continue
        if "compiled" in name:
            in_fork(figures_of, name, "off")  # a region's first compilation takes memory of its own
        records = [in_fork(figures_of, name, scope) for scope in SCOPES]
        without, computing = ([it["ended"]] if isinstance(it, dict) else it for it in records)
        verdict = "the same" if without == computing else f"{computing}"
        same, differ = same + (without == computing), differ + (without != computing)
        rows.append([name, *(f"{it:,}" if isinstance(it, int) else it for it in without), verdict])
        print(*rows[-1], flush=True)
    drawn = table(rows, ["step", *FIGURES, "with values"], "lrrrl")
    head = f"Peaks in bytes on the virtual GPU ({CARD}), without values and with small ones'"
    total = f"{same} of {same + differ} steps have the same peaks and segments, to the byte"
    text = "\n".join([head, line("torchvision", "transformers"), "", drawn, "", total])
    publish("values_memory", text, keep=not options.dry and options.only == ["*"])


if __name__ == "__main__":
    main()
