"""How large is an environment without NVIDIA's packages, and how long does it take to install?

    python -m benchmarks.speed.light [RUNS]

Each run begins with an empty folder: a virtual environment, pip without a cache, the README's test.
The bytes downloaded are the sizes of the files that pip names in its installation report. The rows
of examples/run.sh and tests/run.sh are of what these set up in a fresh clone; nothing is run in it.
The result goes to benchmarks/results/light.txt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from benchmarks.harness import ROOT, line, publish

KINDS = {"all packages": None, "without NVIDIA's but cuDNN": ["--cudnn"], "without NVIDIA's": []}
TEST = """
import pytest
import torch


@pytest.mark.gpu_memory(card="T4", batch_size=32)
def test_step(gpu_memory):
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True).cuda()
    layer(torch.randn(gpu_memory.batch_size, 256, 1024, device="cuda")).sum().backward()
"""


class Run(NamedTuple):
    """An environment: bytes on disk and downloaded, seconds, and the line of the test's peak."""

    disk: int
    downloaded: int
    seconds: float
    peak: str


def install_and_test(wheel: Path, options: list[str] | None) -> Run:
    """Make an environment of a kind, run the test in it, delete it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "PIP_NO_CACHE_DIR": "1", "COLUMNS": "120"}
        python = folder / "env/bin/python"
        started = time.perf_counter()
        run([sys.executable, "-m", "venv", str(folder / "env")], folder, environment)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--report", "report.json"]
        if options is None:
            run([*pip, str(wheel)], folder, environment)
        else:
            run([*pip, "--no-deps", str(wheel)], folder, environment)
            lines = run([str(python.with_name("gpumem")), "light", *options], folder, environment)
            (folder / "light.txt").write_text(lines, encoding="utf-8")
            run([*pip, "--no-deps", "-r", "light.txt"], folder, environment)
        (folder / "test_step.py").write_text(TEST, encoding="utf-8")
        test = [str(python), "-m", "pytest", "--gpumem-device=virtual", "--gpumem-update-baselines"]
        output = run(test, folder, environment)
        seconds = time.perf_counter() - started
        table = output[output.index("Peak memory in MiB") :].splitlines()[1:]
        row = next(line for line in table if "test_step" in line)
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        downloaded = sum(file_size(item["download_info"]["url"]) for item in report["install"])
        return Run(size(folder / "env"), downloaded, seconds, " ".join(row.split()))


def set_up(purpose: str) -> Run:
    """Let this project's own command make its environment in a clone, delete it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(["git", "clone", "--quiet", str(ROOT), "clone"], folder, dict(os.environ))
        environment = {key: os.environ[key] for key in ("HOME", "PATH")}
        started = time.perf_counter()
        run(["bash", "-c", f". .ci/environment.sh {purpose}"], folder / "clone", environment)
        seconds = time.perf_counter() - started
        return Run(size(folder / "clone/.venv"), 0, seconds, "set up alone")


def file_size(url: str) -> int:
    """Return the bytes of a file that an index offers."""
    with urllib.request.urlopen(url) as response:  # noqa: S310 - named by pip's own report
        return int(response.headers["Content-Length"])


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command that has to succeed; return its output."""
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def size(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def row_of(kind: str, measured: Run) -> list[str]:
    """Return a table's row, and print it."""
    row = [
        kind,
        f"{measured.disk / 1e9:.2f}",
        f"{measured.downloaded / 1e9:.2f}" if measured.downloaded else "-",
        f"{measured.seconds:.0f}",
        measured.peak,
    ]
    print(row, flush=True)
    return row


def main() -> None:
    """Measure all kinds, several times each, in turn, and this project's own commands once."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    scratch = Path(tempfile.mkdtemp())
    wheel_command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w"]
    run([*wheel_command, str(scratch), str(ROOT)], ROOT, dict(os.environ))
    (wheel,) = scratch.glob("*.whl")
    rows = []
    for _ in range(runs):
        for kind, options in KINDS.items():
            rows.append(row_of(kind, install_and_test(wheel, options)))
    rows += [row_of(f"{it}/run.sh", set_up(it)) for it in ("examples", "tests")]
    shutil.rmtree(scratch)
    heads = ["environment", "GB on disk", "GB downloaded", "s to the first verdict", "the test"]
    publish("light", f"{__doc__.splitlines()[0]}\n{line()}\n\n{tabulate(rows, heads)}")


if __name__ == "__main__":
    main()
