"""What ten thousand marked tests with baselines cost, beside pytest-benchmark and syrupy.

    python benchmarks/scale.py [--counts 1000 3000 10000] [--repeats 3]

Suites of tests that allocate one tensor each, in modules of a hundred, are run as sessions of
pytest, no other plugin loaded. The plugin's share is the processor's time of a session whose tests
are marked, less that of the same tests unmarked and without the plugin, over their number: hooks,
device, measurement, judging, summary and, where asked for, the update, all of it. Of this, the
calls that are the measurement itself (Python's collector, synchronising, the allocator's
statistics, caps and cache) are timed one by one in sessions of their own. pytest-benchmark and
syrupy, where they are installed, run as many tests of theirs: a round of nothing, and a text that
is compared with its snapshot; likewise less the same tests without them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from html_page import ROOT, shown
from provenance import line, publish
from tabulate import tabulate

sys.path.insert(0, str(ROOT / "tests"))
from sample_report import many

from pytest_gpumem.baseline import BaselineStore
from pytest_gpumem.gathering import Gathering
from pytest_gpumem.records import Peak
from pytest_gpumem.report.html import MOST_DRAWN, MOST_EXPLAINED, page
from pytest_gpumem.report.json_report import dumps
from pytest_gpumem.report.markdown import markdown
from pytest_gpumem.report.model import Report
from pytest_gpumem.report.table import summary_table
from pytest_gpumem.report.toolchain import lead_lines
from pytest_gpumem.report.wire import to_dict

MIB = 1 << 18
"""elements of a tensor of float32"""
if TYPE_CHECKING:
    from collections.abc import Callable

PER_MODULE = 100
PLUGINS = {it.name for it in entry_points(group="pytest11")}
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

HEAD = "import os\n\nimport pytest\nimport torch\n\nFACTOR = int(os.environ.get('FACTOR', '1'))\n"
MARK = "pytestmark = pytest.mark.gpu_memory\n"
STEP = "\n\ndef test_{0}():\n    torch.empty({1} * FACTOR, device='cuda')\n"
PLAIN = "\n\ndef test_{0}():\n    nothing()\n"
BENCHMARK = (
    "\n\ndef test_{0}(benchmark):\n    benchmark.pedantic(nothing, rounds=1, iterations=1)\n"
)
SNAPSHOT = "\n\ndef test_{0}(snapshot):\n    nothing()\n    assert snapshot == 'text {0}'\n"
NOTHING = "def nothing():\n    pass\n"
MARKED = (f"{HEAD}{MARK}", STEP)
VIRTUAL = "import pytest_gpumem\n\npytest_gpumem.use_virtual_gpu()\n"
"""conftest of unmarked tests, which need a GPU as well"""

CLOCK = '''
"""Times, of the processor: the calls that measuring consists of, the summary, the update."""

import gc
import json
import time
from collections import defaultdict

import pytest

spent, calls = defaultdict(float), defaultdict(int)


def timed(owner, name, key):
    function = getattr(owner, name)

    def called(*args, **more):
        began = time.thread_time()
        try:
            return function(*args, **more)
        finally:
            spent[key] += time.thread_time() - began
            calls[key] += 1

    if hasattr(function, "unwatched"):
        called.unwatched = function.unwatched
    setattr(owner, name, called)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    from pytest_gpumem.session import TestSession

    timed(TestSession, "summary", "summary")
    timed(TestSession, "update_baselines", "update")
    import torch

    for name in ("collect", "freeze", "unfreeze"):
        timed(gc, name, "garbage collection")
    timed(torch.cuda, "synchronize", "synchronising")
    timed(torch._C, "_cuda_clearCublasWorkspaces", "releasing caches")
    timed(torch.cuda, "empty_cache", "releasing caches")
    timed(torch._C, "_cuda_memoryStats", "the allocator's statistics")
    timed(torch._C, "_cuda_resetPeakMemoryStats", "the allocator's statistics")
    timed(torch.cuda, "memory_snapshot", "the allocator's statistics")
    timed(torch.cuda, "set_per_process_memory_fraction", "caps")
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):
        timed(torch.cuda, "get_per_process_memory_fraction", "caps")


def pytest_unconfigure():
    with open("clock.json", "w") as stream:
        json.dump([spent, calls], stream)
'''
AIMS = "aims: a test under 1 ms, summary and update under 2 s"


class Suite(NamedTuple):
    """Tests in a folder, and how pytest is to run them."""

    folder: Path
    number: int
    plugin: str
    """the only one that is loaded, "" for none"""


class Took(NamedTuple):
    """What a session took."""

    seconds: float
    """of the processor, in the user's and the system's mode"""
    clock: dict[str, float]
    """seconds, likewise, of what the clock had an eye on"""


def suite(root: Path, name: str, number: int, text: tuple[str, str], plugin: str = "") -> Suite:
    """Write a suite; ``text`` is the head of its modules and a test."""
    head, test = text
    folder = root / f"{name}-{number}"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "scale_clock.py").write_text(CLOCK, encoding="utf-8")
    for first in range(0, number, PER_MODULE):
        tests = (test.format(it, MIB * (it + 1)) for it in range(min(PER_MODULE, number - first)))
        path = folder / f"test_{first // PER_MODULE}.py"
        path.write_text(f"{head}{''.join(tests)}", encoding="utf-8")
    return Suite(folder, number, plugin)


def run(suite: Suite, *options: str, status: int = 0, factor: int = 1) -> Took:
    """Run a suite in a session of its own."""
    blocked = [word for name in PLUGINS - {suite.plugin} for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**ENVIRONMENT, "FACTOR": str(factor)}
    with (suite.folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, *blocked, *options],
            cwd=suite.folder,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        _, ended, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(ended)
    text = (suite.folder / "said").read_text(encoding="utf-8")
    assert process.returncode == status, text[-3000:]
    clock = suite.folder / "clock.json"
    spent = json.loads(clock.read_text(encoding="utf-8"))[0] if clock.exists() else {}
    clock.unlink(missing_ok=True)
    return Took(usage.ru_utime + usage.ru_stime, spent)


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def share(suites: tuple[Suite, Suite], repeats: int) -> tuple[float, dict[str, float], list[float]]:
    """Return the plugin's share of a test, in ms: of all, by kind of inherent call; the range."""
    marked, plain = suites
    different, inherent = [], defaultdict(list)
    for _ in range(repeats):
        pair = run(marked).seconds - run(plain).seconds
        different.append(1000 * pair / marked.number)
        clock = run(marked, "-p", "scale_clock").clock
        for key, seconds in clock.items():
            inherent[key].append(1000 * seconds / marked.number)
    parts = {key: median(values) for key, values in inherent.items() if key != "summary"}
    return median(different), parts, [min(different), max(different)]


def shares(root: Path, counts: list[int], repeats: int) -> list[str]:
    """Return the table of the plugin's share."""
    rows, parts = [], {}
    for number in counts:
        marked = suite(root, "marked", number, MARKED, "gpumem")
        plain = suite(root, "plain", number, (HEAD, STEP))
        (plain.folder / "conftest.py").write_text(VIRTUAL, encoding="utf-8")
        run(plain)
        run(marked, "--gpumem-update-baselines")
        whole, parts, ends = share((marked, plain), repeats)
        inherent = sum(parts.values())
        spread = f"{ends[0]:.2f} to {ends[1]:.2f}"
        rows.append([f"{number}", f"{whole:.2f}", spread, f"{inherent:.2f}"])
        rows[-1].append(f"{whole - inherent:.2f}")
        shutil.rmtree(plain.folder)
    heads = ["tests", "ms a test", "of the repeats", "the measurement itself", "the rest"]
    table = tabulate(rows, heads, disable_numparse=True, stralign="right")
    named = sorted(parts.items(), key=lambda it: -it[1])
    text = ", ".join(f"{key} {value:.3f}" for key, value in named)
    return [table, "", f"The measurement itself, of {counts[-1]} tests, ms a test: {text}."]


MODES = {
    "baselines all new": (("--gpumem-update-baselines",), 0, 1),
    "baselines unchanged": (("--gpumem-update-baselines",), 0, 1),
    "baselines all changed": (("--gpumem-update-baselines",), 0, 3),
    "all within": ((), 0, 3),
    "all regressed": (("--gpumem-attribution=off", "--tb=no", "-rN"), 1, 5),
}
"""options, pytest's exit status and the factor of the tensors' sizes, one after the other"""


def ends(root: Path, number: int, repeats: int) -> list[str]:
    """Return the table of summaries and updates."""
    rows = []
    clock = ("-p", "scale_clock")
    for layout, per_module in (("modules of 100", PER_MODULE), ("one module", number)):
        found: dict[str, list[Took]] = defaultdict(list)
        for repeat in range(repeats):
            made = suite(root, f"{per_module}-{repeat}", number, MARKED, "gpumem")
            if per_module != PER_MODULE:
                in_one_module(made)
            for name, (options, status, factor) in MODES.items():
                found[name].append(run(made, *options, *clock, status=status, factor=factor))
            shutil.rmtree(made.folder)
        for name, runs in found.items():
            said = {key: [it.clock.get(key) for it in runs] for key in ("update", "summary")}
            cells = ["" if None in its else f"{median(its):.2f}" for its in said.values()]
            rows.append([layout, name, *cells])
    heads = ["tests", "session", "update, s", "summary, s"]
    return [tabulate(rows, heads, disable_numparse=True)]


def in_one_module(made: Suite) -> None:
    """Put all tests into one module."""
    for path in made.folder.glob("test_*.py"):
        path.unlink()
    tests = (STEP.format(it, MIB * (it % PER_MODULE + 1)) for it in range(made.number))
    text = f"{HEAD}{MARK}{''.join(tests)}"
    (made.folder / "test_all.py").write_text(text, encoding="utf-8")


PEERS = {
    "benchmark": (
        "pytest-benchmark",
        BENCHMARK,
        ("--benchmark-save=base",),
        ("--benchmark-compare", "--benchmark-compare-fail=mean:1000000%"),
    ),
    "syrupy": ("syrupy", SNAPSHOT, ("--snapshot-update",), ()),
}


def peers(root: Path, number: int, repeats: int, own: list[list[str]]) -> list[str]:
    """Return the table of what others take."""
    plain = suite(root, "nothing", number, (NOTHING, PLAIN))
    without = [run(plain).seconds for _ in range(repeats + 1)][1:]
    rows = [*own]
    for module, (name, test, first, then) in PEERS.items():
        if find_spec(name.replace("-", "_")) is None:
            rows.append([name, "not installed", ""])
            continue
        made = suite(root, name, number, (NOTHING, test), module)
        cells = []
        for options in (first, then):
            took = [run(made, *options).seconds for _ in range(repeats)]
            each = [1000 * (a - b) / number for a, b in zip(took, without, strict=True)]
            cells.append(f"{median(each):.2f}")
        rows.append([name, *cells])
    heads = ["", "record, ms a test", "compare, ms a test"]
    return [tabulate(rows, heads, disable_numparse=True)]


def pages(number: int) -> list[str]:
    """Return the table of HTML pages."""
    page(Report(tuple(many(1, attributed=1))))  # imports, and the first drawing
    rows = []
    for attributed in (0, number):
        report = Report(tuple(many(number, attributed=attributed)))
        took = []
        for _ in range(2):
            began = time.process_time()
            text = page(report)
            took.append(time.process_time() - began)
        size = f"{len(text.encode()) / 1e6:.2f}"
        kind = "with attributions" if attributed else "without"
        rows.append([kind, f"{min(took):.2f}", size, *shown(text)])
    heads = ["page", "s to make", "MB", "s until ready", "elements"]
    return [
        tabulate(rows, heads, disable_numparse=True),
        f"{MOST_DRAWN} timelines are drawn, {MOST_EXPLAINED} breakdowns shown, failures first.",
    ]


def made_up(number: int) -> list[str]:
    """Return the table of what a session ends with, of results that are made up."""
    gather = Gathering()
    for result in many(number, attributed=number):
        gather.add(result.nodeid, "setup", passed=True, data=None)
        gather.add(result.nodeid, "call", passed=True, data=[to_dict(result)])
        gather.add(result.nodeid, "teardown", passed=True, data=None)
    results = gather.results()
    changes = gather.changes()
    peak = Peak(1 << 40, 1 << 40)
    moved = [replace(it, parts={"": replace(it.parts[""], peaks=(peak,))}) for it in changes]
    report = Report(tuple(results))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work: dict[str, Callable[[], object]] = {
            "the table, as always": lambda: summary_table(results, 0, 80),
            "the table with -vv": lambda: summary_table(results, 2, 80),
            "what moved together": lambda: lead_lines(results, 80),
            "baselines, all new": lambda: BaselineStore(folder).update(changes),
            "baselines, unchanged": lambda: BaselineStore(folder).update(changes),
            "baselines, all changed": lambda: BaselineStore(folder).update(moved),
            "JSON report": lambda: dumps(report, created=""),
            "Markdown report": lambda: markdown(report),
        }
        rows = []
        for what, function in work.items():
            began = time.process_time()
            function()
            rows.append([what, f"{time.process_time() - began:.2f}"])
    heads = [f"{number} results with attributions", "s"]
    return [tabulate(rows, heads, disable_numparse=True)]


def own_sessions(root: Path, number: int, repeats: int) -> list[list[str]]:
    """Return what recording and comparing takes with this plugin, as for the others."""
    marked = suite(root, "marked", number, MARKED, "gpumem")
    plain = suite(root, "plain", number, (HEAD, STEP))
    (plain.folder / "conftest.py").write_text(VIRTUAL, encoding="utf-8")
    without = [run(plain).seconds for _ in range(repeats + 1)][1:]
    cells = []
    for options in (("--gpumem-update-baselines",), ("--gpumem-attribution=off",)):
        took = []
        for _ in range(repeats):
            if "update" in options[0]:
                shutil.rmtree(marked.folder / "gpumem-baselines", ignore_errors=True)
            took.append(run(marked, *options).seconds)
        each = [1000 * (a - b) / number for a, b in zip(took, without, strict=True)]
        cells.append(f"{median(each):.2f}")
    return [["pytest-gpumem", *cells]]


PARTS = {
    "share": "The plugin's share: sessions with marked tests, less the same unmarked without it",
    "ends": "The end of a session",
    "others": "Beside others",
    "reports": "What a session ends with, of results that are made up, one in a hundred failed",
}


def measured(part: str, counts: list[int], repeats: int) -> list[str]:
    """Measure one part; return its lines."""
    most = counts[-1]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        ENVIRONMENT["PYTHONPYCACHEPREFIX"] = str(root / "compiled")
        if part == "share":
            return shares(root, counts, repeats)
        if part == "ends":
            return ends(root, most, repeats)
        if part == "others":
            return peers(root, most, repeats, own_sessions(root, most, repeats))
        return [*made_up(most), "", *pages(most)]


def main() -> None:
    """Measure and print, each part for itself."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 3000, 10_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    wanted = parser.parse_args()
    for part in wanted.parts:
        text = [
            f"{PARTS[part]}; the processor's time",
            f"up to {wanted.counts[-1]} tests, medians of {wanted.repeats}",
            line("pytest_benchmark", "syrupy", "jinja2", "matplotlib"),
            f"load when measured: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {AIMS}",
            "",
            *measured(part, wanted.counts, wanted.repeats),
        ]
        publish(f"scale_{part}", "\n".join(text))


if __name__ == "__main__":
    main()
