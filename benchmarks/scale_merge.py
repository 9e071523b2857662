"""What it takes to merge the reports of many shards: one page, one comment, one file.

    python -m benchmarks.scale_merge > benchmarks/results/scale_merge.txt

The results are made up: one in a hundred failed, and has where its peak comes from.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import line
from benchmarks.reports.html_page import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from helpers.sample_report import many

from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.json_report import dumps
from pytest_gpumem.report.model import Origin, Report, Shard

SHARDS = 64
SIZES = (1_000, 10_000, 100_000)
AIMS = "aims: 60 s, 2 GiB for 100,000 results"
MEASURED = """
import resource, sys, time
from pytest_gpumem.cli.main import main
began = time.perf_counter()
status = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(status, time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024,
      file=sys.stderr)
"""


def write_shards(folder: Path, number: int) -> list[str]:
    """Write the reports of a suite of so many tests; return their names."""
    results = many(number, attributed=number)
    results = [
        result
        if result.verdict.kind is Kind.REGRESSED
        else replace(result, measurement=replace(result.measurement, attributions=()))
        for result in results
    ]
    names = []
    for index in range(SHARDS):
        origin = Origin(commit="a" * 40, shard=Shard(index + 1, SHARDS))
        report = Report(tuple(results[index::SHARDS]), device="virtual T4", origins=(origin,))
        path = folder / f"{index + 1}.json"
        path.write_text(dumps(report, created="2026-11-23T10:00:00Z"), encoding="utf-8")
        names.append(str(path))
    return names


def measured(folder: Path, number: int) -> list[str]:
    """Return the row of a suite of so many tests."""
    names = write_shards(folder, number)
    size = sum(Path(name).stat().st_size for name in names) / 1e6
    outputs = [f"--{kind}={folder / f'all.{kind}'}" for kind in ("html", "json", "markdown")]
    command = [sys.executable, "-c", MEASURED, "report", *names, *outputs]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    status, wall, cpu, memory = process.stderr.split()[-4:]
    if status != "0":
        raise RuntimeError(process.stderr)
    return [f"{number:,}", f"{size:.0f}", f"{float(wall):.1f}", f"{float(cpu):.1f}", memory]


def main() -> None:
    """Print the table."""
    sizes = [int(word) for word in sys.argv[1:]] or list(SIZES)
    print(f"gpumem report of {SHARDS} reports: --html, --json and --markdown in one process")
    print(line("msgspec", "jinja2"))
    print(f"load when measured: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {AIMS}\n")
    with tempfile.TemporaryDirectory() as name:
        rows = [measured(Path(name), number) for number in sizes]
    heads = ["results", "MB of reports", "s", "s of the processor", "peak MiB"]
    print(tabulate(rows, heads, disable_numparse=True))


if __name__ == "__main__":
    main()
