"""Query a cuDNN for the workspaces of convolutions, in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

from benchmarks.harness import ROOT, open_card

ASKED_FROM = (9, 8)
"""the first cuDNN that makes plans for a device that the machine does not have"""


def named(version: int) -> str:
    """Return cuDNN's version as text: "9.10.2" for 91002."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers: (9, 10, 2) for "9.10.2"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def ask(python: str, cudnn: str, task: dict[str, Any]) -> list[Any] | str:
    """Run a task in a worker process; return the JSON that it prints, or its last error line.

    Args:
        python: the worker's interpreter.
        cudnn: the path of the libcudnn.so.9 to query, or "none".
        task: the argument of measure(), or of agreement.measure() if it has a "sweep".
    """
    done = subprocess.run(
        [python, "-m", "benchmarks.cudnn.asking", json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GPUMEM_CUDNN": cudnn},
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return lines[-1][:120]
    return json.loads(done.stdout.strip().splitlines()[-1])


def own(python: str) -> tuple[str, str, str]:
    """Return the versions of an interpreter's torch and cuDNN, and the path of its libcudnn."""
    code = (
        "import nvidia.cudnn as n, torch\n"
        "print(torch.__version__, torch.backends.cudnn.version(), list(n.__path__)[0])"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    torch, version, path = done.stdout.split(maxsplit=2)
    return torch, named(int(version)), f"{path.strip()}/lib/libcudnn.so.9"


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that name cuDNNs and interpreters."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cudnn", action="append", default=[], metavar="VERSION=PATH")
    parser.add_argument("--python", action="append", default=[])
    return parser


def there(given: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Return interpreters by torch version, and paths of usable cuDNNs by version."""
    seen = [(python, *own(python)) for python in [sys.executable, *given.python]]
    pythons = {torch: python for python, torch, _, _ in seen}
    cudnns = {version: path for _, _, version, path in seen}
    cudnns |= dict(pair.split("=", 1) for pair in given.cudnn)
    ordered = sorted((it for it in cudnns if numbers(it) >= ASKED_FROM), key=numbers)
    return pythons, {version: cudnns[version] for version in ordered}


def measure(task: dict[str, Any]) -> list[Any]:
    """Run one convolution in this process; return its bytes, and cuDNN's version."""
    from pytest_gpumem.devices.cards import find_card

    name, sms = task["chip"]
    device = open_card(replace(find_card(name), sm_count=sms))
    device.gpu_choices.assume_sizes(task.get("end", "usual"))
    from benchmarks.cudnn import figures

    figure = figures.peak if task["loop"] else figures.workspace
    more = {name: task[name] for name in ("bias", "padding", "asked")}
    size = figure(task["shapes"], task["dtype"], **more)
    version = device.library.cudnn_found()
    return [size, named(version) if version else "none"]


if __name__ == "__main__":
    from benchmarks.cudnn import agreement

    wanted = json.loads(sys.argv[1])
    print(json.dumps((agreement.measure if "sweep" in wanted else measure)(wanted)))
