"""What the plugin's tests share: sessions of pytest inside this process, on the virtual GPU.

Importing torch takes seconds, so that it is done once in this process, and inner sessions use it.
On a machine with a real GPU these tests take the virtual one as well; tests/gpu takes the real one
(``pytest tests/gpu --gpumem-device=cuda``).
"""

from __future__ import annotations

import gc
import importlib
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

# No example is to fail by the clock: on a busy machine drawing one takes seconds.
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
    # Inner sessions are those of a desk: in CI tests without a baseline fail. Fixtures of every
    # scope have to see that.
    os.environ.pop("CI", None)
    installed_packages.read_once()
    known_plugins.look_through_once()
    known_driver.ask_once()
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        os.environ[SHARED] = warm_python()
    keep_no_plans()  # tests of several cards take turns in a process
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
"""files of tests that take many seconds each, the longest first"""


SLOW = {
    line.partition("  # ")[0]
    for line in (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}
"""files, and tests of files, that only ``tests/run.sh --all`` runs"""


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(config, items):
    """Mark slow tests, and let workers begin with the longest files.

    At the end all workers but one would wait for the last file otherwise: ``tests/run.sh`` gives
    each file to one worker, in this order.
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
    """Let nothing that a test runs write bytecode; what was imported until now has written its own.

    Python takes a module's bytecode for that of its source by the second and the size: a test that
    writes a module twice would import the first one again.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


LEFT_ALONE = {"CUDA_MODULE_LOADING", TRITON}
"""variables that a later test may need: one process sets up CUDA once, and a file's fixture that
opens the virtual GPU tells Triton where the driver is for all tests of the file"""
MAX_OBJECTS = 60_000
"""objects that a collection goes through; libraries that tests import (mypy, Inductor) have more"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Give the environment and the collector's threshold back as they were.

    Inductor sets TRITON_CACHE_DIR for good. Every later process would be a new interpreter then,
    of two seconds, instead of a fork of the warm process. mypy lets the collector run seldom, and
    garbage of a later test's compilation was in its peak. A test that hangs ends the process.
    """
    environment = {name: os.environ[name] for name in os.environ.keys() - LEFT_ALONE}
    threshold = gc.get_threshold()
    with ended_where_hanging():
        result = yield
    gc.set_threshold(*threshold)
    for name in os.environ.keys() - environment.keys() - LEFT_ALONE:
        del os.environ[name]
    os.environ.update(environment)
    # Between two files no fixture holds a tensor, which is not to be hidden.
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

    # pytest loads a plugin's modules with a loader that has the session's config, and by that all
    # that the session's tests hold: none of them is to be an inner session's.
    for module in pkgutil.walk_packages(pytest_gpumem.__path__, "pytest_gpumem."):
        if ".native." not in module.name:  # a library, no module
            importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")  # which the first optimizer imports
    hide_objects()
    return torch


@pytest.fixture(scope="session")
def standin(tmp_path_factory):
    """The folder of the stand-in accelerator's module, which a process may import."""
    return built_standin(tmp_path_factory)


@pytest.fixture(autouse=True)
def default_card():
    """Restore the default card, which sessions and commands within this process change."""
    device = VirtualDevice.loaded()
    card = device and device.card
    yield
    if device:
        device.card = card


@pytest.fixture
def torch():
    """Torch over this process's virtual GPU, without what the plugin's sessions need."""
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
    """Let pytester, made after this, unload nothing but test modules: Triton loads once only."""
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot", _TestModulesOnly)


@pytest.fixture
def suite(modules_kept, pytester, virtual_gpu, monkeypatch):
    """A folder of test files, and sessions in this process that run them."""
    monkeypatch.setenv("COLUMNS", "140")
    github = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE")
    for name in ("CI", "BUILD_NUMBER", *github):  # pytest shortens nothing where these are set
        monkeypatch.delenv(name, raising=False)
    yield Suite(pytester)
    gc.collect()
    virtual_gpu.cuda.empty_cache()  # or it would serve an unmarked test, which sees no GPU


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
