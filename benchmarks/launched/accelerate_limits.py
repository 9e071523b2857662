"""accelerate's nine limits as markers: peaks, a second run against baselines, a planted growth.

    python -m benchmarks.launched.made_up_data FOLDER
    python -m benchmarks.launched.accelerate_limits FOLDER ACCELERATE > accelerate_limits.txt

ACCELERATE is a clone of huggingface/accelerate. benchmarks/results/accelerate_limits.txt is a
recorded run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import MIB, OFFLINE, ROOT, packages, table, where
from benchmarks.launched.run import Program, planted

TESTS = Path(__file__).with_name("test_accelerate_limits.py")
PLANTED_IN = Program(
    *("accelerate", "accelerate", [], []),
    "src/accelerate/test_utils/scripts/external_deps/test_peak_memory_usage.py",
    "loss = outputs.loss",
)


def session(
    data: Path, clone: Path, folder: Path, *options: str
) -> dict[str, dict[str, dict[str, Any]]]:
    """Run all tests in the folder of the data; return the results by test and by rank."""
    report = folder / "report.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", f"--rootdir={folder}"),
            *(f"--gpumem-json={report}", f"--gpumem-baseline-dir={folder / 'kept'}"),
            *("--gpumem-attribution=on", *options, str(folder / TESTS.name)),
        ],
        cwd=data,
        env={**os.environ, **OFFLINE, "ACCELERATE": str(clone), "PYTHONPATH": str(ROOT)},
        stdout=sys.stderr,
        check=False,
    )
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for result in json.loads(report.read_text(encoding="utf-8"))["results"]:
        name = re.sub(r".*\[(.*)\]", r"\1", result["nodeid"])
        found.setdefault(name, {})[result["part"]] = result
    return found


def headline(results: dict[str, dict[str, Any]]) -> str:
    """Return the headline of the first rank that failed; if none did, the kinds of verdicts."""
    for part, result in results.items():
        if result["verdict"]["failed"]:
            return f"{part}: {result['verdict']['headline'].split(';')[0]}"
    kinds = {result["verdict"]["kind"] for part, result in results.items() if part}
    return " and ".join(sorted(kinds))


def main() -> int:
    """Run all limits three times, and print the table."""
    data, clone = (Path(argument).resolve() for argument in sys.argv[1:])
    names = ("torch", "transformers", "deepspeed", "accelerate", "datasets")
    print("; ".join(f"{key} {value}" for key, value in {**where(), **packages(*names)}.items()))
    git = ["git", "-C", str(clone), "log", "-1", "--format=%h of %cs"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    print(f"accelerate's script: {head}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        (folder / TESTS.name).write_bytes(TESTS.read_bytes())
        began = time.monotonic()
        first = session(data, clone, folder, "--gpumem-update-baselines")
        seconds = time.monotonic() - began
        again = session(data, clone, folder)
        with planted(clone, PLANTED_IN):
            grown = session(data, clone, folder)
    rows = []
    for name, results in first.items():
        peaks = [
            f"{max(peak['allocated'] for peak in result['measurement']['peaks']) / MIB:.2f}"
            for part, result in sorted(results.items())
            if part
        ]
        limit = results[""]["budget"]
        rows.append([name, limit, *peaks, headline(again[name]), headline(grown[name])])
    titles = [
        "limit",
        "as declared",
        "MiB rank 0",
        "rank 1",
        "again",
        "with 256 MiB more at a line",
    ]
    print(f"one session of nine tests: {seconds:.0f} s")
    print(table(rows, titles, "llrrl"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
