"""How long may a GPU keep tensors that other streams use: the range of FSDP's peaks.

    python -m benchmarks.fidelity.other_streams

Two ranks train a model under FullyShardedDataParallel (the first FSDP, which uses record_stream),
with and without its rate limiter (``limit_all_gathers``), on the virtual GPU. The recorded run is
benchmarks/results/other_streams.txt. These steps have not been measured on a real GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import MIB, line, publish, table

TEST = """
import os
import pytest, torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

LAYER = torch.nn.TransformerEncoderLayer

@pytest.mark.gpu_memory
@pytest.mark.parametrize("limit", [True, False])
def test_fsdp(limit):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    layers = [LAYER(512, 8, 2048, batch_first=True) for _ in range(8)]
    model = FullyShardedDataParallel(
        torch.nn.Sequential(*layers).cuda(),
        auto_wrap_policy=ModuleWrapPolicy({LAYER}),
        limit_all_gathers=limit,
    )
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 128, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def main() -> None:
    """Run the two tests on two ranks, and publish their ranges."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_fsdp.py").write_text(TEST, encoding="utf-8")
        options = ["-q", "-p", "no:randomly", "--gpumem-json=report.json"]
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [sys.executable, "-m", *torchrun, "-m", "pytest", *options]
        subprocess.run(command, cwd=folder, check=True)
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    rows = []
    for result in report["results"]:
        measured = result["measurement"]
        ends = measured["range"]
        for figure in ("allocated", "reserved"):
            peaks = (measured["peaks"], ends["least"], ends["most"])
            sizes = [max(peak[figure] for peak in of) / MIB for of in peaks]
            rows.append([result["nodeid"], figure, *(f"{size:.2f}" for size in sizes)])
    heads = ["test", "peak", "predicted MiB", "streams done at once", "done when waited for"]
    publish("other_streams", f"{line('torch')}\n\n{table(rows, heads)}")


if __name__ == "__main__":
    main()
