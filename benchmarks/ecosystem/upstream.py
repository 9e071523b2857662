"""Run libraries' own memory tests, unmodified, on the virtual GPU, and print what came of them.

    python -m benchmarks.ecosystem.upstream diffusers=PATH torchtitan=PATH ao=PATH \\
        accelerate=PATH fairscale=PATH opacus=PATH pytorch-lightning=PATH

Each PATH is a checkout of the library's repository; nothing is fetched. The libraries themselves
are the checkout's, or else (of torchao, which has to be built) those that are installed.
``--values=auto`` computes small tensors' values only; ``--real`` takes a real GPU.
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

HANGS_S = 900
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
MARKING = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpu_memory(baseline=False))
"""
"""a plugin that does what a line in the suite's conftest.py would"""
ENDS = {"failure", "error", "skipped"}
"""what a test ends with that has not passed, in pytest's report"""


class Suite(NamedTuple):
    """Some tests of a repository."""

    repository: str
    """its name on the command line"""
    distribution: str
    """the library that it tests"""
    path: str
    """file, from the repository's root"""
    select: str = ""
    """as pytest's -k"""
    gpus: int = 1
    """that the session sees"""


SUITES = (
    Suite("diffusers", "diffusers", "tests/hooks/test_group_offloading.py"),
    Suite(
        "diffusers",
        "diffusers",
        "tests/models/transformers/test_models_transformer_flux.py",
        "TestFluxTransformerMemory",
    ),
    Suite(
        "torchtitan",
        "torchtitan",
        "tests/unit_tests/test_activation_checkpoint.py",
        "TestApplyAC",
    ),
    Suite("ao", "torchao", "test/quantization/test_quant_api.py", "streaming"),
    Suite("accelerate", "accelerate", "tests/test_memory_utils.py"),
    Suite("accelerate", "accelerate", "tests/test_big_modeling.py", gpus=2),
    Suite("accelerate", "accelerate", "tests/test_modeling_utils.py", gpus=2),
    Suite("fairscale", "fairscale", "tests/nn/checkpoint/test_checkpoint_activations.py"),
    Suite("fairscale", "fairscale", "tests/experimental/nn/test_mevo.py"),
    Suite("fairscale", "fairscale", "tests/nn/data_parallel/test_fsdp_memory.py", gpus=2),
    Suite(
        "fairscale",
        "fairscale",
        "tests/nn/data_parallel/test_fsdp_summon_full_params.py",
        "TestMemory and reshard_after_forward_False_mixed_precision_False",
        gpus=2,
    ),
    Suite("opacus", "opacus", "benchmarks/tests"),
    Suite(
        "pytorch-lightning",
        "lightning",
        "tests/tests_pytorch/strategies/test_single_device.py",
    ),
)


def main() -> int:
    """Run the suites of the repositories that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--values", default="full", choices=("auto", "full", "off"))
    parser.add_argument("--real", action="store_true", help="on a real GPU")
    arguments = parser.parse_args()
    checkouts = dict(checkout.split("=", 1) for checkout in arguments.checkouts)
    print(f"torch {version('torch')}, Python {sys.version.split()[0]}, values={arguments.values}")
    for suite in SUITES:
        if suite.repository in checkouts:
            options = [f"--gpumem-values={arguments.values}"]
            options.append(f"--gpumem-device={'cuda' if arguments.real else 'virtual'}")
            print(*run(suite, Path(checkouts[suite.repository]), options), sep="\n", flush=True)
    return 0


class Case(NamedTuple):
    """A test that ran."""

    name: str
    """with its class: "Class.test" """
    tag: str
    """passed, failure, error or skipped"""
    message: str
    """the first line of what it ended with"""


def run_tests(checkout: Path, *words: str, limit_s: float = HANGS_S) -> tuple[list[Case], str]:
    """Run pytest in a checkout, with words of a command line; return its tests and its output.

    Raises:
        subprocess.TimeoutExpired: it has not ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mark_all_tests.py").write_text(MARKING, encoding="utf-8")
        report = Path(folder, "report.xml")
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"),
            *(f"--junitxml={report}", *words),
        ]
        paths = [folder, str(checkout / "src"), str(checkout), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            command,
            cwd=checkout,
            env={**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        cases = []
        for case in ET.parse(report).getroot().iter("testcase") if report.exists() else ():  # noqa: S314 - pytest's own
            end = next((child for child in case if child.tag in ENDS), None)
            message = (end.get("message") or "").strip().splitlines() if end is not None else []
            name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
            tag = "passed" if end is None else end.tag
            cases.append(Case(name, tag, message[0] if message else ""))
    return cases, done.stdout + done.stderr


def run(suite: Suite, checkout: Path, options: list[str]) -> list[str]:
    """Return lines on a suite: its counts, and the tests that failed, with the end of each."""
    words = ["-p", "mark_all_tests", suite.path, "-k", suite.select]
    words += [f"--gpumem-visible=session:{suite.gpus}", "--gpumem-attribution=off", *options]
    try:
        cases, output = run_tests(checkout, *words)
    except subprocess.TimeoutExpired:
        return [f"{suite.path} {suite.select}: not done after {HANGS_S} s"]
    cases = [case._replace(tag=case.tag.replace("failure", "failed")) for case in cases]
    counts = Counter(case.tag for case in cases)
    sums = ", ".join(f"{number} {tag}" for tag, number in counts.most_common()) or "no tests ran"
    lines = [f"{name(suite, checkout)}, {suite.path} {suite.select}".rstrip() + f": {sums}"]
    if not counts:
        lines += [f"  | {line}" for line in output.splitlines()[-15:]]
    failed = [case for case in cases if case.tag != "passed"]
    return [
        *lines,
        *(f"  {case.tag}: {case.name.partition('.')[2]}: {case.message}" for case in failed),
    ]


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
