"""Who sees the virtual GPU: marked tests alone, or all code of a session."""

from __future__ import annotations

import pytest
from helpers.sources import program

from pytest_gpumem.devices.virtual.device import VirtualDevice

LIBRARY_SUITE = program("library_suite.py")
FIGURES = dict.fromkeys(
    ["test_condition", "TestCase::test_method", "TestOther::test_decorated", "test_device"],
    (100, 100),
)
SEEN = "gpumem: all code of this session sees it; tests without the marker see zero-filled tensors"


@pytest.fixture(autouse=True)
def hidden_again():
    yield
    assert VirtualDevice.loaded().shown_always == 0


def test_a_library_s_suite_runs_as_it_stands_where_the_session_sees_the_gpu(suite):
    session = suite.run("--gpumem-visible=session", "-v", source=LIBRARY_SUITE)
    assert session.outcomes == {"passed": 7}
    assert session.figures() == {**FIGURES, "test_card": (100, 100)}
    assert SEEN in session.flat
    suite.write("pytest.ini", "[pytest]\ngpumem_visible = session:2")
    suite.write("test_it.py", f"{LIBRARY_SUITE}\nassert torch.cuda.device_count() == 2\n")
    session = suite.run("-v")
    assert session.figures() == {**FIGURES, "test_card": (100, 100)}
    assert "all code of this session sees 2 of them" in session.flat
    import torch

    assert not torch.cuda.is_available()


def test_the_default_says_which_tests_a_hidden_gpu_has_skipped(suite):
    suite.write(
        "test_whole.py",
        """
        if not torch.cuda.is_available():
            pytest.skip("no GPU", allow_module_level=True)

        @pytest.mark.gpu_memory
        def test_never(): pass
        """,
    )
    suite.write("test_other.py", "@pytest.mark.skip(reason='slow')\ndef test_slow(): pass")
    session = suite.run("--gpumem-markdown=report.md", source=LIBRARY_SUITE)
    asked = "looked for GPUs during its import, when no GPU was visible; --gpumem-visible=session"
    assert (
        f"gpumem: 3 marked tests were skipped (test requires CUDA): test_it.py:11 {asked}"
        in session.flat
    )
    whole = f"gpumem: 1 file of marked tests was skipped (no GPU): test_whole.py:6 {asked}"
    assert whole in session.flat
    assert "1 file of marked tests was skipped (no GPU)" in (suite.path / "report.md").read_text()
    assert "slow" not in session.out
    # The test that measured the CPU says so as well, and makes no baseline.
    assert "and test_it.py:11 looked for GPUs during its import" in session.flat
    assert SEEN not in session.flat
    workers = suite.run_warm("-n1", source=LIBRARY_SUITE)
    assert (
        f"gpumem: 3 marked tests were skipped (test requires CUDA): test_it.py:11 {asked}"
        in workers.flat
    )
    assert whole in workers.flat
    shown = suite.run_warm("-n1", "--gpumem-visible=session")
    assert shown.outcomes == {"passed": 8, "skipped": 1}
    assert "when no GPU was visible" not in shown.flat


def test_a_skip_for_another_reason_is_not_told(suite):
    source = """
    HAS_GPU = torch.cuda.is_available()

    @pytest.mark.gpu_memory
    def test_decides():
        pytest.skip("not today")
    """
    assert "--gpumem-visible" not in suite.run(source=source).out
    helper = "import torch\nANY = torch.cuda.is_available()"
    suite.write("helper_module.py", helper)
    source = """
    import helper_module

    @pytest.mark.skip(reason="flaky")
    @pytest.mark.gpu_memory
    def test_other_reason(): pass
    """
    suite.write("test_second.py", source)
    assert "--gpumem-visible" not in suite.run("test_second.py").out
    suite.write("test_second.py", source.replace("flaky", "needs a GPU"))
    session = suite.run("test_second.py")
    assert "(needs a GPU): test_second.py:6 looked for GPUs" in session.flat


def test_a_conftest_file_s_virtual_gpu_has_the_same_figures(suite):
    suite.write("conftest.py", "import pytest_gpumem\n\npytest_gpumem.use_virtual_gpu('L4')\n")
    source = LIBRARY_SUITE.replace("> 70", "< 24")
    session = suite.run_apart("-v", source=source)
    assert session.outcomes == {"passed": 7}
    assert session.figures() == {**FIGURES, "test_card": (100, 100)}
    assert "gpumem: virtual GPU L4" in session.out
    session = suite.run_warm("--gpumem-card=A100-80GB", "-k", "test_device")
    assert "gpumem: virtual GPU A100-80GB" in session.out


@pytest.mark.parametrize("value", ["always", "session:0", "session:17", "session:", "test:2"])
def test_a_bad_value_says_what_to_write(suite, value):
    session = suite.run(f"--gpumem-visible={value}", source=LIBRARY_SUITE)
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        f"--gpumem-visible={value}: this is not a valid choice; write test, session" in session.err
    )


def test_each_test_begins_with_the_environment_that_child_processes_need(suite):
    source = """
import os

NAMES = ("GPUMEM_VIRTUAL", "LD_PRELOAD")

@pytest.mark.gpu_memory
def test_first():
    mib(1)
    for name in NAMES:
        del os.environ[name]

@pytest.mark.gpu_memory
def test_second():
    mib(1)
    assert all(name in os.environ for name in NAMES)
"""
    session = suite.run_warm("--gpumem-visible=session", source=source)
    assert session.outcomes == {"passed": 2}, session.out
