"""Fixtures and hooks of the tests: sessions of pytest inside this process, on the virtual GPU.

Importing torch takes seconds, so this process imports it once, and inner sessions use that import.
On a machine with a real GPU these tests use the virtual GPU as well; tests/gpu uses the real one
(``pytest tests/gpu --gpumem-device=cuda``).
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import pkgutil
import sys

import hypothesis
import pytest
from helpers import installed_packages, known_driver, known_plugins
from helpers.hangs import ended_where_hanging
from helpers.hidden_heap import hide_objects
from helpers.paths import TESTS
from helpers.standin import built_standin
from helpers.suites import Suite
from helpers.virtual_gpu import CARD_80GIB, virtual_card, virtual_device
from helpers.warm import SHARED, warm_python

import pytest_gpumem
from pytest_gpumem.cli import main
from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.devices.virtual.cudnn_notes import keep_no_plans
from pytest_gpumem.devices.virtual.device import VirtualDevice
from pytest_gpumem.devices.virtual.inherited import TRITON
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.meter.meter import Meter

# No example may fail because of time: on a busy machine, drawing one takes seconds.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

pytest.register_assert_rewrite(
    "helpers.hint_suite",
    "helpers.recorded_runs",
    "helpers.spec_marks",
    "helpers.terminal_results",
)


def pytest_configure(config):
    # Inner sessions must not see CI, where tests without a baseline fail. The variable is removed
    # here, before fixtures of any scope run sessions.
    os.environ.pop("CI", None)
    installed_packages.read_once()
    known_plugins.look_through_once()
    known_driver.ask_once()
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        os.environ[SHARED] = warm_python()
    keep_no_plans()  # tests on different cards run in one process
    if config.getoption("gpumem_device", None) != "cuda":
        try:
            VirtualDevice.load(find_card("H100"))
        except DeviceError as error:
            config.stash[OBSTACLE] = str(error)


OBSTACLE = pytest.StashKey[str]()
LONGEST = (
    "docs/test_config_model_page.py",
    "cli/test_config_model.py",
    "report/page/test_html_browser.py",
    "project/test_random_suites.py",
    "devices/virtual/test_processes.py",
    "cli/test_run_as_a_test.py",
    "cli/test_main.py",
    "devices/virtual/compilation/test_graph_values.py",
    "devices/virtual/test_programs.py",
    "devices/virtual/test_missing_libraries.py",
    "devices/virtual/compilation/test_kernel_timing.py",
    "project/test_scale.py",
    "devices/virtual/native/test_sanitizers.py",
    "docs/test_tutorial.py",
    "devices/virtual/test_compiler.py",
    "project/test_packaging.py",
    "docs/test_sphinx.py",
    "recording/test_allocator_view.py",
    "recording/test_collector.py",
    "cli/test_accept.py",
    "cli/test_bisect.py",
    "devices/virtual/compilation/test_time_ranges.py",
    "devices/virtual/test_visibility.py",
    "plugin/test_devices.py",
    "plugin/test_stale_hooks.py",
    "plugin/test_order.py",
    "devices/virtual/test_operators.py",
    "cli/test_verify.py",
    "plugin/test_remote_workers.py",
    "plugin/test_visible.py",
)
"""test files that take many seconds each, the longest first"""


SLOW = {
    line.partition("  # ")[0]
    for line in (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}
"""test files, and tests, that only ``tests/run.sh --all`` runs"""


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(config, items):
    """Mark slow tests, and let workers begin with the longest files.

    ``tests/run.sh`` gives each file to one worker, in this order. If a long file came last, all
    other workers would wait for it at the end.
    """
    begin = f"{TESTS}{os.sep}"
    for item in items:
        path = str(item.path).removeprefix(begin)
        test = f"{path}::{item.name}"
        if SLOW & {path, test, test.partition("[")[0]}:
            item.add_marker("slow")
    if hasattr(config, "workerinput"):
        places = {str(TESTS / name): place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(str(item.path), len(LONGEST)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Disable writing bytecode from now on, here and in processes that tests start.

    Python compares only the size of a source, and its time in seconds, with those in the bytecode:
    a test that writes a module twice within a second could import the first version again.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


LEFT_ALONE = {"CUDA_MODULE_LOADING", TRITON}
"""variables that later tests may need: a process sets up CUDA only once, and a module's fixture
that opens the virtual GPU sets Triton's path of the driver for all tests of the module"""
MAX_OBJECTS = 60_000
"""number of objects tracked by the garbage collector above which :func:`hide_objects` is called
again: some tests import large libraries (mypy, Inductor)"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Restore the environment and the collector's threshold; end the process if the test hangs.

    Inductor sets TRITON_CACHE_DIR and does not unset it: each later process would be a new
    interpreter, which takes two seconds, instead of a fork of the warm process. mypy raises the
    threshold: the peak of a later test then included garbage of its compilation.
    """
    environment = {name: os.environ[name] for name in os.environ.keys() - LEFT_ALONE}
    threshold = gc.get_threshold()
    with ended_where_hanging():
        result = yield
    gc.set_threshold(*threshold)
    for name in os.environ.keys() - environment.keys() - LEFT_ALONE:
        del os.environ[name]
    os.environ.update(environment)
    # Between two files no fixture holds a tensor. Tensors must not be hidden.
    between_files = nextitem is not None and nextitem.path != item.path
    if between_files and "torch" in sys.modules and len(gc.get_objects()) > MAX_OBJECTS:
        hide_objects()
    return result


@pytest.fixture(scope="session")
def virtual_gpu(request):
    """Torch, imported in this process over the virtual GPU."""
    if OBSTACLE in request.config.stash:
        pytest.skip(request.config.stash[OBSTACLE])
    import torch

    # pytest imports a plugin's modules with a loader that refers to the session's config, and thus
    # to all that its tests hold. Import them now, so that no inner session's loader stays alive.
    for module in pkgutil.walk_packages(pytest_gpumem.__path__, "pytest_gpumem."):
        if ".native." not in module.name:  # a library, no module
            importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")  # the first optimizer would import it
    hide_objects()
    return torch


@pytest.fixture(scope="session")
def standin(tmp_path_factory):
    """The folder to put on a process's path so that it imports the stand-in accelerator."""
    return built_standin(tmp_path_factory)


@pytest.fixture(autouse=True)
def default_card():
    """Restore the card that sessions and commands in this process may change."""
    device = VirtualDevice.loaded()
    card = device and device.card
    yield
    if device:
        device.card = card


@pytest.fixture
def torch():
    """Torch on this process's virtual GPU, without the imports that inner sessions need."""
    virtual_device()
    import torch

    return torch


@pytest.fixture
def meter():
    """A measurement that has begun, on a card of 80 GiB."""
    with virtual_card(CARD_80GIB) as device:
        meter = Meter(device, device.open(CARD_80GIB, 1), 1)
        meter.start()
        try:
            yield meter
        finally:
            meter.stop()
            device.open(CARD_80GIB, 1)


@pytest.fixture
def modules_kept(monkeypatch):
    """Make a pytester created later unload only test modules: Triton cannot be loaded twice."""
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot", _TestModulesOnly)


@pytest.fixture
def suite(modules_kept, pytester, virtual_gpu, monkeypatch):
    """A folder of test files, and sessions in this process that run them."""
    monkeypatch.setenv("COLUMNS", "140")
    github = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE")
    for name in ("CI", "BUILD_NUMBER", *github):  # pytest truncates nothing if these are set
        monkeypatch.delenv(name, raising=False)
    yield Suite(pytester)
    gc.collect()
    virtual_gpu.cuda.empty_cache()  # else an unmarked test could use the cached memory


class _TestModulesOnly:
    """Replaces pytester's snapshot: unloads test modules, keeps modules that torch imports late."""

    def __init__(self, preserve=None):
        self._before = set(sys.modules)

    def restore(self):
        for name in set(sys.modules) - self._before:
            if name.partition(".")[0].startswith(("test_", "conftest", "helper")):
                vars(sys.modules.pop(name)).clear()  # also frees tensors in its globals


@pytest.fixture
def busy_clock(monkeypatch):
    """Return a function; once it is called, 100 s pass between any two looks at the clock."""
    leaps = itertools.count(step=100)
    return lambda: monkeypatch.setattr("time.monotonic", lambda: next(leaps))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, and a terminal of 80 columns."""
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
