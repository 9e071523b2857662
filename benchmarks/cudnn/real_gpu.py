"""Sweep convolutions for the workspaces that cuDNN takes: one row a shape and direction, as CSV.

    python -m benchmarks.cudnn.real_gpu --count 3000 --out real.csv
    python -m benchmarks.cudnn.real_gpu --count 3000 --out virtual.csv --virtual H200
    python -m benchmarks.cudnn.real_gpu --compare real.csv virtual.csv

Run the first command on a machine with a real GPU, the second anywhere, with the same torch. A
workspace is the peak minus the memory held before and the operation's results. Shapes are drawn
with a fixed seed from the ranges of published networks: every machine sweeps the same ones.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20261120
DIRECTIONS = ("forward", "data gradient", "filter gradient")


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
        )
        elements = shape.batch * shape.side**2 * (channels + filters // shape.stride**2)
        if shape.kernel <= shape.side and elements < 2**30:
            count -= 1
            yield shape


def workspaces(shape: Shape) -> Iterator[tuple[str, int]]:
    """Yield each direction and its workspace in bytes; -1 if the operation runs out of memory."""
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
    """Return the bytes that an operation's second run takes in addition to its results."""
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


def compare(first: Path, second: Path) -> bool:
    """Print how often two sweeps agree, by direction and benchmark mode; return whether all do."""
    tables = []
    for path in (first, second):
        with path.open(encoding="utf-8") as file:
            print(f"{path.name}: {file.readline()[2:].strip()}")
            tables.append(list(csv.DictReader(file)))
    ran = [
        (one, int(one["workspace_bytes"]), int(other["workspace_bytes"]))
        for one, other in zip(*tables, strict=True)
        if _key(one) == _key(other)
    ]
    rows = []
    for direction in DIRECTIONS:
        for benchmark in ("False", "True"):
            pairs = [
                (one, other)
                for row, one, other in ran
                if row["direction"] == direction and row["benchmark"] == benchmark
            ]
            apart = sorted(abs(one - other) for one, other in pairs if one != other)
            more = sum(other > one for one, other in pairs)
            most = apart[-1] / 2**20 if apart else 0
            rows.append([direction, benchmark, len(pairs), len(pairs) - len(apart), more, most])
    headers = ["direction", "benchmark", "rows", "equal", "second is larger", "most apart (MiB)"]
    print(tabulate(rows, headers, floatfmt=".1f"))
    for row, one, other in sorted(ran, key=lambda it: -abs(it[1] - it[2]))[:20]:
        if one != other:
            print(f"{one:>13,} {other:>13,}  {', '.join(_key(row))}")
    return all(one == other for _, one, other in ran)


def _key(row: dict[str, str]) -> list[str]:
    return [value for name, value in row.items() if name != "workspace_bytes"]


def sweep(arguments: argparse.Namespace) -> None:
    """Write the table."""
    if arguments.virtual:
        import pytest_gpumem

        pytest_gpumem.use_virtual_gpu(arguments.virtual, values="off")
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


def main() -> None:
    """Sweep, or compare two sweeps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=3000)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path)
    wanted.add_argument("--compare", type=Path, nargs=2, metavar="CSV")
    parser.add_argument("--virtual", metavar="CARD", help="on the virtual GPU instead")
    arguments = parser.parse_args()
    if arguments.compare:
        raise SystemExit(not compare(*arguments.compare))
    sweep(arguments)


if __name__ == "__main__":
    main()
