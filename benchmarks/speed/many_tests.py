"""What each of thousands of tests takes: processor time, memory, bytes of the reports.

    python -m benchmarks.speed.many_tests [--tests 20000] [--dry]

Sessions of tests with one tensor each alternate: unmarked; recording baselines, with HTML, JSON and
Markdown reports; comparing with these baselines. Times are CPU seconds per thousand tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import MIB, line, output_of, publish, table

CONFTEST = """
import json, os, pathlib, resource, time

import pytest
import torch  # unmarked tests import torch, too

seconds, count = [time.process_time()], 0

def pytest_runtest_logfinish():
    global count
    count += 1
    if count % 1000 == 0:
        seconds.append(time.process_time())

@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    found = {"seconds": seconds, "whole": time.process_time(), "peak": peak}
    pathlib.Path("figures.json").write_text(json.dumps(found))
"""
TESTS = """
import pytest
import torch

@pytest.mark.parametrize("number", range({count}))
{mark}
def test_it(number):
    torch.empty(1000 + number, device={device!r})
"""
REPORTS = {"html": "the page", "json": "JSON", "markdown": "Markdown"}


def main() -> None:
    """Run the sessions, and publish their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=int, default=20_000)
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "conftest.py").write_text(CONFTEST, "utf-8")
        (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
        reports = [f"--gpumem-{kind}={folder / kind}" for kind in REPORTS]
        sessions = {
            "unmarked": ("", []),
            "recording": ("@pytest.mark.gpu_memory", ["--gpumem-update-baselines", *reports]),
            "comparing": ("@pytest.mark.gpu_memory", []),
        }
        rows = []
        for kind, (mark, arguments) in sessions.items():
            device = "cuda" if mark else "cpu"
            source = TESTS.format(count=options.tests, mark=mark, device=device)
            (folder / "test_it.py").write_text(source, "utf-8")
            options_of_pytest = "-q -p no:randomly -p no:cacheprovider --gpumem-device=virtual"
            command = ["env", "-C", name, sys.executable, "-m", "pytest"]
            output_of(*command, *options_of_pytest.split(), *arguments)
            figures = json.loads((folder / "figures.json").read_text("utf-8"))
            seconds = figures["seconds"]
            rows.append(
                [
                    kind,
                    f"{seconds[2] - seconds[1]:.1f}",
                    f"{seconds[-1] - seconds[-2]:.1f}",
                    f"{figures['whole'] - seconds[-1]:.1f}",
                    f"{figures['peak'] / MIB:.0f}",
                ]
            )
        sizes = [
            f"{title} {(folder / kind).stat().st_size / MIB:.1f} MiB"
            for kind, title in REPORTS.items()
        ]
    heads = ["", "s of the second 1,000", "of the last", "of the end", "peak MiB of the process"]
    text = [
        f"{options.tests:,} tests of one tensor each, on the virtual GPU",
        line(),
        "",
        table(rows, heads, "lrrrr"),
        "",
        f"Reports of the recording: {', '.join(sizes)}.",
    ]
    publish("many_tests", "\n".join(text), keep=not options.dry)


if __name__ == "__main__":
    main()
