"""Run libraries' own memory tests, unmodified, on the virtual GPU, and print what came of them.

    python -m benchmarks.ecosystem.upstream diffusers=PATH torchtitan=PATH ao=PATH \\
        accelerate=PATH fairscale=PATH opacus=PATH pytorch-lightning=PATH

Each PATH is a checkout of the library's repository; nothing is downloaded. The checkout's library
is tested, except for torchao, which must be built: there the installed one is tested.
``--values=auto`` computes only small tensors' values; ``--real`` uses a real GPU.
benchmarks/results/upstream.txt is a recorded run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import OFFLINE, read_toml

HANGS_S = 900
MARKING = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpu_memory(baseline=False))
"""
"""a plugin that marks all tests, as a line in the suite's conftest.py could"""
ENDS = {"failure", "error", "skipped"}
"""elements of pytest's XML report for a test that did not pass"""


class Suite(NamedTuple):
    """Some tests of a repository; upstream.toml explains the fields."""

    repository: str
    distribution: str
    path: str
    select: str = ""
    gpus: int = 1


def main() -> int:
    """Run the suites of the repositories that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--values", default="full", choices=("auto", "full", "off"))
    parser.add_argument("--real", action="store_true", help="on a real GPU")
    arguments = parser.parse_args()
    checkouts = dict(checkout.split("=", 1) for checkout in arguments.checkouts)
    print(f"torch {version('torch')}, Python {sys.version.split()[0]}, values={arguments.values}")
    suites = read_toml(Path(__file__).with_suffix(".toml"))["suites"]
    for suite in (Suite(**fields) for fields in suites):
        if suite.repository in checkouts:
            options = [f"--gpumem-values={arguments.values}"]
            options.append(f"--gpumem-device={'cuda' if arguments.real else 'virtual'}")
            print(*run(suite, Path(checkouts[suite.repository]), options), sep="\n", flush=True)
    return 0


def run(suite: Suite, checkout: Path, options: list[str]) -> list[str]:
    """Run a suite; return its counts, and the failed tests with their last lines."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mark_all_tests.py").write_text(MARKING, encoding="utf-8")
        report = Path(folder, "report.xml")
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"),
            *(f"--junitxml={report}", "-p", "mark_all_tests", suite.path, "-k", suite.select),
            *(f"--gpumem-visible=session:{suite.gpus}", "--gpumem-attribution=off", *options),
        ]
        paths = [folder, str(checkout / "src"), str(checkout), os.environ.get("PYTHONPATH", "")]
        try:
            done = subprocess.run(
                command,
                cwd=checkout,
                env={**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                capture_output=True,
                text=True,
                timeout=HANGS_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [f"{suite.path} {suite.select}: not done after {HANGS_S} s"]
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []  # noqa: S314 - pytest's own
    counts: Counter[str] = Counter()
    ended = []
    for case in cases:
        end = next((child for child in case if child.tag in ENDS), None)
        tag = "passed" if end is None else end.tag.replace("failure", "failed")
        counts[tag] += 1
        if end is not None:
            message = (end.get("message") or "").strip().splitlines() or [""]
            ended.append(f"  {tag}: {case.get('name')}: {message[0]}")
    sums = ", ".join(f"{number} {tag}" for tag, number in counts.most_common()) or "no tests ran"
    lines = [f"{name(suite, checkout)}, {suite.path} {suite.select}".rstrip() + f": {sums}"]
    if not counts:
        lines += [f"  | {line}" for line in (done.stdout + done.stderr).splitlines()[-15:]]
    return [*lines, *ended]


def name(suite: Suite, checkout: Path) -> str:
    """Return the library's name and version, and the commit of its tests."""
    library = f"{suite.distribution} of the checkout"
    if not any((checkout / place / suite.distribution).exists() for place in ("src", "")):
        library = f"{suite.distribution} {version(suite.distribution)}"
    git = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{library}, tests of commit {git.stdout.strip() or 'unknown'}"


if __name__ == "__main__":
    sys.exit(main())
