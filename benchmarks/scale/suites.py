"""Suites of many tests, and sessions of pytest that run them: what scale.py measures."""

from __future__ import annotations

import json
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import session

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 18
"""elements of a tensor of float32"""
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
    from pytest_gpumem.baselines.store import BaselineStore
    from pytest_gpumem.plugin import terminal_summary

    timed(terminal_summary, "session_summary", "summary")
    timed(BaselineStore, "update", "update")
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
    environment = {**ENVIRONMENT, "FACTOR": str(factor)}
    done = session(suite.folder, *blocked, *options, environment=environment)
    assert done.status == status, done.output[-3000:]
    clock = suite.folder / "clock.json"
    spent = json.loads(clock.read_text(encoding="utf-8"))[0] if clock.exists() else {}
    clock.unlink(missing_ok=True)
    return Took(done.cpu, spent)


def in_one_module(made: Suite) -> None:
    """Put all tests into one module."""
    for path in made.folder.glob("test_*.py"):
        path.unlink()
    tests = (STEP.format(it, MIB * (it % PER_MODULE + 1)) for it in range(made.number))
    text = f"{HEAD}{MARK}{''.join(tests)}"
    (made.folder / "test_all.py").write_text(text, encoding="utf-8")
