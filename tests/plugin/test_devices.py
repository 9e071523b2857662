"""Which device there is, who sees it, and what is said where there is none."""

from __future__ import annotations

import os
import sys
import warnings

import pytest

import pytest_gpumem
from pytest_gpumem.devices.virtual.device import WHAT, VirtualDevice
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.plugin.device_choice import SETTINGS

MARKED = """
import pytest

@pytest.mark.gpu_memory
def test_marked():
    import torch
    assert torch.cuda.is_available()

def test_plain():
    pass
"""


def test_a_device_that_is_switched_off_skips_with_the_reason(suite):
    session = suite.run("-rs", "--gpumem-device=none", source=MARKED)
    assert session.outcomes == {"passed": 1, "skipped": 1}
    assert "gpumem: no device, so marked tests are skipped: switched off" in session.flat
    assert "SKIPPED [1] test_it.py:3: gpumem: switched off by --gpumem-device=none" in session.flat
    assert "gpumem: 1 skipped: switched off by --gpumem-device=none" in session.out


def test_a_bad_marker_is_an_error_even_where_there_is_no_device(suite):
    source = MARKED.replace("gpu_memory", "gpu_memory(max_gb=1)")
    session = suite.run("--gpumem-device=none", source=source)
    assert session.outcomes == {"passed": 1, "errors": 1}


@pytest.fixture
def cpu_only(suite, monkeypatch):
    """A torch that is built without CUDA, in front of the real one."""
    suite.write("fakes/torch/__init__.py", "from torch.version import __version__")
    suite.write("fakes/torch/version.py", '__version__ = "2.15.0+cpu"\ncuda = None')
    before = [str(suite.path / "fakes"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, before)))
    return suite


def test_a_build_of_torch_without_cuda_skips_or_errs_where_a_device_is_demanded(cpu_only):
    session = cpu_only.run_apart("-rs", source=MARKED)
    assert session.outcomes == {"passed": 1, "skipped": 1}
    assert "torch 2.15.0+cpu is built without CUDA" in session.flat
    assert "gpumem: 1 skipped: there is no GPU here, and no virtual GPU" in session.flat
    session = cpu_only.run_apart("--gpumem-device=virtual")
    assert session.outcomes == {"passed": 1, "errors": 1}
    assert "torch 2.15.0+cpu is built without CUDA; install a CUDA build" in session.flat


@pytest.fixture
def unloadable(suite, monkeypatch):
    """A virtual GPU whose library cannot be loaded."""

    def refused(_card):
        raise DeviceError(WHAT, "its library cannot be loaded: libgpumem.so: no such file", "build")

    monkeypatch.setattr(VirtualDevice, "load", refused)
    suite.write("test_it.py", MARKED)
    return suite


@pytest.mark.parametrize(
    ("ci", "option", "outcome"),
    [
        ("1", "auto", "errors"),
        ("false", "auto", "skipped"),
        ("", "auto", "skipped"),
        ("1", "none", "skipped"),
    ],
)
def test_in_ci_a_marked_test_without_a_device_fails_unless_none_is_meant(
    unloadable, monkeypatch, ci, option, outcome
):
    monkeypatch.setenv("CI", ci)
    session = unloadable.run(f"--gpumem-device={option}")
    assert session.outcomes == {"passed": 1, outcome: 1}
    assert session.ret == (outcome == "errors")
    if outcome == "errors":
        assert "no device, so marked tests fail, because CI is set: there is" in session.flat
        assert "libgpumem.so: no such file; build. CI is set, so a marked test" in session.flat


def test_in_ci_workers_without_a_device_fail_their_marked_tests(cpu_only, monkeypatch):
    monkeypatch.setenv("CI", "1")
    session = cpu_only.run_apart("-q", "-n1", source=MARKED)
    assert session.outcomes == {"passed": 1, "errors": 1}


HELD = """
@pytest.mark.gpu_memory(batch_size=2)
def test_marked():
    mib(20)
"""


def test_a_quiet_session_says_what_was_not_held(suite):
    """In one line, also where it is skipped on purpose; a session that held all adds none."""
    session = suite.run("-q", "--gpumem-device=none", source=HELD)
    assert (
        "gpumem: not compared: 1 skipped (run without -q for the reasons)"
        in session.out.splitlines()
    )
    session = suite.run("-q")
    assert (
        "gpumem: not compared: 1 without baseline (run without -q for the reasons)"
        in session.out.splitlines()
    )
    assert "not compared" not in suite.run("-q", "--gpumem-update-baselines").out
    assert "gpumem" not in suite.run("-q").out
    session = suite.run("-q", source=HELD.replace("batch_size=2", "batch_size=4"))
    assert "gpumem: not compared: 1 with an unusable baseline" in session.out
    assert "not compared" not in suite.run("-q", "--gpumem-missing-baseline=fail").out
    conditions = 'pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")'
    suite.write("test_it.py", f"pytestmark = {conditions}\n{HELD}")
    assert "gpumem: not compared: 1 skipped (run without -q for the reasons)" in suite.run("-q").out


def test_a_real_gpu_that_is_demanded_and_not_there_is_an_error_of_marked_tests(suite, virtual_gpu):
    session = suite.run("--gpumem-device=cuda", source=MARKED)
    assert session.outcomes == {"passed": 1, "errors": 1}
    assert "sees no GPU here; install a CUDA build of torch and a driver, or write" in session.flat


EARLY = """
import {first}
import sys
import pytest
sys.exit(pytest.main(["-p", "no:hypothesispytest", "-rs", *sys.argv[1:]]))
"""


def test_torch_that_was_imported_before_fails_in_ci_and_is_said_with_how_to_go_on(
    suite, monkeypatch
):
    monkeypatch.setenv("CI", "1")
    suite.write("test_it.py", MARKED)
    suite.write("fakes/torch/__init__.py", "")
    suite.write("fakes/torch/version.py", '__version__ = "2.15.0"\ncuda = "13.0"')
    program = "import sys\nsys.path.insert(0, 'fakes')\n" + EARLY.format(first="torch")
    done = suite.python(program)
    out = " ".join(done.out.split())
    assert "1 passed, 1 error" in out
    assert (
        "torch was imported before the virtual GPU could be loaded; load the virtual GPU first: "
        in out
    )
    assert "pytest -p gpumem" in out


def test_loaded_first_the_plugin_is_there_before_another_that_imports_torch(suite):
    """And so in a conftest file, and with torch imported by a test module."""
    suite.write("early_plugin.py", "import torch\nassert not torch.cuda.is_available()")
    suite.write("conftest.py", "import torch\nassert torch.cuda.device_count() == 0")
    load = "pytest_gpumem.plugin" if "-p" in os.environ.get("GPUMEM_LOAD", "") else "gpumem"
    session = suite.run_apart("-p", load, "-p", "early_plugin", source=MARKED)
    assert session.outcomes == {"passed": 2}


LOOKERS = """
import pytest, torch
from torch.cuda import is_available, device_count

assert not is_available()
assert not torch.cuda.is_available()
assert device_count() == torch.cuda.device_count() == 0

@pytest.mark.skipif(not is_available(), reason="no GPU to be seen")
def test_for_a_real_gpu():
    assert False

def test_unmarked():
    assert not is_available()
    assert torch.cuda.device_count() == 0
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="cuda")

@pytest.fixture(scope="module")
def module_wide():
    return is_available()

@pytest.mark.gpu_memory
def test_marked(module_wide):
    assert is_available() and module_wide
    assert device_count() == torch.cuda.device_count() == 1
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="cuda:1")

@pytest.mark.gpu_memory(devices=2)
def test_two():
    assert device_count() == 2
    torch.zeros(1, device="cuda:1")

test_unmarked_again = test_unmarked
"""


def test_the_virtual_gpu_is_visible_in_marked_tests_only(suite):
    session = suite.run(source=LOOKERS)
    assert session.outcomes == {"passed": 4, "skipped": 1}


def test_nothing_of_a_marked_tests_cache_is_left_for_unmarked_ones(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory
        def test_marked():
            small = [torch.ones(1, device="cuda") for _ in range(3)]
            assert small

        def test_unmarked():
            with pytest.raises(RuntimeError):
                torch.zeros(1, device="cuda")
        """
    )
    assert session.outcomes == {"passed": 2}


def test_each_device_has_its_own_memory(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory(devices=2, max_gib=1)
        def test_fits():
            return_none = mib(1000), mib(900, "cuda:1")

        @pytest.mark.gpu_memory(devices=2, max_gib=1)
        def test_does_not():
            kept = mib(100), mib(1100, "cuda:1")
        """
    )
    assert session.outcomes == {"passed": 1, "failed": 1}
    assert session.figures()["test_fits"] == (1000, 1000)
    assert "does not fit in max_gib=1 (1024.00 MiB) on device 1" in session.flat


def test_a_suite_with_no_marked_test_imports_neither_torch_nor_what_reports_need(suite):
    suite.write(
        "conftest.py",
        """
import sys

def pytest_unconfigure():
    heavy = {"torch", "msgspec", "filelock", "tabulate", "ctypes.util"}
    heavy.add("pytest_gpumem.judge.verdict")
    print("IMPORTED", sorted(heavy & set(sys.modules)))
    ours = sorted(name for name in sys.modules if name.startswith("pytest_gpumem"))
    print("OURS", *ours)
""",
    )
    suite.write("test_it.py", "import pytest\n\ndef test_plain(): pass\n")
    session = suite.run_apart("-p", "no:cacheprovider", "-s")
    assert session.outcomes == {"passed": 1}
    assert "IMPORTED []" in session.out
    (ours,) = (line.split()[1:] for line in session.out.splitlines() if line.startswith("OURS"))
    assert "pytest_gpumem.plugin.entry" in ours
    assert "pytest_gpumem.session.memory_session" not in ours
    rooms = {
        "baselines",
        "cli",
        "explain",
        "fit",
        "judge",
        "libraries",
        "meter",
        "replay",
        "report",
    }
    assert not [name for name in ours if name.split(".")[1:2] and name.split(".")[1] in rooms]
    devices = {name for name in ours if name.startswith("pytest_gpumem.devices.")}
    assert devices == {"pytest_gpumem.devices.virtual", "pytest_gpumem.devices.torch_import"}


OF_EACH_END = """
@pytest.mark.gpu_memory
def test_passes(): mib(20)

@pytest.mark.gpu_memory(max_gib=0.01)
def test_runs_out(): mib(20)

@pytest.mark.gpu_memory(max_allocated_gib=0.01)
def test_is_over(): mib(20)

@pytest.mark.gpu_memory
def test_grows(): mib(GROWN)

KEPT = []

@pytest.mark.gpu_memory(max_leak_mib=1)
def test_leaks(): KEPT.append(mib(GROWN))
"""


@pytest.mark.parametrize("explains", [True, False])
def test_what_explains_is_imported_where_it_is_asked_for_and_no_tool_of_the_shell(suite, explains):
    suite.write(
        "conftest.py",
        """
import sys

def pytest_unconfigure():
    print("OURS", *(name for name in sys.modules if name.startswith("pytest_gpumem.")))
""",
    )
    option = f"--gpumem-attribution={'auto' if explains else 'off'}"
    suite.run("--gpumem-update-baselines", option, source=OF_EACH_END.replace("GROWN", "20"))
    session = suite.run_apart("-s", option, source=OF_EACH_END.replace("GROWN", "64"))
    assert session.outcomes == {"passed": 2, "failed": 3, "errors": 1}
    (ours,) = (line.split()[1:] for line in session.out.splitlines() if line.startswith("OURS"))
    rooms = {name.split(".")[1] for name in ours}
    assert "testrun" in rooms
    assert ("explain" in rooms) is explains
    assert "cli" not in rooms


def test_without_the_plugin_the_marker_is_unknown_and_nothing_else_happens(suite):
    name = "pytest_gpumem.plugin" if "pytest_gpumem.plugin" in sys.argv else "gpumem"
    source = "import pytest\n\n@pytest.mark.gpu_memory\ndef test_it(): pass\n"
    session = suite.run_apart("-p", f"no:{name}", "-W", "ignore", source=source)
    assert session.outcomes == {"passed": 1}
    assert "gpumem:" not in session.out


def test_the_version_is_told():
    assert pytest_gpumem.__version__


def test_the_ini_file_wins_over_the_card_of_gpumem_run(suite, monkeypatch):
    """Also where it names the default; and pytest warns of nothing that is deprecated."""
    monkeypatch.setenv("GPUMEM_RUN_CARD", "T4")
    for ini, options, card in [
        ("", (), "T4"),
        ("gpumem_card = H100", (), "H100"),
        ("", ("-ogpumem_card=H100",), "H100"),
        ("gpumem_card = H100", ("--gpumem-card=L4",), "L4"),
    ]:
        suite.write("pytest.ini", f"[pytest]\n{ini}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config = suite.pytester.parseconfig("--gpumem-device=none", *options)
        assert config.stash[SETTINGS].card == card
