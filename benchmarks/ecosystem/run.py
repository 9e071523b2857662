"""Run each library's tests on the virtual GPU, in a session of its own, and print a table.

    python -m benchmarks.ecosystem.run > benchmarks/results/ecosystem.txt

It tests the installed libraries (pip install -e '.[ecosystem]'), and downloads nothing: models are
made from their configurations. ``--real`` uses a real GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.harness import OFFLINE

FOLDER = Path(__file__).parent
HANGS_S = 600
DISTRIBUTIONS = {"torch_geometric": "torch-geometric"}


def run_library(path: Path, device: str, reports: Path | None) -> tuple[str, list[str]]:
    """Run a library's tests; return the outcome, and a line for each test.

    Args:
        path: the tests.
        device: virtual or cuda.
        reports: a folder for the session's JSON report; None for none.
    """
    with tempfile.TemporaryDirectory() as temporary:
        report = (reports or Path(temporary)) / f"{path.stem.removeprefix('test_')}.json"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)),
            *(f"--rootdir={FOLDER}", "-c", os.devnull, "--gpumem-missing-baseline=note"),
            *(f"--gpumem-device={device}", "--gpumem-visible=session", f"--gpumem-json={report}"),
        ]
        environment = {**os.environ, **OFFLINE}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=HANGS_S,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"hangs ({HANGS_S} s)", []
        lines = []
        results = json.loads(report.read_text())["results"] if report.exists() else []
        for result in results:
            name = result["nodeid"].rpartition("::")[2]
            name += f" ({result['part']})" if result["part"] else ""
            peaks = result["measurement"]["peaks"][0]
            lines.append(
                f"  {name}: {result['verdict']['kind']}, "
                f"{peaks['allocated'] / 2**20:.2f} MiB allocated, "
                f"{peaks['reserved'] / 2**20:.2f} reserved"
            )
            lines += [f"    note: {note}" for note in result["measurement"]["notes"]]
        if done.returncode:
            lines += [f"  | {line}" for line in done.stdout.splitlines()[-25:]]
            lines += [f"  | {line}" for line in done.stderr.splitlines()[-10:]]
        return "works" if not done.returncode else f"fails (exit {done.returncode})", lines


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", help="by default all that are installed")
    parser.add_argument("--real", action="store_true", help="on a real GPU")
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="keep JSON reports there")
    arguments = parser.parse_args()
    print(f"torch {version('torch')}, Python {sys.version.split()[0]}")
    failed = False
    for path in sorted(FOLDER.glob("test_*.py")):
        name = path.stem.removeprefix("test_")
        if arguments.libraries and name not in arguments.libraries:
            continue
        try:
            number = version(DISTRIBUTIONS.get(name, name.replace("_", "-")))
        except PackageNotFoundError:
            print(f"{name}: not installed")
            continue
        began = time.monotonic()
        outcome, lines = run_library(
            path, "cuda" if arguments.real else "virtual", arguments.reports
        )
        failed |= outcome != "works"
        print(f"{name} {number}: {outcome}, {time.monotonic() - began:.0f} s", *lines, sep="\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
