"""Beside the plugins that people have: random order, coverage, async tests, time-outs, reruns."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import json
import sys

import pytest

PLUGIN = "pytest_gpumem.plugin" if "pytest_gpumem.plugin" in sys.argv else "gpumem"
UPDATE = "--gpumem-update-baselines"
ASYNCIO = "asyncio_mode = auto\n"
if importlib.metadata.version("pytest-asyncio") >= "0.24":  # which warns where this is not set
    ASYNCIO += "asyncio_default_fixture_loop_scope = function\n"

STEPS = """
@pytest.mark.gpu_memory
@pytest.mark.parametrize("size", [40, 80, 120])
def test_sized(size):
    mib(size)

@pytest.fixture(scope="module")
def model():
    return mib(64)

@pytest.mark.gpu_memory
def test_with_model(model):
    mib(20)

@pytest.mark.gpu_memory(max_gib=1)
def test_too_large(model):
    kept = mib(900), mib(200)

class TestSeveral:
    @pytest.mark.gpu_memory
    def test_trains(self):
        layer = torch.nn.Linear(1024, 1024, device="cuda")
        adam = torch.optim.Adam(layer.parameters())
        for _ in range(2):
            layer(torch.randn(64, 1024, device="cuda")).sum().backward()
            adam.step()

def test_plain():
    pass
"""


def order(session):
    """The nodeids of a verbose session, in the order in which they ran."""
    lines = (line.split() for line in session.out.splitlines())
    return [words[0] for words in lines if len(words) > 1 and words[1] in ("PASSED", "FAILED")]


def test_in_any_order_the_figures_are_the_same(suite):
    """And whatever the seeds that pytest-randomly sets before each test."""
    pytest.importorskip("pytest_randomly")
    there = suite.run("-v", source=STEPS)
    assert there.outcomes == {"passed": 6, "failed": 1}
    orders = {tuple(order(there))}
    for seed in (1, 2, 3):
        session = suite.run("-v", "-p", "randomly", f"--randomly-seed={seed}")
        assert session.figures() == there.figures()
        assert session.verdicts() == there.verdicts()
        orders.add(tuple(order(session)))
    assert len(orders) == 4


COVERED = """
import torch

def step(large):
    if large:
        kept = torch.empty(1200 << 20, dtype=torch.uint8, device="cuda")
    else:
        kept = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
    return kept.nbytes

def never():
    return 1
"""


def test_coverage_sees_what_marked_tests_run(suite):
    """A step that is run again without its limit, too; and changes no figure."""
    pytest.importorskip("pytest_cov")
    suite.write("covered.py", COVERED)
    session = suite.run_warm(
        "--cov=covered",
        "--cov-branch",
        "--cov-report=json",
        source="""
        from covered import step

        @pytest.mark.gpu_memory(max_gib=1)
        @pytest.mark.parametrize("large", [True, False])
        def test_it(large):
            step(large)
        """,
    )
    assert session.outcomes == {"passed": 1, "failed": 1}, session.out
    assert session.figures() == {"test_it[True]": (1200, 1200), "test_it[False]": (40, 40)}
    report = json.loads((suite.path / "coverage.json").read_text())["files"]["covered.py"]
    assert report["missing_lines"] == [11]
    assert report["summary"]["missing_branches"] == 0


ASYNC = """
import asyncio

class Batch:  # asyncio shows what a task returns, and a tensor's values would take memory
    def __init__(self):
        self.data = mib(30)

@pytest.fixture
async def batch():
    await asyncio.sleep(0)
    yield Batch()

@pytest.mark.gpu_memory
async def test_awaits(batch):
    kept = mib(40)
    await asyncio.sleep(0)
    more = mib(50)

@pytest.mark.gpu_memory(max_gib=1)
async def test_too_large(batch):
    kept = mib(900)
    await asyncio.sleep(0)
    more = mib(200)

@pytest.mark.gpu_memory(warmup=1)
async def test_tasks():
    async def one(size):
        kept = mib(size)
        await asyncio.sleep(0.01)
    await asyncio.gather(one(10), one(20), one(30))
"""
AWAITED_OUTCOMES = {"passed": 2, "failed": 1, "warnings": 0}  # an older pytest-asyncio warns
AWAITED = {"test_awaits": (120, 120), "test_too_large": (1130, 1130), "test_tasks": (60, 60)}


@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <(socket|function BaseEventLoop)"
    ":pytest.PytestUnraisableExceptionWarning"
)
def test_async_tests_are_measured_like_others(suite):
    """Run again as well, with their async fixtures."""
    pytest.importorskip("pytest_asyncio")
    suite.write("pytest.ini", f"[pytest]\n{ASYNCIO}")
    session = suite.run("-p", "pytest_asyncio.plugin", source=ASYNC)
    assert session.outcomes == {"passed": 2, "failed": 1}, session.out
    assert session.figures() == AWAITED
    assert "it needs 1130.00 MiB" in session.flat
    asyncio.set_event_loop(None)  # on Python 3.10 pytest-asyncio leaves a loop behind, not closed
    gc.collect()


def test_so_are_those_of_anyio_and_of_unittest(suite):
    pytest.importorskip("anyio")
    backend = '@pytest.fixture\ndef anyio_backend():\n    return "asyncio"\n'
    session = suite.run(source=f"{backend}\npytestmark = pytest.mark.anyio\n{ASYNC}")
    assert {**session.outcomes, "warnings": 0} == AWAITED_OUTCOMES, session.out
    assert session.figures() == AWAITED
    session = suite.run(
        source="""
        import asyncio, unittest

        @pytest.mark.gpu_memory(max_gib=1)
        class TestCase(unittest.IsolatedAsyncioTestCase):
            async def asyncSetUp(self):
                self.batch = mib(30)

            async def test_awaits(self):
                await asyncio.sleep(0)
                kept = mib(40), mib(50)

            async def test_too_large(self):
                kept = mib(900)
                await asyncio.sleep(0)
                more = mib(200)
        """
    )
    assert {**session.outcomes, "warnings": 0} == {**AWAITED_OUTCOMES, "passed": 1}, session.out
    assert session.figures() == {
        "TestCase::test_awaits": (120, 120),
        "TestCase::test_too_large": (1130, 1130),
    }


HANGS = """
import signal, threading

def hang():
    # as if the time were over: no test is to wait for that, or to be late for it
    timers = [thread for thread in threading.enumerate() if "pytest_timeout" in thread.name]
    for timer in timers:
        timer.function(*timer.args)  # --timeout-method=thread
    signal.raise_signal(signal.SIGALRM)

@pytest.mark.gpu_memory
def test_before():
    mib(40)

@pytest.mark.gpu_memory
@pytest.mark.timeout(900)
def test_hangs():
    kept = mib(70)
    hang()

@pytest.mark.gpu_memory
def test_after():
    mib(40)
"""


def test_a_test_that_hangs_is_timed_out_and_holds_nothing(suite, monkeypatch):
    timeout = pytest.importorskip("pytest_timeout")
    monkeypatch.setattr(timeout, "SUPPRESS_TIMEOUT", False)  # a session with --pdb leaves it set
    session = suite.run(UPDATE, "--timeout-method=signal", source=HANGS)
    assert session.outcomes == {"passed": 2, "failed": 1}
    assert "Timeout" in session.out
    assert session.figures() == {"test_before": (40, 40), "test_after": (40, 40)}
    assert "are not counted" not in session.flat
    assert set(suite.baselined()) == {"test_it.py::test_before", "test_it.py::test_after"}


def test_a_second_run_that_hangs_is_timed_out_and_the_verdict_stands(suite, monkeypatch):
    """The first ran out of memory; what the step needs is not known then."""
    timeout = pytest.importorskip("pytest_timeout")
    monkeypatch.setattr(timeout, "SUPPRESS_TIMEOUT", False)
    session = suite.run(
        "--timeout-method=signal",
        source="""
        import signal
        runs = []

        @pytest.mark.gpu_memory(max_gib=1)
        @pytest.mark.timeout(900)
        def test_it():
            runs.append(1)
            kept = mib(900)
            if len(runs) > 1:
                signal.raise_signal(signal.SIGALRM)
            more = mib(200)

        @pytest.mark.gpu_memory
        def test_after():
            mib(40)
        """,
    )
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert session.verdicts() == {"test_it": "out of memory", "test_after": "no baseline"}
    assert session.table["test_after"]["allocated"] == "40.00"
    assert "it needs" not in session.flat


def test_a_time_out_that_ends_the_process_leaves_the_baselines_as_they_were(suite):
    """``--timeout-method=thread`` ends it in the midst of the test, without a word to anybody."""
    pytest.importorskip("pytest_timeout")
    suite.run(UPDATE, source=HANGS.replace("    hang()", "    pass"))
    before = suite.baselines()
    session = suite.run_warm(UPDATE, "--timeout-method=thread", source=HANGS.replace("40", "50"))
    assert session.ret == 1
    assert "Timeout" in session.err + session.out
    assert "test_after" not in session.out
    assert suite.baselines() == before


def test_without_the_plugin_a_suite_has_to_know_the_marker_itself(suite):
    """By pytest's own rules: ``--strict-markers`` refuses a marker that nobody registers, and
    ``--strict-config`` an option in the ini file; the fixture is not there."""
    source = """
import pytest

@pytest.mark.gpu_memory
def test_marked(): pass

def test_fixture(gpu_memory): pass

def test_plain(): pass
"""
    alone = ("-p", f"no:{PLUGIN}", "-k", "test_plain or test_fixture")
    suite.write("pytest.ini", "[pytest]\ngpumem_card = T4")
    session = suite.run_apart(*alone, "--strict-markers", source=source)
    assert session.outcomes == {"errors": 1, "warnings": 1}
    assert "'gpu_memory' not found in `markers` configuration option" in session.out
    assert "INTERNALERROR" not in session.out
    session = suite.run_apart(*alone, "--strict-config")
    assert "Unknown config option: gpumem_card" in session.err + session.out
    suite.write("pytest.ini", "[pytest]\nmarkers =\n    gpu_memory: measured by pytest-gpumem")
    session = suite.run_apart(*alone, "--strict-markers", "--strict-config", "-W", "error")
    assert session.outcomes == {"passed": 1, "errors": 1, "deselected": 1}
    assert "fixture 'gpu_memory' not found" in session.out


TOGETHER = """
import asyncio, os, pathlib, random, signal, unittest

@pytest.mark.gpu_memory
async def test_awaits():
    kept = mib(40)
    await asyncio.sleep(0)
    more = mib(50)

@pytest.mark.gpu_memory
def test_flaky():
    runs = pathlib.Path("runs")
    first = not runs.exists()
    runs.write_text("")
    kept = mib(300 if first else 100)
    assert not first

@pytest.mark.gpu_memory
@pytest.mark.flaky(reruns=0)
def test_hangs():
    kept = mib(70)
    signal.raise_signal(signal.SIGALRM)

@pytest.mark.gpu_memory
class TestCase(unittest.TestCase):
    def test_case(self):
        mib(40 if random.random() < 2 else 0)
"""


def test_all_of_them_in_one_session(suite):
    """Random order, two workers, reruns, time-outs, coverage, async tests; warnings are errors."""
    for name in ("xdist", "pytest_randomly", "pytest_cov", "pytest_asyncio", "pytest_timeout"):
        pytest.importorskip(name)
    pytest.importorskip("pytest_rerunfailures")
    suite.write(
        "pytest.ini",
        f"""
        [pytest]
        addopts = --strict-markers --strict-config
        timeout = 900
        filterwarnings = error
        gpumem_card = T4
{ASYNCIO}
        """,
    )
    session = suite.run_warm(
        *("-p", "randomly", "-p", "pytest_asyncio.plugin"),
        *("-v", "-n", "2", "--reruns=1", "--randomly-seed=5", "--cov=.", "--cov-report=json"),
        *(UPDATE, "--gpumem-markdown=report.md", "--junitxml=junit.xml"),
        source=STEPS + TOGETHER,
    )
    assert session.outcomes == {"passed": 9, "failed": 2, "rerun": 2}, session.out
    figures = {
        "test_sized[40]": (40, 40),
        "test_sized[80]": (80, 80),
        "test_sized[120]": (120, 120),
        "test_with_model": (84, 84),
        "test_awaits": (90, 90),
        "test_flaky": (100, 100),
        "TestCase::test_case": (40, 40),
    }
    assert {k: v for k, v in session.figures().items() if k in figures} == figures
    assert session.verdicts()["test_too_large"] == "out of memory"
    known = {name.partition("::")[2]: peaks for name, peaks in suite.baselined().items()}
    assert known.keys() == {*figures, "TestSeveral::test_trains"}
    assert {k: v for k, v in known.items() if k in figures} == figures
    assert "test_awaits" in (suite.path / "report.md").read_text()
    covered = json.loads((suite.path / "coverage.json").read_text())["files"]["test_it.py"]
    assert covered["summary"]["percent_covered"] > 95
    session = suite.run("-p", "pytest_asyncio.plugin", "--lf", "-x")
    assert session.outcomes["failed"] == 1, session.out
    assert "passed" not in session.outcomes
