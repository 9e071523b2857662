"""What values cost on the virtual GPU: an operator that is not computed, and whole training steps.

The last table has steps with all values computed (``values="full"``).

    python -m benchmarks.values.cost [--repeats 7] [--dry]

Each other one is run without values and with those of a budget (``values="auto"``), by turns.
Times are those of the processor, which other processes on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness import line, publish, table

if TYPE_CHECKING:
    from collections.abc import Callable

CARD = "H200"
CALLS = 5000
"""of an operator in one round"""
STEPS = 3
"""of training in one round"""
SCOPES = ("off", "auto")


def seconds_of(rounds: Callable[[], None], repeats: int) -> list[float]:
    """Return the shortest time of each scope."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.loaded()
    shortest = dict.fromkeys(SCOPES, float("inf"))
    for number in range(repeats + 1):  # the first warms up
        for scope in SCOPES:
            device.values.compute(scope)
            started = time.process_time()
            rounds()
            if number:
                shortest[scope] = min(shortest[scope], time.process_time() - started)
    device.values.compute("off")
    return [shortest[scope] for scope in SCOPES]


def operators() -> dict[str, Callable[[], object]]:
    """Return calls of operators on tensors too large to be computed."""
    import torch

    x = torch.empty(2048, 2048, device="cuda")
    y = torch.empty(2048, 2048, device="cuda")
    row = torch.ones(2048, device="cuda")
    heads = torch.empty(4, 8, 512, 64, device="cuda", dtype=torch.bfloat16)
    layer_norm = partial(torch.nn.functional.layer_norm, x, (2048,), row, row)
    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        "x * y": lambda: x * y,
        "x.mul_(y)": lambda: x.mul_(y),
        "x.copy_(y)": lambda: x.copy_(y),
        "x @ y": lambda: x @ y,
        "layer_norm(x, row, row)": layer_norm,
        "attention(q, k, v)": lambda: attention(heads, heads, heads),
        "torch.empty": lambda: torch.empty(2048, 2048, device="cuda"),
    }


def training() -> dict[str, Callable[[], Callable[[], None]]]:
    """Return what makes the steps."""
    import torchvision

    from benchmarks.fidelity import models_transformer as transformers
    from benchmarks.fidelity.training import BF16, by_class, by_token, images, tokens, train

    gpt = partial(train, transformers.Gpt, tokens(4, 512, 50257), by_token, amp=BF16)
    llama = partial(train, transformers.Llama, tokens(2, 1024, 32000), by_token, amp=BF16)
    resnet = partial(train, torchvision.models.resnet50, images(32), by_class)
    return {
        "ResNet-50, batch 32": resnet,
        "GPT-2, 4 x 512 tokens, bf16": gpt,
        "Llama, 2 x 1,024 tokens, bf16": llama,
    }


def computed() -> dict[str, Callable[[], Callable[[], None]]]:
    """Return the makers of steps that take less than 256 MiB."""
    import torchvision

    from benchmarks.fidelity import models_transformer as transformers
    from benchmarks.fidelity.training import by_class, by_token, images, tokens, train

    gpt = partial(transformers.Gpt, dim=384, heads=6, depth=4, vocabulary=6144)
    return {
        "ResNet-18, 8 images of 96 x 96": partial(
            train, torchvision.models.resnet18, images(8, 96), by_class
        ),
        "GPT of 4 layers, 2 x 256 tokens": partial(train, gpt, tokens(2, 256, 6144), by_token),
    }


def seconds_computed(build: Callable[[], Callable[[], None]]) -> tuple[float, float]:
    """Return the wall time of a model's making and two steps, all computed, and the peak in MiB."""
    import torch

    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.loaded()
    device.values.compute("full")
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    started = time.perf_counter()
    step = build()
    step()
    step()
    seconds = time.perf_counter() - started
    device.values.compute("off")
    return seconds, (torch.cuda.max_memory_allocated() - held) / 2**20


def main() -> None:
    """Time all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    from pytest_gpumem.meter.block import use_virtual_gpu

    use_virtual_gpu(CARD, values="off")

    def call(operator: Callable[[], object]) -> None:
        for _ in range(CALLS):
            operator()

    rows = []
    for name, operator in operators().items():
        micro = [1e6 * it / CALLS for it in seconds_of(partial(call, operator), options.repeats)]
        rows.append([name, *(f"{it:.1f}" for it in (*micro, micro[1] - micro[0]))])
    heads = ["an operator, not computed, in us", "without", "with values", "more"]
    tables = [table(rows, heads, "lr")]
    rows = []
    for name, build in training().items():
        step = build()

        def several(step: Callable[[], None] = step) -> None:
            for _ in range(STEPS):
                step()

        ms = [1e3 * seconds / STEPS for seconds in seconds_of(several, options.repeats)]
        rows.append([name, *(f"{it:.1f}" for it in ms), f"{ms[1] / ms[0]:.2f}"])
    tables.append(table(rows, ["a training step, in ms", "without", "with values", "ratio"], "lr"))
    rows = []
    for name, build in computed().items():
        seconds, mib = min(seconds_computed(build) for _ in range(3))
        rows.append([name, f"{mib:.0f}", f"{seconds:.1f}"])
    heads = ["two steps, all values computed", "peak MiB", "wall s"]
    tables.append(table(rows, heads, "lr"))
    head = f"What values cost on the virtual GPU ({CARD}); the shortest of {options.repeats} rounds"
    text = "\n\n".join([f"{head}\n{line('torchvision')}", *tables])
    publish("values", text, keep=not options.dry)


if __name__ == "__main__":
    main()
