"""``--gpumem-all``: a suite without markers, held as it stands."""

import json

import pytest

from pytest_gpumem.session import settings as settings_module

LIBRARY = """
import os, unittest

HAS_GPU = torch.cuda.is_available()
WIDTH = int(os.environ.get("WIDTH", "8"))

@pytest.fixture(scope="module")
def model():
    return mib(4, "cuda")

@pytest.mark.skipif(not HAS_GPU, reason="test requires CUDA")
def test_step(model):
    mib(WIDTH, "cuda")

@pytest.mark.parametrize("size", [1, 2])
def test_sizes(size):
    mib(size, "cuda")

class TestCase(unittest.TestCase):
    def test_method(self):
        mib(3, "cuda")

def test_of_the_cpu():
    assert torch.ones(3).sum() == 3

def test_of_no_tensor():
    pass

@pytest.mark.gpu_memory(max_gib=1)
def test_marked():
    mib(5, "cuda")
"""
PEAKS = {
    "test_step": (12, 40),
    "test_sizes[1]": (1, 2),
    "test_sizes[2]": (2, 20),
    "TestCase::test_method": (3, 20),
    "test_marked": (5, 20),
}


@pytest.fixture
def library(suite):
    suite.write("test_it.py", LIBRARY)
    return suite


def recorded(suite):
    return {nodeid.partition("::")[2]: peaks for nodeid, peaks in suite.baselined().items()}


def test_every_test_that_takes_memory_is_measured_and_the_others_are_left_alone(library):
    session = library.run("--gpumem-all", "--gpumem-update-baselines", "-v")
    assert session.outcomes == {"passed": 7}
    assert recorded(library) == PEAKS
    assert "test_of_the_cpu" not in session.out.split("Peak memory")[-1]
    assert "allocated no memory" not in session.out


AT_THE_TOP = """
LARGE = torch.ones(4 << 20, device="cuda")
IDS = torch.tensor([[0, 2]], device="cuda")
CLASSES = torch.nn.functional.one_hot(IDS)

@pytest.mark.parametrize("ids", [IDS])
def test_values(ids):
    assert ids.tolist() == [[0, 2]]

def test_sizes():
    assert CLASSES.shape == (1, 2, 3)

def test_large():
    assert LARGE.sum().item() == 4 << 20
"""


def test_tensors_that_a_file_makes_while_it_is_collected_have_values(suite):
    for name in ("test_one", "test_two"):
        suite.write(f"{name}.py", AT_THE_TOP)
    assert suite.run("--gpumem-all").outcomes == {"passed": 6}
    assert suite.run("--gpumem-all", "--gpumem-values=off").outcomes == {"failed": 6}


def test_one_line_of_the_ini_file_does_it_and_a_planted_growth_fails(library, monkeypatch):
    library.write("pytest.ini", "[pytest]\ngpumem_all = true\n")
    library.run("--gpumem-update-baselines")
    assert recorded(library) == PEAKS
    assert library.run().outcomes == {"passed": 7}
    monkeypatch.setenv("WIDTH", "16")
    session = library.run()
    assert session.outcomes == {"passed": 6, "failed": 1}
    assert "test_it.py" in session.out
    assert "+8.00 MiB" in session.out


def test_patterns_narrow_it_in_toml_too(library):
    library.write(
        "pyproject.toml",
        """
        [tool.pytest.ini_options]
        gpumem_all = ["test_it.py::test_sizes*", "other/*"]
    """,
    )
    library.run("--gpumem-update-baselines")
    assert set(recorded(library)) == {"test_sizes[1]", "test_sizes[2]", "test_marked"}


@pytest.mark.parametrize("word", ["false", "0", ""])
def test_it_can_be_turned_off_on_the_command_line(library, word):
    library.write("pytest.ini", "[pytest]\ngpumem_all = true\n")
    library.run("-o", f"gpumem_all={word}", "--gpumem-update-baselines")
    assert set(recorded(library)) == {"test_marked"}


def test_a_path_after_it_names_tests_as_always(library):
    """It is no value of the option, by which nothing would be held, in silence."""
    library.write("other/test_other.py", "def test_other(): raise ValueError")
    session = library.run("--gpumem-all", "test_it.py", "--gpumem-update-baselines")
    assert session.outcomes == {"passed": 7}
    assert recorded(library) == PEAKS


def test_the_markers_expression_selects_them(library):
    session = library.run("-o", "gpumem_all=test_it.py::TestCase*", "-m", "gpu_memory", "-v")
    assert session.outcomes == {"passed": 2, "deselected": 5}


def test_defaults_of_a_folder_hold_for_them(library):
    library.write(
        "conftest.py",
        """
        def pytest_gpumem_defaults(item):
            if item.originalname == "test_sizes":
                return {"card": "T4", "tolerance": "1MiB"}
    """,
    )
    library.run("--gpumem-all", "--gpumem-update-baselines")
    (of_t4,) = (text for path, text in library.baselines().items() if "virtual-T4" in path)
    assert set(json.loads(of_t4)["tests"]) == {"test_sizes[1]", "test_sizes[2]"}


def test_workers_measure_the_same(library):
    library.run("--gpumem-all", "--gpumem-update-baselines")
    session = library.run_warm("--gpumem-all", "-n", "2", "--gpumem-missing-baseline=fail")
    assert session.outcomes == {"passed": 7}


def test_the_command_that_accepts_a_figure_has_the_option(library, monkeypatch):
    library.run("--gpumem-all", "--gpumem-update-baselines")
    monkeypatch.setenv("WIDTH", "16")
    assert "--gpumem-all --gpumem-update-baselines" in library.run("--gpumem-all").flat


def test_without_a_device_tests_run_unmeasured_which_is_said_and_fails_in_ci(suite, monkeypatch):
    source = "def test_a(): pass\n\ndef test_b(): pass"
    session = suite.run("--gpumem-all", "--gpumem-device=none", source=source)
    assert session.outcomes == {"passed": 2}
    assert "2 unmarked tests were not measured (--gpumem-all)" in session.flat
    monkeypatch.setattr(settings_module.Settings, "absent_device_fails", True)
    session = suite.run("--gpumem-all", "--gpumem-device=none", "-q")
    assert session.outcomes == {"passed": 2}
    assert session.ret == 1
    assert "2 unmarked tests were not measured" in session.flat
