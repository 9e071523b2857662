"""What PyTorch's own test asserts of memory allocated on two GPUs, on the virtual one as rank 0.

    python benchmarks/published_fsdp.py [--variant plain|checkpointed]

The test is test/distributed/fsdp/test_fsdp_memory.py of pytorch/pytorch (commit 050b2f2); it runs
on PyTorch's machines with two CUDA GPUs and allows a MiB. Its figures, rounded to MiB as there, are
in data/fsdp-asserted.csv; the model and the loop are written anew. The other rank is a fake process
group's. Each variant has a process of its own, as it has there.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from provenance import ROOT, line, publish
from tabulate import tabulate

MIB = 2**20
DATA = Path(__file__).resolve().parent / "data" / "fsdp-asserted.csv"


def asserted() -> dict[str, dict[str, int]]:
    """Return the test's figures, MiB, by variant and moment."""
    figures: dict[str, dict[str, int]] = {}
    with DATA.open(encoding="utf-8", newline="") as file:
        for it in csv.DictReader(file):
            figures.setdefault(it["variant"], {})[it["moment"]] = int(it["mib"])
    return figures


def run(*, checkpointed: bool) -> dict[str, int]:
    """Train four steps as rank 0 of two; return memory allocated at each moment, MiB."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils.checkpoint import checkpoint

    def convolution(given: int, width: int, **more: int) -> list[nn.Module]:
        return [
            nn.Conv2d(given, width, **more),
            Sharded(nn.BatchNorm2d(width)),
            nn.ReLU(inplace=True),
        ]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            wide = {"kernel_size": 5, "padding": 2}
            layers = [*convolution(64, 128, **wide), *convolution(128, 128, **wide)]
            layers += convolution(128, 128, **wide)
            blocks = nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten())
            self.stem = Sharded(nn.Sequential(*convolution(3, 64, kernel_size=3)))
            self.blocks = Sharded(blocks)
            self.head = Sharded(nn.Linear(128, 10))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            inner = self.stem(images)
            if checkpointed:
                return self.head(checkpoint(self.blocks, inner, use_reentrant=True))
            return self.head(self.blocks(inner))

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    images = torch.randn(2, 3, 224, 224).to("cuda")
    model = Sharded(Model().to("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    found: dict[str, int] = {}

    def note(step: int, moment: str) -> None:
        torch._C._cuda_clearCublasWorkspaces()  # as the test does
        found[f"iter {step}: {moment}"] = round(torch.cuda.memory_allocated() / MIB)

    for step in range(4):
        note(step, "start")
        out = model(images)
        note(step, "after fwd")
        out = sum(it.sum() for it in out[0])
        loss = nn.MSELoss()(out, torch.tensor(0.0).to("cuda"))
        note(step, "after loss")
        loss.backward()
        note(step, "after bwd")
        optimizer.step()
        note(step, "after step")
        model.zero_grad(set_to_none=True)
        note(step, "done")
    dist.destroy_process_group()
    return found


def ask(variant: str) -> dict[str, int]:
    """Return a variant's figures, from a process of its own."""
    command = [sys.executable, __file__, "--variant", variant]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a table of both variants, or one's figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=["plain", "checkpointed"])
    variant = parser.parse_args().variant
    if variant:
        from pytest_gpumem.meter.block import use_virtual_gpu

        use_virtual_gpu("A10G", values="off")
        print(json.dumps(run(checkpointed=variant == "checkpointed")))
        return
    lines, same = [], 0
    for name, figures in asserted().items():
        found = ask(name)
        lines += [[name, moment, mib, found[moment]] for moment, mib in figures.items()]
        same += sum(found[moment] == mib for moment, mib in figures.items())
    text = [
        "Memory allocated by FSDP over two ranks: what PyTorch's test asserts, and here",
        line(),
        "",
        tabulate(lines, ["variant", "moment", "asserted MiB", "virtual"]),
        "",
        f"the same in {same} of {len(lines)}",
    ]
    publish("published_fsdp", "\n".join(text))


if __name__ == "__main__":
    main()
