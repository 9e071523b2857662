"""How large is an environment without NVIDIA's packages, and how long does it take to install?

    python -m benchmarks.speed.light [--runs N]
    python -m benchmarks.speed.light set-up

Each run begins with an empty folder: it makes a virtual environment, installs with pip or uv
without a cache, and runs the README's test, as in the guide. CPU seconds are those of all
processes: on a busy machine they say more than the clock. The downloaded bytes are the sizes of the
files in pip's installation report. uv's file of excluded names is written before a run begins. The
result is written to benchmarks/results/light.txt.

With set-up, examples/run.sh and tests/run.sh only set up their environments, each in a fresh clone;
the result is written to light_setup.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import LIGHT, ROOT, excludes, line, publish, table

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALLERS = ("pip", "uv")
HEADS = ("environment", "with", "GB", "GB downloaded", "s to the verdict", "processor s")
STEPS = ("make", "choose", "install", "test")
"""steps of a run: make the environment, choose versions, install them, run the test"""
UNSET = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV", "PIP_FIND_LINKS"}
"""variables to remove; with the first one, every process would compile its imports again"""
SET_UP = "How large are the environments that this project's own two commands set up?"
SET_UP_HEADS = ("command", "GB on disk", "s to set it up", "processor s")
TEST = """
import pytest
import torch


@pytest.mark.gpu_memory(card="T4", batch_size=32)
def test_step(gpu_memory):
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True).cuda()
    layer(torch.randn(gpu_memory.batch_size, 256, 1024, device="cuda")).sum().backward()
"""


class Times:
    """Wall-clock and CPU seconds by step."""

    def __init__(self) -> None:
        self.steps: dict[str, tuple[float, float]] = {}

    def run(self, step: str, command: list[str], folder: Path, environment: dict[str, str]) -> str:
        """Run a command, which must succeed, as a part of a step; return its output."""
        before, started = children(), time.perf_counter()
        output = run(command, folder, environment)
        wall, cpu = self.steps.get(step, (0.0, 0.0))
        now = wall + time.perf_counter() - started, cpu + children() - before
        self.steps[step] = now
        return output

    @property
    def whole(self) -> tuple[float, float]:
        """Return the sum of the steps."""
        return sum(it[0] for it in self.steps.values()), sum(it[1] for it in self.steps.values())


class Run(NamedTuple):
    """An environment: bytes on disk and downloaded, seconds, and the output line with the peak."""

    disk: int
    downloaded: int
    times: Times
    peak: str


def children() -> float:
    """Return the CPU seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def install_and_test(wheel: Path, installer: str, options: list[str] | None) -> Run:
    """Make an environment with these options of ``gpumem light``, run the test, delete it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {key: value for key, value in os.environ.items() if key not in UNSET}
        environment |= {"PIP_NO_CACHE_DIR": "1", "UV_CACHE_DIR": str(folder / "cache")}
        environment["PIP_CONFIG_FILE"] = os.devnull  # ignore this machine's settings of pip
        environment["COLUMNS"] = "120"
        times = Times()
        install = with_pip if installer == "pip" else with_uv
        downloaded = install(times, wheel, folder, environment, options)
        (folder / "test_step.py").write_text(TEST, encoding="utf-8")
        python = str(folder / "env/bin/python")
        test = [python, "-m", "pytest", "test_step.py", "--gpumem-device=virtual"]
        output = times.run("test", [*test, "--gpumem-update-baselines"], folder, environment)
        rows = output[output.index("Peak memory in MiB") :].splitlines()[1:]
        row = next(line for line in rows if "test_step" in line)
        return Run(size(folder / "env"), downloaded, times, " ".join(row.split()))


def with_pip(
    times: Times, wheel: Path, folder: Path, environment: dict[str, str], options: list[str] | None
) -> int:
    """Make an environment with pip; return how many bytes it has downloaded."""
    python = folder / "env/bin/python"
    times.run("make", [sys.executable, "-m", "venv", str(folder / "env")], folder, environment)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--report", "report.json"]
    if options is None:
        times.run("install", [*pip, str(wheel)], folder, environment)
    else:
        times.run("install", [*pip, "--no-deps", str(wheel)], folder, environment)
        light = [str(python.with_name("gpumem")), "light", *options]
        lines = times.run("choose", light, folder, environment)
        (folder / "light.txt").write_text(lines, encoding="utf-8")
        lightly = [*pip, "--no-deps", "--no-compile", "-r", "light.txt"]
        times.run("install", lightly, folder, environment)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return sum(file_size(item["download_info"]["url"]) for item in report["install"])


def with_uv(
    times: Times, wheel: Path, folder: Path, environment: dict[str, str], options: list[str] | None
) -> int:
    """Make an environment with uv, which does not say how many bytes it downloads: return 0."""
    excluded = excludes(folder, options)
    make = ["uv", "venv", "--quiet", "--python", sys.executable, "env"]
    times.run("make", make, folder, environment)
    install = ["uv", "pip", "install", "--quiet", "--python", "env", *excluded, str(wheel)]
    times.run("install", install, folder, environment)
    return 0


def set_up(purpose: str) -> list[str]:
    """Run a command of this project that makes its environment in a clone; return a table's row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(["git", "clone", "--quiet", str(ROOT), "clone"], folder, dict(os.environ))
        environment = {key: os.environ[key] for key in ("HOME", "PATH")}
        times = Times()
        command = ["bash", "-c", f". .ci/environment.sh {purpose}"]
        times.run("install", command, folder / "clone", environment)
        on_disk = f"{size(folder / 'clone/.venv') / 1e9:.2f}"
        return [f"{purpose}/run.sh", on_disk, *(f"{it:.0f}" for it in times.whole)]


def file_size(url: str) -> int:
    """Return the size of a file on an index, in bytes."""
    with urllib.request.urlopen(url) as response:  # noqa: S310 - named by pip's own report
        return int(response.headers["Content-Length"])


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command, which must succeed; return its output."""
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def size(folder: Path) -> int:
    """Return the total size of a folder's files, in bytes."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def row_of(kind: str, installer: str, measured: Run) -> list[str]:
    """Return a table's row, and print it."""
    wall, cpu = measured.times.whole
    steps = measured.times.steps
    row = [
        kind,
        installer,
        f"{measured.disk / 1e9:.2f}",
        f"{measured.downloaded / 1e9:.2f}" if measured.downloaded else "-",
        f"{wall:.0f}",
        f"{cpu:.0f}",
        *(f"{steps[step][1]:.1f}" if step in steps else "-" for step in STEPS),
        measured.peak,
    ]
    print(row, flush=True)
    return row


def medians(measured: dict[tuple[str, str], list[Run]]) -> list[str]:
    """Return a line for each installer on the seconds of each kind, relative to all packages."""
    lines = []
    for installer in INSTALLERS:
        all_of = measured["all packages", installer]
        parts = []
        for kind in list(LIGHT)[1:]:
            of_kind = measured[kind, installer]
            wall, cpu = (
                median(it.times.whole[i] for it in of_kind)
                / median(it.times.whole[i] for it in all_of)
                for i in (0, 1)
            )
            parts.append(f"{kind} {wall:.0%} of the seconds, {cpu:.0%} of the processor's")
        lines.append(f"{installer}, medians, of all packages': {'; '.join(parts)}")
    return lines


def measure(runs: int) -> Iterator[list[str]]:
    """Measure all kinds in turn, several times; after each turn, yield the result's lines."""
    scratch = Path(tempfile.mkdtemp())
    wheel_command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w"]
    run([*wheel_command, str(scratch), str(ROOT)], ROOT, dict(os.environ))
    (wheel,) = scratch.glob("*.whl")
    rows = []
    measured: dict[tuple[str, str], list[Run]] = {}
    loads = []
    for _ in range(runs):
        for kind, options in LIGHT.items():
            for installer in INSTALLERS:
                loads.append(os.getloadavg()[0])
                its = install_and_test(wheel, installer, options)
                measured.setdefault((kind, installer), []).append(its)
                rows.append(row_of(kind, installer, its))
        yield [
            f"load of the machine when a run began: {min(loads):.1f} to {max(loads):.1f}",
            f"processor seconds by step: {', '.join(STEPS)}\n",
            table(rows, [*HEADS, *STEPS, "the test"], "llrrrrrrrrl"),
            *medians(measured),
        ]
    shutil.rmtree(scratch)


def main() -> None:
    """Measure all kinds of environments, or this project's own commands once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["set-up"], help="this project's own commands")
    parser.add_argument("--runs", type=int, default=3, help="of each kind (3)")
    asked = parser.parse_args()
    began = line()
    if asked.what == "set-up":
        drawn = table(map(set_up, ("examples", "tests")), SET_UP_HEADS, "lrrr")
        publish("light_setup", f"{SET_UP}\n{began}\n\n{drawn}")
        return
    uv = run(["uv", "--version"], ROOT, dict(os.environ)).strip()
    pip = run([sys.executable, "-m", "ensurepip", "--version"], ROOT, dict(os.environ)).strip()
    text = [
        __doc__.splitlines()[0],
        f"{began}; {uv}, {pip} (a newer one for gpumem light)",
    ]
    for lines in measure(asked.runs):
        publish("light", "\n".join([*text, *lines]))


if __name__ == "__main__":
    main()
