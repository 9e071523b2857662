"""Suites of other libraries, unmodified but for one line: ``gpumem_all = true``.

    git clone https://github.com/kornia/kornia
    git clone https://github.com/huggingface/pytorch-image-models timm
    git clone https://github.com/KevinMusgrave/pytorch-metric-learning
    python -m benchmarks.ecosystem.held_suite --python ENV/bin/python kornia=kornia \
        kornia-filters=kornia timm=timm pytorch-metric-learning=pytorch-metric-learning

ENV has the libraries' requirements, pytest and this package. A part of each library's suite runs on
a copy of its folder: on the CPU without this package (its own time), with the line but without
baselines, recording baselines, and compared with them. Then a growth is planted in the library, a
buffer of 4 MiB, and the suite runs again. Runs on the CPU and compared runs alternate. Times are
CPU seconds of the whole command in user mode. Tests that pass on the CPU and fail with the line are
named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from benchmarks.harness import line, publish, read_toml

MAX_RATIO = 1.3
"""a suite with the line may take this many times its time on the CPU"""


LINE = "gpumem_all = true"
Library = dict[str, Any]
"""a library and a part of its suite: held_suite.toml explains the fields"""


class Outcome(NamedTuple):
    """A run of the suite."""

    seconds: float
    """CPU seconds in user mode"""
    counts: str
    """pytest's counts of passed and failed tests, as text"""
    output: str


class Suite:
    """A library's folder, and the runs of its tests.

    Args:
        folder: a copy that may be changed.
        library: the library.
        python: an interpreter with the library's requirements.
    """

    def __init__(self, folder: Path, library: Library, python: Path) -> None:
        self.folder, self.library, self.python = folder, library, python
        self.settings = folder / library["settings"]
        if not self.settings.exists():
            self.settings.write_text(f"{library['head']}\n", encoding="utf-8")

    def run(self, *options: str, cpu: bool = False) -> Outcome:
        """Run the tests."""
        environment = {name: value for name, value in os.environ.items() if name != "CI"}
        environment[self.library["variable"]] = "cpu" if cpu else "cuda"
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.folder), "COLUMNS": "200"}
        command = [str(self.python), "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
        command += ["-k", self.library["select"]] if self.library["select"] else []
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run(
            [*command, *options, *self.library["tests"]],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        found = re.findall(r"^=* ?(\d+ .*?) in [\d.]+s", done.stdout, re.MULTILINE)
        if not found:
            raise SystemExit(done.stdout[-3000:])
        print(f"{seconds:.1f} s: {options} {found[-1]}", file=sys.stderr, flush=True)
        counts = re.sub(r", \d+ (?:warnings?|deselected)", "", found[-1])
        return Outcome(seconds, counts, done.stdout)

    def add_the_line(self) -> None:
        """Add ``gpumem_all = true`` to the suite's settings."""
        text = self.settings.read_text(encoding="utf-8")
        head = self.library["head"]
        assert text.count(head) == 1
        self.settings.write_text(text.replace(head, f"{head}\n{LINE}"), encoding="utf-8")

    def plant(self) -> int:
        """Plant the growth in the library; return the number of its line."""
        path = self.folder / self.library["grown"]
        text = path.read_text(encoding="utf-8")
        place = text.index(self.library["before"])
        grown = f"{text[:place]}{self.library['growth']}\n{text[place:]}"
        path.write_text(grown, encoding="utf-8")
        return text[:place].count("\n") + 1

    def baselines(self) -> int:
        """Return the number of tests that have a baseline."""
        files = (self.folder / "baselines").rglob("*.json")
        return sum(len(json.loads(path.read_text("utf-8"))["tests"]) for path in files)


def failed(run: Outcome) -> set[str]:
    """Return the node ids of the tests that failed."""
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", run.output, re.MULTILINE))


def held(suite: Suite, rounds: int) -> tuple[list[list[str]], list[str]]:
    """Run a suite in all ways; return the rows of its table, and sentences."""
    own = [suite.run("-p", "no:gpumem", cpu=True)]
    suite.add_the_line()
    first = suite.run()
    recorded = suite.run("--gpumem-update-baselines")
    compared = [suite.run()]
    for _ in range(rounds - 1):
        own.append(suite.run("-p", "no:gpumem", cpu=True))
        compared.append(suite.run())
    of_own, of_compared = (
        statistics.median(run.seconds for run in runs) for runs in (own, compared)
    )
    planted = suite.plant()
    grown = suite.run()
    rows = [
        ["on the CPU, without this package", own[-1]._replace(seconds=of_own)],
        ["with the line, no baselines", first],
        ["recording baselines", recorded],
        ["compared with them", compared[-1]._replace(seconds=of_compared)],
        ["with the growth", grown],
    ]
    table = [
        [name, f"{run.seconds:.1f}", f"{run.seconds / of_own:.2f}", run.counts]
        for name, run in rows
    ]
    regressed = re.search(r"^gpumem: .*?(\d+) regressed", grown.output, re.MULTILINE)
    place = f"{suite.library['grown'].removeprefix('src/')}:{planted}"
    caught = int(regressed[1]) if regressed else 0
    named = place in grown.output
    ratio = of_compared / of_own
    within = "within" if ratio <= MAX_RATIO else "beyond"
    sentences = [
        f"{suite.baselines()} tests have a baseline.",
        f"The growth: {caught} tests regressed; {place} is {'' if named else 'not '}named.",
        f"Compared, it takes {ratio:.2f} times its own time, {within} the {MAX_RATIO:g}.",
    ]
    for test in sorted(failed(compared[-1]) - failed(own[-1])):
        known = suite.library.get("reasons", {})
        reasons = [why for part, why in known.items() if part in test]
        sentences.append(f"Fails: {test}: {'; '.join(reasons) or 'the reason is not known'}")
    return table, sentences


def main() -> None:
    """Run the suites named on the command line, and print their tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", metavar="LIBRARY=FOLDER")
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    libraries = read_toml(Path(__file__).with_suffix(".toml"))
    text = [line("torch", "pytest")]
    for word in arguments.folders:
        name, _, folder = word.partition("=")
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place, name)
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".git", "baselines"))
            python = arguments.python.absolute()
            suite = Suite(copy, libraries[name], python)
            table, sentences = held(suite, arguments.rounds)
        drawn = tabulate(
            table, ["run", "user s", "of own", "outcome"], disable_numparse=True, stralign="right"
        )
        library = libraries[name]
        tests = " ".join(
            [*library["tests"], *([f"-k '{library['select']}'"] if library["select"] else [])]
        )
        text += ["", f"{name}: {tests}", "", drawn, "", *sentences]
    load = os.getloadavg()[0]
    text += [
        "",
        f"Medians of {arguments.rounds} runs, own and compared. Load: {load:.0f}.",
    ]
    head = "Suites of other libraries, held by one line (gpumem_all = true)"
    publish("held_suite", "\n".join([head, *text]))


if __name__ == "__main__":
    main()
