"""What the plugin's tests share: sessions of pytest inside this process, on the virtual GPU.

Importing torch takes seconds, so that it is done once in this process, and inner sessions use it.
On a machine with a real GPU these tests take the virtual one as well; tests/gpu takes the real one
(``pytest tests/gpu --gpumem-device=cuda``).
"""

from __future__ import annotations

import gc
import importlib
import json
import pkgutil
import re
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from helpers.hidden_heap import hide_objects
from helpers.sources import HELPER, WITHOUT
from helpers.virtual_gpu import CARD_80GIB, opened, virtual_device
from helpers.warm import HANGS, warm_python

import pytest_gpumem
from pytest_gpumem.cli import main
from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.devices.virtual.cudnn_notes import keep_no_plans
from pytest_gpumem.devices.virtual.device import VirtualDevice
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.meter.meter import Meter
from pytest_gpumem.sizes import MIB

pytest.register_assert_rewrite(
    "helpers.hint_suite", "helpers.recorded_runs", "helpers.spec_marks", "helpers.terminal_results"
)


def pytest_configure(config):
    keep_no_plans()  # tests of several cards take turns in a process
    if config.getoption("gpumem_device", None) != "cuda":
        try:
            VirtualDevice.load(find_card("H100"))
        except DeviceError as error:
            config.stash[OBSTACLE] = str(error)


OBSTACLE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def virtual_gpu(request):
    """Torch, imported in this process over the virtual GPU."""
    if OBSTACLE in request.config.stash:
        pytest.skip(request.config.stash[OBSTACLE])
    import torch

    # pytest loads a plugin's modules with a loader that has the session's config, and by that all
    # that the session's tests hold: none of them is to be an inner session's.
    for module in pkgutil.walk_packages(pytest_gpumem.__path__, "pytest_gpumem."):
        if ".native." not in module.name:  # a library, no module
            importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")  # which the first optimizer imports
    hide_objects()
    return torch


@pytest.fixture
def torch():
    """Torch over this process's virtual GPU, without what the plugin's sessions need."""
    virtual_device()
    import torch

    return torch


@pytest.fixture
def meter():
    """A measurement that has begun, on a card of 80 GiB."""
    with opened(CARD_80GIB) as device:
        meter = Meter(device, device.open(CARD_80GIB, 1), 1)
        meter.start()
        try:
            yield meter
        finally:
            meter.stop()
            device.open(CARD_80GIB, 1)


@pytest.fixture
def modules_kept(monkeypatch):
    """Let pytester, made after this, unload nothing but test modules: Triton loads once only."""
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot", _TestModulesOnly)


@pytest.fixture
def suite(modules_kept, pytester, virtual_gpu, monkeypatch):
    """A folder of test files, and sessions in this process that run them."""
    monkeypatch.setenv("COLUMNS", "140")
    github = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE")
    for name in ("CI", "BUILD_NUMBER", *github):  # pytest shortens nothing where these are set
        monkeypatch.delenv(name, raising=False)
    default = VirtualDevice.loaded().card
    yield Suite(pytester)
    VirtualDevice.loaded().card = default
    gc.collect()


class _TestModulesOnly:
    """In place of pytester's snapshot: forgets test modules, keeps what torch imports late."""

    def __init__(self, preserve=None):
        self._before = set(sys.modules)

    def restore(self):
        for name in set(sys.modules) - self._before:
            if name.partition(".")[0].startswith(("test_", "conftest", "helper")):
                vars(sys.modules.pop(name)).clear()  # and what they keep on the device


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to run commands in, of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def gpumem(capsys):
    """Run the command; return its status, its output and its errors."""

    def run(*arguments):
        status = main.main(arguments)
        return status, *capsys.readouterr()

    return run


class Suite:
    def __init__(self, pytester):
        self.pytester = pytester
        self.path = pytester.path

    def write(self, name, text):
        """Write a file; test files get the imports that they all need."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.strip("\n")
        indent = re.match(r" *", text).group()
        text = re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)
        if name.startswith("test_") and not re.search(r"import pytest$", text, re.MULTILINE):
            text = f"import pytest, torch\n{HELPER}\n{text}"
        path.write_text(text + "\n", encoding="utf-8")
        return path

    def run(self, *args, source=None):
        """Run a session in this process; ``source`` becomes test_it.py."""
        if source is not None:
            self.write("test_it.py", source)
        result = self.pytester.runpytest_inprocess(*WITHOUT, *args)
        if hasattr(result.reprec, "clear"):  # a session that a usage error ended has none
            result.reprec.clear()  # it records every hook call, with all that the tests hold
        return Session(self, result)

    def run_warm(self, *args, source=None):
        """Run a session in a process of its own that has torch in memory: see helpers/warm.py."""
        return self.run_apart(*args, source=source, python=warm_python())

    def run_apart(self, *args, source=None, python=sys.executable):
        """Run a session in a new interpreter, which imports all by itself."""
        if source is not None:
            self.write("test_it.py", source)
        command = (python, "-m", "pytest", *WITHOUT, *args)
        return Session(self, self.pytester.run(*command, timeout=HANGS))

    def python(self, code, *, python=sys.executable):
        """Run a program; return what it printed."""
        path = self.write("program.py", code)
        done = self.pytester.run(python, str(path), timeout=HANGS)
        return SimpleNamespace(out=done.stdout.str(), err=done.stderr.str(), ret=done.ret)

    def baselines(self, folder="baselines"):
        """The content of every baseline file, by its path in the folder."""
        root = self.path / folder
        return {str(p.relative_to(root)): p.read_text() for p in sorted(root.rglob("*.json"))}

    def baselined(self, folder="baselines"):
        """The tests that have a baseline, as nodeids, with their peaks in MiB."""
        found = {}
        for content in map(json.loads, self.baselines(folder).values()):
            for test, entry in content["tests"].items():
                for part, it in {"": entry, **entry.get("parts", {})}.items():
                    if "peak_allocated" in it:
                        name = f"{content['module']}::{test}" + (f" ({part})" if part else "")
                        pair = it["peak_allocated"][0] / MIB, it["peak_reserved"][0] / MIB
                        found[name] = pair
        return found


class Session:
    """What came of a session."""

    def __init__(self, suite, result):
        self.suite = suite
        self.ret = result.ret
        self.out = result.stdout.str()
        self.err = result.stderr.str()
        self.outcomes = {}
        with suppress(ValueError):  # a session without a last line
            self.outcomes = result.parseoutcomes()

    @property
    def flat(self):
        """The output with wrapped lines joined."""
        return " ".join(self.out.split())

    @property
    def table(self):
        """The rows of the summary's table, by test: a dict of columns each."""
        lines = self.out.splitlines()
        heads = [i for i, line in enumerate(lines) if re.match(r"test +allocated", line)]
        if not heads:
            return {}
        rule = lines[heads[0] + 1]
        spans = [m.span() for m in re.finditer(r"-+", rule)]
        spans[-1] = (spans[-1][0], 200)
        titles = lines[heads[0]].split()
        rows, prefix, device, whole = {}, "", {}, ""
        for line in lines[heads[0] + 2 :]:
            if not line.strip():
                break
            head = re.fullmatch(r"([^ ]+[.]py)? ?(?:on ([^ ]+))?", line)
            if head:
                prefix = f"{head[1]}::" if head[1] else ""
                device = {"device": head[2]} if head[2] else {}
                continue
            cells = [line[a:b].strip() for a, b in spans]
            name = f"{prefix}{cells[0]}"
            if cells[0].startswith("("):
                name = f"{whole} {cells[0]}"
            else:
                whole = name
            rows[name] = dict(zip(titles[1:], cells[1:], strict=True)) | device
        return rows

    def figures(self):
        """Peak allocated and reserved in MiB, by test."""
        return {k: (float(v["allocated"]), float(v["reserved"])) for k, v in self.table.items()}

    def verdicts(self):
        return {name: row["verdict"] for name, row in self.table.items()}
