"""Run PyTorch's own tests of CUDA memory, unmodified, on the virtual GPU; class each failure.

    python -m benchmarks.ecosystem.upstream_torch PATH [--file test_cuda.py]

PATH is the ``test`` folder of PyTorch's sources, best in the installed torch's version; nothing is
downloaded. The requirements of PyTorch's tests (expecttest, hypothesis, psutil, scipy,
setuptools) and unittest-xml-reporting must be installed. Each file runs under ``gpumem run``, in
processes of a few tests; a test that fails, or that ends its process, runs again with
``--values=full``. The exit status is 1 if a failed test has no class in ``upstream_torch.toml``.
benchmarks/results/upstream_torch.txt is a recorded run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import read_toml

GROUP = 12
"""number of tests per process"""
ALONE_S = 180
"""seconds for a process with one test"""
AGAIN = "passed with --values=full alone"
ENDS = ("passed", "skipped")


class File(NamedTuple):
    """A file of PyTorch's tests."""

    path: str
    """relative to the folder ``test``"""
    gpus: int = 1
    hangs_s: int = 240
    """seconds for a process"""
    group: int = GROUP
    """number of tests per process; 1 if PyTorch's own runner uses --subprocess for the file"""
    settings: tuple[tuple[str, str], ...] = ()
    """environment variables"""


FILES = (
    File("test_cuda.py"),
    File("test_cuda_expandable_segments.py"),
    File("test_cuda_multigpu.py", gpus=2),
    File("test_cuda_primary_ctx.py", gpus=2, group=1),
    File("test_cuda_trace.py"),
    File("test_cuda_sanitizer.py"),
    File("test_cuda_nvml_based_avail.py", group=1),
    File("distributed/_tools/test_memory_tracker.py"),
    File("distributed/_tools/test_mem_tracker.py"),
    File("distributed/_tools/test_fsdp2_mem_tracker.py", gpus=2),
    File("distributed/_composable/fsdp/test_fully_shard_memory.py", gpus=2),
    File("distributed/fsdp/test_fsdp_memory.py", gpus=2),
)


REASONS = read_toml(Path(__file__).with_suffix(".toml"))


class Outcome(NamedTuple):
    """The outcome of a test."""

    word: str
    """passed, failed, skipped, ended its process, timed out"""
    message: str = ""


def main() -> int:
    """Run the files; return 1 if a failure has no class."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--file", action="append", help="of these alone")
    parser.add_argument("--test", action="append", help="Class.test: of these alone")
    parser.add_argument("--card", default="H100")
    arguments = parser.parse_args()
    sources = arguments.folder.parent / "version.txt"
    print(
        f"tests of PyTorch {sources.read_text().strip() if sources.exists() else 'unknown'}, "
        f"torch {version('torch')}, Python {sys.version.split()[0]}, "
        f"{arguments.card}"
    )
    unclassed = 0
    for file in FILES:
        if arguments.file is None or file.path in arguments.file:
            began = time.monotonic()
            outcomes = Runner(file, arguments).outcomes(arguments.test)
            lines, without = report(file, outcomes)
            unclassed += without
            print(*lines, f"  ({time.monotonic() - began:.0f} s)", sep="\n", flush=True)
    return 1 if unclassed else 0


class Runner:
    """Runs the tests of a file."""

    def __init__(self, file: File, arguments: argparse.Namespace) -> None:
        self.file = file
        self.folder = Path(arguments.folder).resolve()
        self.options = [
            *("--device", "virtual", "--card", arguments.card, "--devices", str(file.gpus)),
        ]

    def outcomes(self, only: list[str] | None) -> dict[str, Outcome]:
        """Return the outcome of each test by its name, ``Class.test``.

        A test that fails with values within the default budget runs again with all values.
        """
        names = [name for name in self.names() if only is None or name in only]
        found: dict[str, Outcome] = {}
        size = self.file.group
        for first in range(0, len(names), size):
            found.update(self.group(names[first : first + size]))
        left = [name for name in names if found[name].word not in ENDS]
        for first in range(0, len(left), size):
            for name, end in self.group(left[first : first + size], "full").items():
                message = found[name].message if end.word == "passed" else end.message
                found[name] = Outcome(AGAIN if end.word == "passed" else end.word, message)
        return {name: found[name] for name in names}

    def group(self, names: list[str], values: str = "auto") -> dict[str, Outcome]:
        """Return the outcomes of a few tests, from one process, or more if it ends early."""
        if not names:
            return {}
        results, output = self.run(names, values)
        if not results:
            results, last = ended(output)
            at = names.index(last) if last in names else 0
            for part in ([n for n in names[:at] if n not in results], [names[at]], names[at + 1 :]):
                results.update(self.group(part, values))
        return {name: results.get(name, Outcome("failed", "no result")) for name in names}

    def names(self) -> list[str]:
        """Return the names of the file's tests, as PyTorch's own runner lists them."""
        output, _ = self.call(["--discover-tests"], 600)
        names = [line for line in output.splitlines() if re.fullmatch(r"\w+\.test\w+", line)]
        if not names:
            print(f"{self.file.path}: no tests found", *output.splitlines()[-15:], sep="\n  | ")
        return names

    def run(self, names: list[str], values: str) -> tuple[dict[str, Outcome], str]:
        """Run tests in one process; return the outcomes ({} if it crashed) and its output."""
        with tempfile.TemporaryDirectory() as folder:
            options = [f"--save-xml={folder}", "-v", *names]
            limit_s = ALONE_S if len(names) == 1 else self.file.hangs_s
            output, status = self.call(options, limit_s, values)
            reports = [*Path(folder).rglob("*.xml")]
            results: dict[str, Outcome] = {}
            for name, outcome in (row for report in reports for row in read(report)):
                if name not in results or outcome.word == "failed":  # subtests have one each
                    results[name] = outcome
            if status not in {0, 1}:  # it crashed after its last test
                results = {}
        if len(names) == 1 and not results:
            lines = output.strip().splitlines() or [""]
            word = "timed out" if status is None else "ended its process"
            results[names[0]] = Outcome(word, f"exit status {status}: {lines[-1]}")
        return results, output

    def call(
        self, arguments: list[str], limit_s: float, values: str = "auto"
    ) -> tuple[str, int | None]:
        """Run the file; return its output and exit status, None if it took too long."""
        path = self.folder / self.file.path
        paths = [str(Path.cwd()), str(self.folder), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest_gpumem", "run", *self.options, "--values", values),
                *(path.name, *arguments),
            ],
            cwd=path.parent,
            env={
                **os.environ,
                **dict(self.file.settings),
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return output, None
        return output, process.returncode


def ended(output: str) -> tuple[dict[str, Outcome], str]:
    """Return the outcomes of passed and skipped tests in the output, and the last test begun."""
    results, name = {}, ""
    for line in output.splitlines():
        if began := re.match(r"  (test\w+) \(__main__\.(\w+)\.", line):
            name = f"{began[2]}.{began[1]}"
        if name and (end := re.search(r"\b(ok|skip: (.*)) \([0-9.]+s\)$", line)):
            results[name] = Outcome("skipped", end[2]) if end[2] else Outcome("passed")
    return results, name


def read(report: Path) -> list[tuple[str, Outcome]]:
    """Return the outcomes in a report of unittest-xml-reporting."""
    results = []
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - our own process'
        test = (case.get("name") or "").split(" ")[0]  # without a subtest's values
        name = f"{(case.get('classname') or '').rsplit('.', 1)[-1]}.{test}"
        child = next(
            (child for child in case if child.tag in {"failure", "error", "skipped"}), None
        )
        if child is None:
            results.append((name, Outcome("passed")))
        else:
            message = re.split(r"\n|  To execute|  Expected", child.get("message") or "")[0].strip()
            kind = "" if child.tag == "skipped" else f"{child.get('type')}: "
            word = "skipped" if child.tag == "skipped" else "failed"
            results.append((name, Outcome(word, kind + message)))
    return results


def report(file: File, outcomes: dict[str, Outcome]) -> tuple[list[str], int]:
    """Return lines on a file, and the number of its failures without a class."""
    counts = Counter(outcome.word for outcome in outcomes.values())
    words = ", ".join(f"{number} {word}" for word, number in counts.most_common())
    lines = [f"{file.path}: {len(outcomes)} tests: {words or 'none ran'}"]
    skipped = Counter(o.message[:100] for o in outcomes.values() if o.word == "skipped")
    lines += [f"  skipped, {number}: {why}" for why, number in skipped.most_common()]
    lines += [f"  {AGAIN}: {n}: {o.message[:100]}" for n, o in outcomes.items() if o.word == AGAIN]
    without = 0
    for name, outcome in outcomes.items():
        if outcome.word not in {*ENDS, AGAIN}:
            reason = reason_of(file.path, name)
            without += reason is None
            label = f"class {reason['class']}" if reason else "NO CLASS"
            lines.append(f"  {outcome.word}, {label}: {name}: {outcome.message[:100]}")
            if reason:
                lines.append(f"    {REASONS['classes'][reason['class']]}: {reason['why']}")
    return lines, without


def reason_of(path: str, name: str) -> dict[str, str] | None:
    """Return the recorded reason why a test fails, or None."""
    path = path.replace("_expandable_segments", "")  # the same tests, with another setting
    for reason in REASONS["reasons"]:
        if any(file == path and fnmatchcase(name, pattern) for file, pattern in reason["tests"]):
            return reason
    return None


if __name__ == "__main__":
    sys.exit(main())
