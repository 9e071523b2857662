r"""Published runs of torchtitan, as one rank of a program that makes its own process group.

    python -m benchmarks.launched.published_titan CLONE --python 2.6=PYTHON --python 2.8=PYTHON \\
        --row "torchtitan 2024-12 bfloat16, 8 ranks" > launched_titan.txt

The rows and the interpreters are those of ``benchmarks.published titan``, which creates the process
group before the program starts, for the figures in published_titan.txt. Here ``gpumem run`` reports
the peak. Each row runs in a new folder with the commit's files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import OFFLINE, ROOT, table, where
from benchmarks.published import titan
from pytest_gpumem.sizes import GIB


def recorded(name: str) -> str:
    """Return a row's reserved GiB of later steps from published_titan.txt."""
    lines = (ROOT / "benchmarks/results/published_titan.txt").read_text(encoding="utf-8")
    titles = next(line for line in lines.splitlines() if line.startswith("run "))
    row = next(line for line in lines.splitlines() if line.startswith(f"{name} "))
    return row[titles.rindex("virtual") : titles.rindex("%")].strip()


def row(name: str, clone: Path, pythons: dict[str, str]) -> list[str]:
    """Return a row of the table."""
    declared = next(each for each in titan.rows() if each["row"] == name)
    version = next(version for version in pythons if declared["torch"].startswith(version))
    options = [f"--card={declared['card']}", f"--world-size={declared['ranks']}", "--rank=0"]
    with tempfile.TemporaryDirectory() as folder:
        files = subprocess.run(
            ["git", "-C", str(clone), "archive", declared["commit"], *titan.folders(declared)],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=files, check=True)
        report = Path(folder) / "report.json"
        command = [pythons[version], "-m", "pytest_gpumem.cli.main", "run", f"--json={report}"]
        began = time.monotonic()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        subprocess.run(
            [*command, *options, "-m", "benchmarks.launched.published_titan", name],
            cwd=folder,
            env={**os.environ, **OFFLINE, **titan.environment(declared), "PYTHONPATH": path},
            stdout=sys.stderr,
            check=True,
        )
        seconds = time.monotonic() - began
        result = json.loads(report.read_text(encoding="utf-8"))["results"][0]
    reserved = result["measurement"]["peaks"][0]["reserved"] / GIB
    versions = result["measurement"]["provenance"]["torch"]
    real = declared["reserved_gib"]
    return [name, versions, real, recorded(name), f"{reserved:.2f}", f"{seconds:.0f}"]


def main() -> int:
    """Run one row in this process, or each named row as a program of ``gpumem run``."""
    if len(sys.argv) == 2:  # the program itself
        titan.run(next(each for each in titan.rows() if each["row"] == sys.argv[1]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH")
    parser.add_argument("--row", action="append", default=[], metavar="NAME")
    arguments = parser.parse_args()
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    print("; ".join(f"{key} {value}" for key, value in where().items()), flush=True)
    rows = [row(name, arguments.clone.resolve(), pythons) for name in arguments.row]
    titles = ["run", "torch", "GiB real", "published_titan.txt", "gpumem run", "s"]
    print(table(rows, titles, "llrrrr"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
