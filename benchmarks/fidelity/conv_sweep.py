"""Sweep convolutions for the workspaces that cuDNN takes: one row a shape and direction, as CSV.

    python benchmarks/fidelity/conv_sweep.py --count 3000 --out benchmarks/results/conv-H200.csv

For a machine with a real GPU; on the virtual one every workspace is zero by construction, which
``--virtual CARD`` shows. A workspace is what the peak has above the memory held before and the
operation's results. Shapes are drawn with a fixed seed from the ranges of published networks, so
that every machine sweeps the same ones; a fifth of them is marked "held out", for judging a model
that was made from the others.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20261120
DIRECTIONS = ("forward", "data gradient", "filter gradient")
HELD_OUT = 0.2


@dataclass(frozen=True)
class Shape:
    """One convolution."""

    batch: int
    channels: int
    side: int
    filters: int
    kernel: int
    stride: int
    groups: int
    dtype: str
    layout: str
    benchmark: bool
    held_out: bool


def shapes(count: int) -> Iterator[Shape]:
    """Draw ``count`` shapes, the same for the same count."""
    draw = random.Random(SEED)  # noqa: S311 - shapes, no secrets
    while count:
        channels = draw.choice((3, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048))
        filters = draw.choice((16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048))
        groups = draw.choices((1, 2, 32, channels), (8, 1, 1, 2))[0]
        if channels % groups or filters % groups:
            continue
        shape = Shape(
            batch=draw.choice((1, 2, 4, 8, 16, 32, 64, 128)),
            channels=channels,
            side=draw.choice((7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224)),
            filters=filters,
            kernel=draw.choices((1, 3, 5, 7, 11), (6, 8, 2, 2, 1))[0],
            stride=draw.choices((1, 2, 4), (6, 3, 1))[0],
            groups=groups,
            dtype=draw.choice(("float32", "float16", "bfloat16")),
            layout=draw.choice(("contiguous", "channels_last")),
            benchmark=draw.random() < 0.25,
            held_out=draw.random() < HELD_OUT,
        )
        elements = shape.batch * shape.side**2 * (channels + filters // shape.stride**2)
        if shape.kernel <= shape.side and elements < 2**30:
            count -= 1
            yield shape


def workspaces(shape: Shape) -> Iterator[tuple[str, int]]:
    """Yield each direction and its workspace in bytes; -1 where the operation is refused."""
    import torch

    torch.backends.cudnn.benchmark = shape.benchmark
    forms = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    form = forms[shape.layout]
    options = {"device": "cuda", "dtype": getattr(torch, shape.dtype)}
    kernel, per_group = shape.kernel, shape.channels // shape.groups
    x = torch.randn(shape.batch, shape.channels, shape.side, shape.side, **options)
    w = torch.randn(shape.filters, per_group, kernel, kernel, **options)
    x, w = x.contiguous(memory_format=form), w.contiguous(memory_format=form)
    stride, padding = [shape.stride] * 2, [kernel // 2] * 2
    tail = (stride, padding, [1, 1], False, [0, 0], shape.groups)

    def backward(*mask: bool) -> object:
        return torch.ops.aten.convolution_backward(dy, x, w, None, *tail, list(mask))

    y = torch.nn.functional.conv2d(x, w, None, stride, padding, 1, shape.groups)
    dy = torch.randn_like(y)
    del y
    for direction, run in zip(
        DIRECTIONS,
        (
            lambda: torch.ops.aten.convolution(x, w, None, *tail),
            lambda: backward(True, False, False),
            lambda: backward(False, True, False),
        ),
        strict=True,
    ):
        yield direction, workspace(run)


def workspace(run: object) -> int:
    """Return what an operation takes beside its results, in bytes; the second time it runs."""
    import torch

    try:
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = run()  # type: ignore[operator]
            torch.cuda.synchronize()
            kept = torch.cuda.memory_allocated() - before
            peak = torch.cuda.max_memory_allocated() - before
            del result
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return -1
    return peak - kept


def main() -> None:
    """Sweep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--virtual", metavar="CARD", help="on the virtual GPU instead")
    arguments = parser.parse_args()
    if arguments.virtual:
        import pytest_gpumem

        pytest_gpumem.use_virtual_gpu(arguments.virtual)
    import torch

    made_with = (
        f"# {torch.cuda.get_device_name()}, {'virtual' if arguments.virtual else 'real'}, "
        f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8", newline="") as file:
        file.write(made_with + "\n")
        writer = csv.writer(file)
        writer.writerow([*(field.name for field in fields(Shape)), "direction", "workspace_bytes"])
        for number, shape in enumerate(shapes(arguments.count), 1):
            for direction, size in workspaces(shape):
                writer.writerow([*asdict(shape).values(), direction, size])
            if number % 100 == 0:
                print(f"{number} of {arguments.count}", file=sys.stderr)
    print(f"{made_with[2:]}: {arguments.count} shapes in {arguments.out}")


if __name__ == "__main__":
    main()
