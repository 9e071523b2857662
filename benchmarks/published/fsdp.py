"""Memory allocated on two GPUs that PyTorch's own test asserts, beside the virtual GPU's as rank 0.

The test is test/distributed/fsdp/test_fsdp_memory.py of pytorch/pytorch (commit 050b2f2); it runs
on PyTorch's machines with two CUDA GPUs, with a tolerance of 1 MiB. Its figures, rounded to MiB as
in the test, are in data/fsdp-asserted.csv; the model and the loop are rewritten. The other rank is
part of a fake process group. Each variant runs in a process of its own, as in the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from benchmarks.harness import MIB, line, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.published.runner import Answers, Process, Row

CARD = "A10G"


def rows() -> list[Row]:
    """Return the moments at which the test asserts the allocated memory."""
    return [row | {"row": f"{row['variant']} {row['moment']}"} for row in read("fsdp-asserted.csv")]


def group(row: Row) -> str:
    """Return the variant: its moments occur in one process."""
    return row["variant"]


def steps(process: Process) -> Iterator[tuple[str, int]]:
    """Train four steps as rank 0 of two; yield the MiB allocated at each moment."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils.checkpoint import checkpoint

    variant = process.rows[0]["variant"]

    def convolution(given: int, width: int, **more: int) -> list[nn.Module]:
        norm = Sharded(nn.BatchNorm2d(width))
        return [nn.Conv2d(given, width, **more), norm, nn.ReLU(inplace=True)]

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
            if variant == "checkpointed":
                return self.head(checkpoint(self.blocks, inner, use_reentrant=True))
            return self.head(self.blocks(inner))

    def moment(step: int, name: str) -> tuple[str, int]:
        torch._C._cuda_clearCublasWorkspaces()  # as the test does
        return f"{variant} iter {step}: {name}", round(torch.cuda.memory_allocated() / MIB)

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    images = torch.randn(2, 3, 224, 224).to("cuda")
    model = Sharded(Model().to("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for step in range(4):
        yield moment(step, "start")
        out = model(images)
        yield moment(step, "after fwd")
        out = sum(it.sum() for it in out[0])
        loss = nn.MSELoss()(out, torch.tensor(0.0).to("cuda"))
        yield moment(step, "after loss")
        loss.backward()
        yield moment(step, "after bwd")
        optimizer.step()
        yield moment(step, "after step")
        model.zero_grad(set_to_none=True)
        yield moment(step, "done")
    dist.destroy_process_group()


def report(answers: Answers) -> str:
    """Return the table, and how many figures equal the asserted ones."""
    here = answers.figures[""]
    lines = [
        [row["variant"], row["moment"], int(row["mib"]), here[row["row"]]] for row in answers.rows
    ]
    same = sum(asserted == figure for *_, asserted, figure in lines)
    return "\n".join(
        [
            "Memory allocated by FSDP over two ranks: what PyTorch's test asserts, and here",
            line(),
            "",
            tabulate(lines, ["variant", "moment", "asserted MiB", "virtual"]),
            "",
            f"the same in {same} of {len(lines)}",
        ]
    )
