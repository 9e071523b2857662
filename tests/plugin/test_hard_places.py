"""Sessions in hard places: workers that die, odd folders, other options of pytest."""

from __future__ import annotations

import os

import pytest

UPDATE = "--gpumem-update-baselines"
NUMBERED = """
import os

@pytest.mark.parametrize("number", range(4))
@pytest.mark.gpu_memory
def test_numbered(number):
    mib(22 + 2 * number)
    if number == 2 and "DIE" in os.environ:
        os._exit(9)
"""
ALL = {f"test_it.py::test_numbered[{number}]": (22 + 2 * number,) * 2 for number in range(4)}


def test_a_worker_that_dies_costs_its_own_test(suite, monkeypatch):
    monkeypatch.setenv("DIE", "1")
    session = suite.run_warm(UPDATE, "-n2", source=NUMBERED)
    assert session.ret == 1
    assert "crashed while running 'test_it.py::test_numbered[2]'" in session.flat
    names = {name for name in ALL if "[2]" not in name}
    assert set(suite.baselined()) == names


@pytest.mark.parametrize(
    "mode", ["load", "loadscope", "loadfile", "loadgroup", "worksteal", "each"]
)
def test_every_distribution_measures_the_same(suite, mode):
    session = suite.run_warm(UPDATE, "-n2", f"--dist={mode}", source=NUMBERED)
    assert session.ret == 0
    assert suite.baselined() == ALL


def test_a_root_behind_a_link_with_a_name_in_other_scripts(suite):
    suite.write("Größe 数 🎉/test_it.py", f"import pytest, torch\n{MIB}\n{NUMBERED}")
    (suite.path / "link").symlink_to("Größe 数 🎉")
    session = suite.run(UPDATE, "--rootdir=link", "link/test_it.py")
    assert session.outcomes == {"passed": 4}
    assert suite.baselined("Größe 数 🎉/baselines") == ALL
    os.chdir(suite.path / "Größe 数 🎉")
    session = suite.run("--rootdir=.")
    assert set(session.verdicts().values()) == {"ok"}


MIB = """
def mib(n):
    return torch.empty(n << 20, dtype=torch.uint8, device="cuda")
"""


def test_options_that_stop_and_resume_a_session_record_what_ran(suite, monkeypatch):
    failing = NUMBERED.replace("os._exit(9)", "assert False")
    monkeypatch.setenv("DIE", "1")
    first = suite.run(UPDATE, "-x", source=failing)
    assert first.outcomes == {"passed": 2, "failed": 1}
    assert len(suite.baselined()) == 2
    monkeypatch.delenv("DIE")
    assert suite.run(UPDATE, "--lf").outcomes["passed"] == 1
    assert len(suite.baselined()) == 3
    monkeypatch.setenv("DIE", "1")
    assert suite.run("--sw").outcomes["failed"] == 1
    monkeypatch.delenv("DIE")
    assert suite.run(UPDATE, "--sw").outcomes == {"passed": 2, "deselected": 2}
    assert suite.baselined() == ALL


HIDDEN_FIRST = """
def test_unmarked():
    mib(1)

@pytest.mark.gpu_memory
def test_marked():
    blocks = [mib(20), mib(1)]
"""


def test_an_unmarked_test_that_uses_cuda_first_is_refused_and_costs_no_other(suite, monkeypatch):
    """With expandable segments PyTorch's allocator ended the session with a segmentation fault."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    session = suite.run_warm(UPDATE, source=HIDDEN_FIRST)
    assert (session.outcomes["failed"], session.outcomes["passed"]) == (1, 1)
    assert "No CUDA GPUs are available: the virtual GPU is visible only inside" in session.flat
    assert suite.baselined() == {"test_it.py::test_marked": (21, 22)}


def test_doctests_beside_marked_tests_see_no_gpu(suite):
    suite.write(
        "model.py",
        '''
        """A model.

        >>> import torch
        >>> torch.cuda.is_available()
        False
        """
    ''',
    )
    session = suite.run("--doctest-modules", UPDATE, source=NUMBERED)
    assert session.outcomes == {"passed": 5}
    assert suite.baselined() == ALL


def test_a_conftest_file_that_initialises_cuda(suite):
    """It sees no GPU, as without the plugin, unless all code of the session is to see one."""
    suite.write("conftest.py", "import torch\ntorch.cuda.init()")
    session = suite.run_warm(source=NUMBERED)
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    message = (
        "RuntimeError: No CUDA GPUs are available: the virtual GPU is visible only inside tests"
    )
    assert message in " ".join((session.err + session.out).split())
    assert "--gpumem-visible=session" in session.err + session.out
    session = suite.run_warm("--gpumem-visible=session")
    assert session.outcomes == {"passed": 4}
