"""Random suites of memory tests, whose figures are compared with those of each test alone.

A suite has fixtures of every scope, and tests that allocate, free, leak, fail, catch out of memory
or not, reset statistics, use streams and threads, record their own history, have subtests and
measure parts. Some tests are methods of a unittest.TestCase; some suites use expandable segments.
The reference is each test alone in a fresh process: every order of the tests, and pytest-xdist's
workers, must give the same figures.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers.paths import ROOT, TESTS
from helpers.sources import WITHOUT
from helpers.warm import HANGS, warm_python

FIRST_WIDE = 3000
"""from this seed on, suites also have low limits, subtests, threads, histories and unittest"""
FIRST_CHAINED = 6000
"""from this seed on, suites have chains of fixtures of five scopes, and tests on several cards"""
LIMITS = (0.03, 0.06, 0.12, 1)
"""GiB; the low limits refuse many requests of a test"""
SCOPES = ("function", "class", "module", "session")
CHAIN = ("session", "package", "module", "class", "function")
CARDS = ("T4", "L4", "A100-80GB", "H100")
SIZES = (0.01, 0.3, 1, 1.5, 3, 7, 12, 20, 33, 64, 100)
"""MiB, for both pools of PyTorch's allocator, and on each side of its limits at 1, 10 and 20 MiB"""
SKIPPED = "skipped"
"""in place of a part's name: a marked test that skipped itself, or for which there is no GPU"""
RESULTS = "RANDOM_SUITE_RESULTS"
"""environment variable with the path of the file for a session's figures"""

CONFTEST = f"""
import dataclasses, json, os, pytest

def pytest_runtest_logreport(report):
    if hasattr(report, "node"):  # a worker's, which has written it
        return
    if type(report) is pytest.TestReport and report.skipped and "gpu_memory" in report.keywords:
        row = {{"test": report.nodeid, "part": {SKIPPED!r}, "values": report.longrepr[2]}}
        with open(os.environ[{RESULTS!r}], "a") as stream:
            stream.write(json.dumps(row) + "\\n")

def pytest_gpumem_judged(item, result):
    measurement = result.measurement
    row = {{
        "test": item.nodeid,
        "part": result.part,
        "kind": str(result.verdict.kind),
        "failed": result.verdict.failed,
        "peaks": [dataclasses.astuple(peak) for peak in measurement.peaks],
        "left": list(measurement.left),
        "retained": [dataclasses.astuple(peak) for peak in measurement.retained],
        "range": repr(measurement.range),
        "out_of_memory": None,
        "garbage": any(note.kind == "garbage" for note in measurement.notes),
        "earlier": [note.text for note in measurement.notes if note.kind.startswith("earlier ")],
    }}
    if measurement.out_of_memory is not None:
        row["out_of_memory"] = dataclasses.asdict(measurement.out_of_memory)
        row["out_of_memory"].pop("site")
    with open(os.environ[{RESULTS!r}], "a") as stream:
        stream.write(json.dumps(row) + "\\n")
"""
HEAD = f"""
import gc
import json
import os
import threading
import unittest

import pytest
import torch

def tell(**values):  # what a test reads itself is compared as well
    name = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
    row = {{"test": name, "part": "reads", "values": values}}
    with open(os.environ[{RESULTS!r}], "a") as stream:
        stream.write(json.dumps(row) + "\\n")
"""
HEAD += '''

class Leaked(list):
    def append(self, block):
        super().append((block, os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]))

    def free_earlier(self):
        """Free every second block of other tests: what a test does itself depends on no other."""
        current = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
        earlier = [index for index, (_, test) in enumerate(self) if test != current]
        for index in reversed(earlier[::2]):
            del self[index]

leaked, graphs = Leaked(), []

def mib(n):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device="cuda")

def train(width, optimizer, steps):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(2))).cuda()
    optimizer = optimizer(model.parameters())
    for _ in range(steps):
        model(torch.zeros(16, width, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def held_by_a_frame(n):
    held = mib(n)
    pytest.skip("in a subtest")

def recorded(n, **options):
    """Record a history of its own, with memory of earlier tests freed meanwhile."""
    torch.cuda.memory._record_memory_history("all", stacks="python", **options)
    try:
        leaked.free_earlier()
        kept = mib(n)
        del kept
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(None)
    events = [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    tell(events=len(events), frames=sum(bool(event.get("frames")) for event in events))

def fallen_back(n, less):
    """Take less where a limit refuses more, with memory of earlier tests freed before."""
    leaked.free_earlier()
    try:
        blocks = [mib(n)]
        refused = False
    except torch.OutOfMemoryError:
        blocks = [mib(less)]
        refused = True
    tell(refused=refused)
    return blocks

def in_a_thread(n):
    blocks = []
    thread = threading.Thread(target=lambda: blocks.append(mib(n)))
    thread.start()
    thread.join()
    return blocks

def captured():
    """A graph with memory of its own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = mib(3).zero_()
    return graph, kept

class Holder(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.data = mib(n)
        self.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, n):
        return mib(n)
'''


@dataclass(frozen=True)
class Fixture:
    name: str
    scope: str
    size: float
    uses: tuple[str, ...] = ()
    ends: bool = False
    """whether the fixture frees its memory at tear-down"""
    autouse: bool = False
    set_up: tuple[str, ...] = ()
    """more lines of the set-up; the fixture keeps the tensors in ``blocks``"""
    tear_down: tuple[str, ...] = ()
    params: tuple[int, ...] = ()
    """parameters: additional MiB"""

    def source(self):
        params = f", params={list(self.params)}" if self.params else ""
        names = ", ".join((*self.uses, *["request"] * bool(self.set_up or self.params)))
        lines = [
            f'@pytest.fixture(scope="{self.scope}", autouse={self.autouse}{params})',
            f"def {self.name}({names}):",
            f"    blocks = [mib({self.size}), mib(0.3)]",
            *["    blocks.append(mib(request.param))"] * bool(self.params),
            *(f"    {line}" for line in self.set_up),
        ]
        end = [*["blocks.clear()"] * self.ends, *self.tear_down]
        lines += (
            ["    yield blocks", *(f"    {line}" for line in end)] if end else ["    return blocks"]
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Test:
    __test__ = False

    name: str
    marker: str | None
    fixtures: tuple[str, ...]
    operations: tuple[str, ...]
    unit: bool = False
    """whether the test is a method of a unittest.TestCase"""
    params: tuple[str, ...] = ()
    """parameters in the node ids, from the parametrized fixture that the test uses"""

    @property
    def path(self):
        return f"Unit_{self.name}::{self.name}" if self.unit else self.name

    @property
    def paths(self):
        return [f"{self.path}[{param}]" for param in self.params] or [self.path]

    def source(self):
        body = textwrap.indent("\n".join(self.operations) or "pass", "    ")
        marker = "" if self.marker is None else f"@pytest.mark.gpu_memory({self.marker})\n"
        if self.unit:
            method = textwrap.indent(f"{marker}def {self.name}(self):\n{body}", "    ")
            return f"class Unit_{self.name}(unittest.TestCase):\n{method}"
        subtests = ["subtests"] * ("subtests.test" in body)
        names = ", ".join(dict.fromkeys((*self.fixtures, "request", "gpu_memory", *subtests)))
        if self.marker is None:
            names = ", ".join(dict.fromkeys((*self.fixtures, "request", *subtests)))
            return f"def {self.name}({names}):\n{body}"
        return f"@pytest.mark.gpu_memory({self.marker})\ndef {self.name}({names}):\n{body}"


@dataclass(frozen=True)
class File:
    name: str
    fixtures: tuple[Fixture, ...] = field(default=())
    tests: tuple[Test, ...] = field(default=())

    @property
    def is_shared(self):
        return self.name == "conftest.py"

    def names_of(self, test):
        return [f"{self.name}::{path}" for path in test.paths]

    def source(self):
        parts = [*(it.source() for it in self.fixtures), *(it.source() for it in self.tests)]
        return "\n\n".join([HEAD, *parts]) + "\n"


def random_suite(seed):
    """Return the files of the suite with a seed."""
    chance, wide = random.Random(seed), seed >= FIRST_WIDE
    if seed >= FIRST_CHAINED:
        return chained_suite(chance)
    files = []
    for letter in "ab"[: chance.choice((1, 1, 2))]:
        fixtures = []
        for number in range(chance.choice((0, 1, 2, 3))):
            scope = chance.choice(SCOPES)
            wider = [it.name for it in fixtures if SCOPES.index(it.scope) >= SCOPES.index(scope)]
            uses = tuple(chance.sample(wider, 1)) if wider and chance.random() < 0.4 else ()
            fixtures.append(
                Fixture(
                    f"fixture_{number}",
                    scope,
                    chance.choice(SIZES),
                    uses,
                    ends=chance.random() < 0.5,
                    autouse=chance.random() < 0.1,
                )
            )
        tests = tuple(
            random_test(chance, f"test_{number}", [it.name for it in fixtures], wide=wide)
            for number in range(chance.randint(2, 5))
        )
        files.append(File(f"test_{letter}.py", tuple(fixtures), tests))
    return tuple(files)


def chained_suite(chance):
    """Return files whose fixtures request each other, by arguments or by ``getfixturevalue``."""
    shared = random_chain(chance, "shared", [], [*CHAIN[:2], *CHAIN])
    files = [File("conftest.py", tuple(shared))]
    for letter in "ab":
        own = random_chain(chance, f"own_{letter}", shared, CHAIN[2:])
        tests = tuple(
            random_chained_test(chance, f"test_{letter}{number}", [*shared, *own])
            for number in range(chance.randint(2, 5))
        )
        files.append(File(f"test_{letter}.py", tuple(own), tests))
    return tuple(files)


def random_chain(chance, prefix, shared, scopes):
    """Return fixtures, most of which request an earlier one of the same or a wider scope."""
    fixtures = []
    for number, scope in enumerate(scopes):
        if chance.random() < 0.3:
            continue
        wider = [
            it.name
            for it in (*shared, *fixtures)
            if CHAIN.index(it.scope) <= CHAIN.index(scope) and not it.params
        ]
        asked = tuple(chance.sample(wider, min(len(wider), chance.choice((0, 1, 1, 2)))))
        late = asked[1:] if chance.random() < 0.5 else ()
        size, other = chance.choice(SIZES), chance.choice(SIZES)
        width = chance.choice((64, 200, 700))
        models = [
            "model = torch.nn.Linear(512, 64).cuda()",
            "model(torch.ones(8, 512, device='cuda')).sum().backward()",
            "blocks.append(model)",
        ]
        steps = [
            [f"mib({size})"],
            [f"tmp = mib({size})", *models, "del tmp"],
            [f"train({width}, torch.optim.Adam, 2)"],
            [f"blocks.append(mib({other}))", "del blocks[0]"],
            [f"cycle = [mib({max(size, 1.5)})]", "cycle.append(cycle)", "del cycle"],
            ["blocks.append(captured())"],
        ]
        lines = [line for step in chance.sample(steps, chance.randint(0, 2)) for line in step]
        for name in late:
            lines.insert(chance.choice((0, len(lines))), f"request.getfixturevalue('{name}')")
        ends = [[], [f"mib({other})"], [f"mib({other})", "raise RuntimeError('tear-down')"]]
        params = (1, 7) if scope != "function" and chance.random() < 0.1 else ()
        fixtures.append(
            Fixture(
                f"{prefix}_{number}",
                scope,
                chance.choice(SIZES),
                tuple(name for name in asked if name not in late),
                ends=chance.random() < 0.4,
                set_up=tuple(lines),
                # if this raises, pytest fails the test that requests the next parameter
                tear_down=tuple(chance.choices(ends, (6, 3, 0 if params else 1))[0]),
                params=params,
            )
        )
    return fixtures


def random_chained_test(chance, name, fixtures):
    options = {f"max_gib={chance.choice(LIMITS)}": 0.15, "max_leak_mib=0": 0.1, "devices=2": 0.1}
    options[f"card={chance.choice(CARDS)!r}"] = 0.3
    chosen = [text for text, share in options.items() if chance.random() < share]
    marker = None if chance.random() < 0.1 else ", ".join(chosen)
    used = chance.sample(fixtures, min(len(fixtures), chance.choice((0, 1, 1, 2, 3))))
    names = tuple(it.name for it in used if not it.params)
    params = next((it for it in used if it.params), None)
    late = [it.name for it in fixtures if not it.params]
    operations = []
    for _ in range(chance.randint(0, 3)):
        if chance.random() < 0.15:
            operations.append("graphs.append(captured())")
        operations += random_operation(
            chance, late, marked=marker is not None, unit=False, wide=True
        )
    return Test(
        name,
        marker,
        (*names, params.name) if params else names,
        tuple(operations),
        params=tuple(map(str, params.params)) if params else (),
    )


def random_test(chance, name, fixtures, *, wide):
    marker = None
    if chance.random() < 0.85:
        options = {"max_gib=1": 0.2, "max_leak_mib=0": 0.15, "warmup=1": 0.1, 'card="T4"': 0.05}
        chosen = [text for text, share in options.items() if chance.random() < share]
        if wide and "max_gib=1" in chosen:
            chosen[0] = f"max_gib={chance.choice(LIMITS)}"
        marker = ", ".join(chosen)
    unit = wide and chance.random() < 0.15
    if unit:
        fixtures = []
    used = tuple(chance.sample(fixtures, chance.randint(0, len(fixtures))))
    operations = []
    for _ in range(chance.randint(1, 6)):
        marked = marker is not None and not unit
        operations += random_operation(chance, fixtures, marked=marked, unit=unit, wide=wide)
    if chance.random() < 0.15:
        operations.append(
            chance.choice(
                (
                    "raise ValueError",
                    "last = mib(12); raise KeyError",
                    "Holder(7)(200_000)",
                    "pytest.skip('half-way')",
                )
            )
        )
    return Test(name, marker, used, tuple(operations), unit=unit)


def random_operation(  # noqa: PLR0913 - what an operation depends on
    chance, fixtures, *, marked, unit, wide, depth=0
):
    """Return the lines of one operation."""
    size, other = chance.choice(SIZES), chance.choice(SIZES)
    number = chance.randrange(1000)
    subtest = "self.subTest" if unit else "subtests.test"
    choices = [
        [f"kept_{number} = mib({size})"],
        [f"kept_{number} = mib({size})"],
        [f"mib({size})"],
        [f"kept_{number} = [mib({size}), mib({other})]", f"del kept_{number}[0]"],
        [f"leaked.append(mib({size}))"],
        ["leaked.clear()"],
        ["leaked.free_earlier()"],
        ["torch.cuda.empty_cache()"],
        ["torch.cuda.reset_peak_memory_stats()"],
        ["gc.collect()"],
        [f"cycle = [mib({size})]", "cycle.append(cycle)", "del cycle"],
        [
            "with torch.cuda.stream(torch.cuda.Stream()):",
            f"    streamed = mib({size})",
            "streamed.record_stream(torch.cuda.current_stream())",
        ],
        [
            "try:",
            f"    big_{number} = [mib({size}), mib(200_000)]",
            "except torch.OutOfMemoryError:",
            f"    small_{number} = mib({other})",
        ],
        [f"train({chance.choice((64, 256, 700))}, torch.optim.Adam, {chance.choice((1, 2))})"],
        [f"train(256, torch.optim.SGD, {chance.choice((1, 2, 3))})"],
    ]
    if wide:
        choices += [
            [f"with {subtest}(number={number}):", f"    held_by_a_frame({size})"],
            [f"with {subtest}(number={number}):", f"    inner_{number} = mib({size})"],
            [f"with {subtest}(number={number}):", f"    assert not mib({size}).numel()"],
            [f"recorded({size}, context={chance.choice(('all', 'alloc', 'state', None))!r})"],
            [f"back_{number} = fallen_back({size}, {chance.choice(SIZES[:4])})"],
            [f"back_{number} = fallen_back({size}, {chance.choice(SIZES[:4])})"],
            [f"threads_{number} = in_a_thread({size})"],
        ]
    if fixtures:
        choices.append([f"late_{number} = request.getfixturevalue('{chance.choice(fixtures)}')"])
    if marked and depth == 0:
        inner = [
            line
            for _ in range(chance.randint(1, 3))
            for line in random_operation(
                chance, fixtures, marked=marked, unit=unit, wide=wide, depth=1
            )
        ]
        part = [f"with gpu_memory.measure('part {number}'):", *(f"    {line}" for line in inner)]
        choices += [part, part]
    return chance.choice(choices)


PROGRAM = """
import gc, json, os, sys
import pytest
from helpers.hidden_heap import hide_objects

class Plans:
    '''Runs the collected tests once a plan, each time in a fork of this process.'''

    def __init__(self, plans):
        self.plans = plans
        self.forked = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        plans = self.plans
        if kind == "cheap":
            import torch._dynamo  # which the first optimizer imports, in each fork

            hide_objects()  # a new interpreter has hidden none yet
            gc.freeze = gc.unfreeze = lambda: None
        for number, names in enumerate(plans):
            process = os.fork()
            if process == 0:
                os.environ["RANDOM_SUITE_RESULTS"] = f"results-{number}"
                session.items[:] = [items[name] for name in names]
                self.forked = True
                return None
            _, status = os.waitpid(process, 0)
            with open(f"status-{number}", "w") as stream:
                stream.write(f"{os.waitstatus_to_exitcode(status)} {json.dumps(names)}")
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus):
        if self.forked:  # the figures are written
            sys.stdout.flush()
            os._exit(exitstatus)

kind, plans, *options = sys.argv[1:]
sys.exit(pytest.main(options, plugins=[Plans(json.loads(plans))]))
"""
OPTIONS = (
    *WITHOUT,
    *("-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "--gpumem-device=virtual"),
    *("-p", "no:unraisableexception", "-p", "no:threadexception"),
)
TOLD = re.compile(r"peak reserved may be too high by up to ([0-9.]+) MiB")
PATHS = os.pathsep.join([str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
NOTES = ("garbage", "earlier")
"""fields of a row that are notes: they explain why a figure may differ"""
EXPANDABLE_EVERY = 7
"""one of so many suites uses expandable segments"""
TOLERANCE = 1 << 20, 20 << 20, 1 << 20
"""bytes allocated, reserved and pinned by which a peak may differ from its baseline"""
BROKEN = "broken"
"""in place of figures, if the session did not end with status 0 or 1"""


class Runner:
    """Runs suites in a folder, in forks of the warm process.

    Args:
        folder: an empty folder.
        cheap: hide torch's own objects from the garbage collector for the whole session. A
            collection then takes a millisecond, not a fifth of a second; the suites' own objects
            are still collected.
    """

    def __init__(self, folder, *, cheap=True):
        self.folder = Path(folder)
        self.cheap = cheap
        self.sessions = 0
        self.settings = ""
        """value of ``PYTORCH_CUDA_ALLOC_CONF``; "" to leave it as it is"""
        self.program = self.folder / "program.py"
        self.program.write_text(PROGRAM, encoding="utf-8")

    def write(self, files):
        for path in self.folder.glob("*"):
            if path != self.program and path.is_file():
                path.unlink()
        (self.folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        sources = {file.name: file.source() for file in files}
        sources["conftest.py"] = CONFTEST + sources.get("conftest.py", "")
        for name, source in sources.items():
            (self.folder / name).write_text(source, encoding="utf-8")

    def figures(self, plans):
        """Run the tests of each plan, a list of nodeids; return the figures of each."""
        for path in [*self.folder.glob("results-*"), *self.folder.glob("status-*")]:
            path.unlink()
        kind = "cheap" if self.cheap else "plain"
        self._run(self.program, kind, json.dumps(plans), *OPTIONS)
        found = []
        for number in range(len(list(self.folder.glob("status-*")))):
            text = (self.folder / f"status-{number}").read_text(encoding="utf-8")
            status, _, names = text.partition(" ")
            self.sessions += 1
            rows = read_rows(self.folder / f"results-{number}")
            if int(status) not in (0, 1):
                rows = dict.fromkeys(json.loads(names), BROKEN)
            found.append(rows)
        return found

    def figures_of_workers(self):
        """Run a session with two pytest-xdist workers; return its figures."""
        path = self.folder / "results-workers"
        done = self._run("-m", "pytest", *OPTIONS, "-n", "2", results=path)
        self.sessions += 1
        rows = read_rows(path)
        return rows if done.returncode in (0, 1) else dict.fromkeys(rows, BROKEN)

    def _run(self, *arguments, results="unused"):
        environment = {**os.environ, RESULTS: str(results), "PYTHONPATH": PATHS}
        if self.settings:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = self.settings
        for name in ("CI", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
            environment.pop(name, None)
        self.output = subprocess.run(
            [warm_python(), *map(str, arguments)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=HANGS,
            check=False,
        )
        return self.output


def read_rows(path):
    """Read a session's rows by test and part, in the order of the verdicts."""
    rows = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            part = row.pop("part")
            name = f"{row.pop('test')} ({part})" if part else row.pop("test")
            rows.setdefault(name, []).append(row)
    return rows


def differences(runner, files, seed, *, workers=False):
    """Return sentences on what differs between a suite's sessions and its tests alone."""
    runner.write(files)
    expandable = seed >= FIRST_WIDE and seed % EXPANDABLE_EVERY == 3
    runner.settings = "expandable_segments:True" if expandable else ""
    names = [name for file in files for test in file.tests for name in file.names_of(test)]
    orders = [names, random.Random(seed).sample(names, len(names))]
    if seed >= FIRST_CHAINED:
        orders.append(names[::-1])
    found = runner.figures([*([name] for name in names), *orders])
    alone = {name: rows for figures in found[: len(names)] for name, rows in figures.items()}
    sessions = list(zip(map(" ".join, orders), found[len(names) :], strict=False))
    if len(found) < len(names) + len(orders):
        return [f"the session ended with {runner.output.returncode}: {runner.output.stderr[-500:]}"]
    if workers:
        sessions.append(("-n 2", runner.figures_of_workers()))
    set_ups = [line for file in files for fixture in file.fixtures for line in fixture.set_up]
    makers = {
        name
        for file in files
        for test in file.tests
        for name in file.names_of(test)
        if any("cycle" in line for line in (*test.operations, *set_ups))
    }
    impossible = [
        f"{name}: less reserved than allocated in {order}: {row}"
        for order, rows in [*sessions, ("a test alone", alone)]
        for name, results in rows.items()
        if results != BROKEN
        for row in results
        if any(allocated > reserved for allocated, reserved in pairs_of(row))
    ]
    marked = {
        name
        for file in files
        for test in file.tests
        for name in file.names_of(test)
        if test.marker is not None
    }
    skippers = {
        f"{name} ({SKIPPED})"
        for file in files
        for test in file.tests
        for name in file.names_of(test)
        if any("skip" in line for line in test.operations)
    }
    unmeasured = [
        f"{name}: {rows[0]['values']}"
        for name, rows in alone.items()
        if name.endswith(f" ({SKIPPED})") and name not in skippers
    ]
    return [*impossible, *unmeasured] + [
        f"{name}: {rows.get(name)} in {order}, {alone.get(name)} alone"
        for order, rows in sessions
        for name in sorted({*rows, *alone})
        # Skip what an unmarked test reads: it may depend on other tests.
        if (test_of(name) in marked or not name.endswith(" (reads)"))
        and figures_of(rows, name) != figures_of(alone, name)
        and not (test_of(name) in makers and differ_by_garbage(name, rows, alone))
        and not differ_as_told(name, rows, alone)
    ]


def figures_of(results, name):
    """The figures and verdicts of a test, without the notes."""
    rows = results.get(name, BROKEN)
    if rows == BROKEN:
        return rows
    rows = [{key: value for key, value in row.items() if key not in NOTES} for row in rows]
    return once(rows) if name.endswith(" (reads)") else rows


def once(reads):
    """What one run of a body read, of equal runs: only some orders need a second run to explain."""
    lengths = (n for n in range(1, len(reads)) if reads[:n] * (len(reads) // n) == reads)
    return reads[: next(lengths, len(reads))]


def pairs_of(row):
    """Yield each pair (allocated, reserved) in a row, in bytes."""
    if "values" in row:
        return
    refusal = row["out_of_memory"]
    if refusal is not None:
        yield refusal["allocated"], refusal["reserved"]
        if refusal["needed"] is not None:
            yield refusal["needed"]["allocated"], refusal["needed"]["reserved"]
    yield from (peak[:2] for peak in (*row["peaks"], *row["retained"]))


def test_of(name):
    return name.partition(" (")[0]


def differ_by_garbage(name, rows, alone):
    """Whether figures depend on garbage by a note, or differ by no more than the tolerance."""
    if any(results.get(name, BROKEN) == BROKEN for results in (rows, alone)):
        return False
    verdicts = [row for results in (rows, alone) for row in results.get(test_of(name), ())]
    if any(row["garbage"] for row in verdicts):
        return True
    if any("values" in row for results in (rows, alone) for row in results[name]):
        return False
    pairs = [[peak for row in results[name] for peak in row["peaks"]] for results in (rows, alone)]
    return len(pairs[0]) == len(pairs[1]) and all(
        abs(in_order - by_itself) <= tolerance
        for left, right in zip(*pairs, strict=True)
        for in_order, by_itself, tolerance in zip(left, right, TOLERANCE, strict=True)
    )


def differ_as_told(name, rows, alone):
    """Whether only reserved bytes exceed those of the test alone, by no more than a note says."""
    pair = rows.get(name, BROKEN), alone.get(name, BROKEN)
    if BROKEN in pair or not all("earlier" in row for row in pair[0]):
        return False
    told = " ".join(note for row in pair[0] for note in row["earlier"])
    most = max(map(float, TOLD.findall(told)), default=0) * 2**20
    reserved = [[nbytes for row in results for _, nbytes in pairs_of(row)] for results in pair]
    within = len(reserved[0]) == len(reserved[1]) and all(
        0 <= in_order - by_itself <= most for in_order, by_itself in zip(*reserved, strict=True)
    )
    return within and without_reserved(rows, name) == without_reserved(alone, name)


def without_reserved(results, name):
    """The figures of a test without reserved bytes."""

    def without(peaks):
        if isinstance(peaks, dict):
            return {key: without(peaks[key]) for key in peaks if key != "reserved"}
        return peaks

    return [
        {
            **row,
            "peaks": [(allocated, pinned) for allocated, _, pinned in row["peaks"]],
            "retained": [(allocated, pinned) for allocated, _, pinned in row["retained"]],
            "out_of_memory": without(row["out_of_memory"]),
        }
        for row in figures_of(results, name)
    ]


def smaller(files):
    """Yield suites of two tests, then suites with one test, operation or fixture less."""
    tests = [(file.name, test.name) for file in files for test in file.tests]
    for pair in itertools.combinations(tests, min(len(tests) - 1, 2)):
        less = [
            replace(file, tests=tuple(it for it in file.tests if (file.name, it.name) in pair))
            for file in files
        ]
        yield tuple(file for file in less if file.tests or file.is_shared)
    for number, file in enumerate(files):
        for less in one_less(file.tests):
            yield put(files, number, replace(file, tests=less))
    for number, file in enumerate(files):
        for less in one_changed(file.tests, smaller_tests):
            yield put(files, number, replace(file, tests=less))
        for less in (*one_less(file.fixtures), *one_changed(file.fixtures, smaller_fixtures)):
            yield put(files, number, replace(file, fixtures=less))


def one_less(items):
    return [items[:at] + items[at + 1 :] for at in range(len(items))]


def one_changed(items, change):
    for at, item in enumerate(items):
        for changed in change(item):
            yield (*items[:at], changed, *items[at + 1 :])


def smaller_tests(test):
    for less in one_less(test.operations):
        smaller_test = replace(test, operations=less)
        if compiles(smaller_test.source()):
            yield smaller_test
    for less in one_less(test.fixtures):
        yield replace(test, fixtures=less)


def smaller_fixtures(fixture):
    for less in one_less(fixture.set_up):
        yield replace(fixture, set_up=less)
    if fixture.tear_down:
        yield replace(fixture, tear_down=())


def put(files, number, file):
    changed = (*files[:number], file, *files[number + 1 :])
    return tuple(it for it in changed if it.tests or it.is_shared)


def compiles(source):
    try:
        compile(source, "test", "exec")
    except SyntaxError:
        return False
    return True


def shrunk(runner, files, seed, *, workers=False):
    """Shrink a suite, one removal at a time, as long as its figures still differ."""
    again = True
    while again:
        again = False
        for candidate in smaller(files):
            if candidate and differences(runner, candidate, seed, workers=workers):
                files, again = candidate, True
                break
    return files


def source_of(files):
    return "\n".join(f"# {file.name}\n{file.source().removeprefix(HEAD).strip()}" for file in files)
