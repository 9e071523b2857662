"""What values cost on the virtual GPU: an operator that is not computed, and whole training steps.

The last table has steps with all values computed (``values="full"``).

    python -m benchmarks.values.cost [--repeats 40] [--dry]

In all other tables, runs without values and with values within a budget (``values="auto"``)
alternate. "empty kernels" is PyTorch's share of the cost: each operator has a kernel in Python
(``torch.library``) that only calls the operator. Times are CPU seconds, which other processes on
the machine hardly lengthen. The shortest of many short rounds is shown.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness import line, publish, table

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

CARD = "H200"
CALLS = 400
"""number of calls of an operator in one round"""


def switch_values(*, on: bool) -> None:
    """Switch computing values on or off."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    VirtualDevice.loaded().values.compute("auto" if on else "off")


def empty_kernels() -> tuple[list[torch.library.Library], Callable[..., None]]:
    """Register a kernel for each operator that only calls it, with the dispatch key of values.

    Returns:
        the registrations, and a function that switches the kernels on and off.
    """
    import torch

    from pytest_gpumem.devices.virtual.values.dispatch_keys import KEY
    from pytest_gpumem.devices.virtual.values.operators import register

    key = torch._C._dispatch_key_parse(KEY)
    exclude = partial(torch._C._dispatch_tls_set_dispatch_key_excluded, key)

    def kernel_of(name: str, _key: str, *, passes: bool) -> Callable[..., object]:
        if passes:
            return torch.library.fallthrough_kernel
        base, _, overload = name.partition(".")
        namespace, _, short = base.partition("::")
        op = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
        boxed = partial(torch._C._dispatch_call_boxed, op._handle)
        takes_numbers = torch._C._should_allow_numbers_as_tensors(short)

        def kernel(*args: object, **kwargs: object) -> object:
            exclude(True)
            try:
                if takes_numbers and type(args[-1]) in {float, int}:
                    return op._op(*args, **kwargs)
                return boxed(*args, **kwargs)
            finally:
                exclude(False)

        return kernel

    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, KEY)
    names = torch._C._dispatch_get_all_op_names()
    include = partial(torch._C._dispatch_tls_set_dispatch_key_included, key)
    return [fallback, *register(names, [KEY], kernel_of)], lambda *, on: include(on)


def seconds_of(
    rounds: Callable[[], object], switch: Callable[..., None], repeats: int
) -> list[float]:
    """Return the shortest time of a round, switched off and switched on."""
    shortest = [float("inf")] * 2
    for number in range(repeats + 1):  # the first warms up
        for on in (False, True):
            switch(on=on)
            started = time.process_time()
            rounds()
            if number:
                shortest[on] = min(shortest[on], time.process_time() - started)
    switch(on=False)
    return shortest


def operators() -> dict[str, Callable[[], object]]:
    """Return calls of operators on tensors that are too large for computing values."""
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
    """Return functions that make the steps."""
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
    """Return functions that make the steps which take less than 256 MiB."""
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
    """Return the wall time to make a model and run two steps, all computed, and the peak in MiB."""
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
    """Time operators and steps, and publish the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    from pytest_gpumem.meter.block import use_virtual_gpu

    use_virtual_gpu(CARD, values="off")

    def calls(operator: Callable[[], object]) -> None:
        for _ in range(CALLS):
            operator()

    rounds: dict[str, Callable[[], object]] = {
        name: partial(calls, operator) for name, operator in operators().items()
    }
    steps = {name: build() for name, build in training().items()}
    rounds |= steps
    registered, switch = empty_kernels()
    empty = {name: seconds_of(run, switch, options.repeats) for name, run in rounds.items()}
    for library in registered:
        library._destroy()  # values register kernels for the same key
    rows, step_rows = [], []
    for name, run in rounds.items():
        plain, kernels = empty[name]
        again, values = seconds_of(run, switch_values, options.repeats)
        plain = min(plain, again)
        if name in steps:
            ms = (1e3 * plain, 1e3 * kernels, 1e3 * values)
            ratios = kernels / plain, values / plain
            step_rows.append([name, *(f"{it:.1f}" for it in ms), *(f"{it:.2f}" for it in ratios)])
        else:
            micro = [1e6 * it / CALLS for it in (plain, kernels, values)]
            more = micro[1] - micro[0], micro[2] - micro[0]
            rows.append([name, *(f"{it:.1f}" for it in (*micro, *more))])
    kinds = ["without", "empty kernels", "with values"]
    heads = ["an operator, not computed, in us", *kinds, "more: empty", "more: values"]
    tables = [table(rows, heads, "lr")]
    heads = ["a training step, in ms", *kinds, "ratio: empty", "ratio: values"]
    tables.append(table(step_rows, heads, "lr"))
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
