"""What many machines bring together costs: reports that are merged, a history, a large folder.

    python -m benchmarks.scale.machines [--parts merge history start] [--repeats 3]

Each figure is of a process of its own: the processor's seconds of the user, the seconds on the
clock, the most memory that the process had. The suites are made up, no two tests with one figure.

- merge: the reports of 64 shards as one page, one comment, one file; one test in a hundred failed,
  and has where its peak comes from.
- history: commits that each change one test of a suite of 1,000 in 50 files.
- start: sessions of ten tests beside the baselines of so many others, less that of none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import ROOT, line, publish, table

sys.path.insert(0, str(ROOT / "tests"))
from helpers.sample_report import T4, attribution, entry, many

from pytest_gpumem.baselines.file_format import BaselineFile, encode
from pytest_gpumem.baselines.paths import baseline_path
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.measurement import Peak
from pytest_gpumem.report.json_report import json_lines
from pytest_gpumem.report.model import Origin, Report, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import BaselineEntry

SHARDS = 64
RESULTS = (1_000, 10_000, 100_000)
COMMITS = (50, 500, 5_000)
TESTS = (500, 5_000, 50_000)
MODULES, PER_MODULE = 50, 20
"""of the suite with a history"""
PER_FILE = 100
"""tests of a file of the large folder"""
TEN = 10
BLOCK = 512
"""bytes: PyTorch's allocator serves multiples of it"""
AIMS = (
    "aims: 100,000 results merged in 60 s and 2 GiB, 5,000 commits read in 20 s, a session of ten "
    "tests beside 50,000 within 0.2 s of one beside none"
)
GPUMEM = (sys.executable, "-m", "pytest_gpumem")


class Took(NamedTuple):
    """What a process took."""

    wall: float
    """seconds"""
    user: float
    """seconds of the processor"""
    mib: float
    """the most memory"""

    @property
    def cells(self) -> list[str]:
        """The cells of a table."""
        return [f"{self.user:.2f}", f"{self.wall:.2f}", f"{self.mib:.0f}"]


MEASURED = """
import os, resource, subprocess, sys, time
began = time.perf_counter()
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(status, time.perf_counter() - began, used.ru_utime, used.ru_maxrss / 1024)
"""


def took(*command: str, folder: Path) -> Took:
    """Run a command in a folder; return what it took, with the processes that it started."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", MEASURED, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    status, *figures = done.stdout.split()
    if status != "0":
        raise RuntimeError(done.stderr)
    return Took(*map(float, figures))


def medians(all_took: list[Took]) -> Took:
    """Return the median of each figure."""
    return Took(*map(statistics.median, zip(*all_took, strict=True)))


# -- reports of shards --


def varied(result: Result, by: int) -> Result:
    """Return a result with figures of its own."""
    measurement, known = result.measurement, result.baseline_entry
    assert measurement is not None
    assert known is not None
    attributions = measurement.attributions if result.verdict.kind is Kind.REGRESSED else ()
    peaks = tuple(Peak(peak.allocated + by, peak.reserved + by) for peak in measurement.peaks)
    rows = tuple(
        replace(row, measured=row.measured + by, baseline=(row.baseline or 0) + by)
        for row in result.verdict.comparisons
    )
    return replace(
        result,
        measurement=replace(measurement, peaks=peaks, attributions=attributions),
        baseline_entry=moved(known, by),
        verdict=replace(result.verdict, comparisons=rows),
    )


def moved(known: BaselineEntry, by: int) -> BaselineEntry:
    """Return a baseline with so many bytes more, at each of its lines."""
    breakdowns = tuple(
        replace(
            breakdown,
            sites=tuple(replace(site, nbytes=site.nbytes + by) for site in breakdown.sites),
        )
        for breakdown in known.breakdowns
    )
    peaks = tuple(Peak(peak.allocated + by, peak.reserved + by) for peak in known.peaks)
    return replace(known, peaks=peaks, breakdowns=breakdowns)


def write_shards(folder: Path, number: int) -> list[str]:
    """Write the reports of a suite of so many tests; return their names."""
    results = many(number, attributed=number)
    names = []
    for index in range(SHARDS):
        mine = range(index, number, SHARDS)
        own = tuple(varied(results[place], BLOCK * place) for place in mine)
        origin = Origin(commit="a" * 40, shard=Shard(index + 1, SHARDS))
        report = Report(own, device="virtual T4", origins=(origin,))
        names.append(f"{index + 1}.json")
        with (folder / names[-1]).open("w", encoding="utf-8") as stream:
            stream.writelines(json_lines(report, created="2026-11-23T10:00:00Z"))
    return names


def merge(folder: Path, _repeats: int) -> list[str]:
    """Return the table of merged reports."""
    rows = []
    for number in RESULTS:
        names = write_shards(folder, number)
        size = sum((folder / name).stat().st_size for name in names) / 1e6
        outputs = [f"--{kind}=all.{kind}" for kind in ("html", "json", "markdown")]
        whole = took(*GPUMEM, "report", *names, *outputs, folder=folder)
        rows.append([f"{number:,}", f"{size:.0f}", *whole.cells])
    heads = ["results", "MB of reports", "s of the user", "s", "peak MiB"]
    head = f"gpumem report of {SHARDS} reports: --html, --json and --markdown in one process"
    return [head, table(rows, heads, "r")]


# -- the history of baselines --


def suite_files() -> list[BaselineFile]:
    """Return the baselines of the suite with a history."""
    known = entry(attribution(layers=4))
    known = replace(
        known, breakdowns=tuple(replace(it, sites=it.sites[:10]) for it in known.breakdowns)
    )
    numbers = iter(range(MODULES * PER_MODULE))
    return [
        BaselineFile(
            T4,
            f"tests/test_{module}.py",
            {f"test_step[{test}]": {"": moved(known, BLOCK * next(numbers))} for test in range(20)},
        )
        for module in range(MODULES)
    ]


def fast_import(number: int) -> Iterator[bytes]:
    """Yield what git fast-import reads: commits of baselines, each of which changed one test."""
    files = suite_files()
    for index in range(number):
        yield b"commit refs/heads/main\n"
        yield f"committer A <a@example.org> {1_700_000_000 + 60 * index} +0000\n".encode()
        yield b"data 6\nchange\n"
        changed = files if index == 0 else [files[index * 7 % MODULES]]
        if index:
            tests = changed[0].tests
            name = f"test_step[{index * 3 % PER_MODULE}]"
            tests[name] = {"": moved(tests[name][""], (index % 7 + 1) << 20)}
        for file in changed:
            path = baseline_path(Path("baselines"), T4.key, file.module)
            content = encode(file)
            yield f"M 100644 inline {path}\ndata {len(content)}\n".encode() + content + b"\n"


def history(folder: Path, repeats: int) -> list[str]:
    """Return the table of histories."""
    asked = {
        "all, as a table": (),
        "all, as a page": ("--html=page.html",),
        "one test": ("tests/test_7.py::test_step[3]",),
    }
    rows = []
    for number in COMMITS:
        place = folder / f"{number}"
        git = ("git", "-C", str(place))
        subprocess.run(["git", "init", "-q", "-b", "main", str(place)], check=True)
        with subprocess.Popen([*git, "fast-import", "--quiet"], stdin=subprocess.PIPE) as importing:
            assert importing.stdin is not None
            importing.stdin.writelines(fast_import(number))
        subprocess.run([*git, "reset", "-q", "--hard"], check=True)
        for name, words in asked.items():
            command = (*GPUMEM, "history", f"--commits={number}", *words)
            runs = [took(*command, folder=place) for _ in range(repeats)]
            rows.append([f"{number:,}", name, *medians(runs).cells])
        shutil.rmtree(place)
    heads = ["commits", "gpumem history of", "s of the user", "s", "peak MiB"]
    head = f"gpumem history of {MODULES * PER_MODULE:,} tests in {MODULES} files"
    return [head, table(rows, heads, "r")]


# -- a session beside a large folder --

STEPS = """
import pytest, torch

@pytest.mark.gpu_memory(card="T4")
@pytest.mark.parametrize("number", range(10))
def test_step(number):
    torch.empty((number + 1) << 20, dtype=torch.uint8, device="cuda")
"""
FORKED = """
import contextlib, os, sys
import pytest

def session(*arguments):
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return pytest.main([*arguments])

session("--collect-only", "--gpumem-device=virtual", "tests/test_ten.py")  # which imports torch
for _ in range(int(sys.argv[1])):
    process = os.fork()
    if not process:
        os._exit(session(*sys.argv[2:]))
    _, status, used = os.wait4(process, 0)
    assert status == 0
    print(used.ru_utime)
"""
"""sessions of pytest in forks of a process that has imported torch, which takes longer than they"""


def sessions_took(folder: Path, repeats: int, *words: str) -> float:
    """Return the median of the processor's seconds that a session takes, torch's import aside."""
    options = ("-q", "-p", "no:cacheprovider", "--gpumem-device=virtual", *words)
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(repeats), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return statistics.median(map(float, done.stdout.split()))


def start(folder: Path, repeats: int) -> list[str]:
    """Return the table of sessions."""
    (folder / "tests").mkdir()
    (folder / "tests/test_ten.py").write_text(STEPS, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n", encoding="utf-8")
    sessions = {
        "ten named tests": ("tests/test_ten.py",),
        "ten named tests, with a JSON report": ("tests/test_ten.py", "--gpumem-json=r.json"),
        "all tests, stale baselines named": ("--gpumem-stale=note",),
    }
    known = suite_files()[0].tests["test_step[0]"]
    rows = []
    beside_none: dict[str, float] = {}
    sessions_took(folder, 1, "--gpumem-update-baselines")  # the ten's own
    files = [f"tests/test_{index}.py" for index in range(TESTS[-1] // PER_FILE)]
    for module in files:
        (folder / module).touch()
    for number in (0, *TESTS):
        for module in files[: number // PER_FILE]:
            names = (f"test_step[{test}]" for test in range(PER_FILE))
            file = BaselineFile(T4, module, dict.fromkeys(names, known))
            path = baseline_path(folder / "baselines", T4.key, module)
            if not path.exists():
                path.write_bytes(encode(file))
        for name, words in sessions.items():
            seconds = sessions_took(folder, 3 * repeats, *words)
            more = seconds - beside_none.setdefault(name, seconds)
            rows.append([f"{number:,}", name, f"{seconds:.2f}", f"{more:+.2f}" if number else ""])
    heads = ["baselines", "session", "s of the user", "more than beside none"]
    head = f"sessions of {TEN} tests; the other baselines' files of tests are there, and empty"
    return [head, table(rows, heads, "r")]


PARTS = {"merge": merge, "history": history, "start": start}


def main() -> None:
    """Measure, print, and keep what was measured as a whole."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    wanted = parser.parse_args()
    for part in wanted.parts:
        with tempfile.TemporaryDirectory() as name:
            text = [
                f"{AIMS}; processes of their own, medians of {wanted.repeats} (merges run once)",
                line("msgspec", "jinja2"),
                f"load when measured: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
                "",
                *PARTS[part](Path(name), wanted.repeats),
            ]
        publish(f"scale_{part}", "\n".join(text))


if __name__ == "__main__":
    main()
