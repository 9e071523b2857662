"""Tests with subtests: what one leaves in its frames goes with it, and each is reported once."""

import sys

import pytest

pytest.importorskip("_pytest.subtests", reason="subtests came with pytest 9")

SUBTESTS = """
import unittest

def works(ends):
    kept = mib(6)
    ends()

def fails():
    raise ValueError("no")

def skips():
    pytest.skip("not here")

def xfails():
    pytest.xfail("known")

@pytest.mark.gpu_memory(max_leak_mib=0)
@pytest.mark.parametrize("ends", [skips, xfails, fails], ids=lambda end: end.__name__)
def test_fixture(subtests, ends):
    for number in range(3):
        with subtests.test(number=number):
            works(ends)

class TestUnit(unittest.TestCase):
    @pytest.mark.gpu_memory(max_leak_mib=0)
    def test_unit(self):
        for number in range(3):
            with self.subTest(number=number):
                works(lambda: self.skipTest("not here") if number else fails())
"""


def test_what_a_subtest_kept_is_freed_when_it_has_ended(suite):
    session = suite.run("-v", source=SUBTESTS)
    figures = session.figures()
    # Before Python 3.11 unittest itself keeps the error of a subtest until the test has ended.
    kept = 12 if sys.version_info < (3, 11) else 6
    assert figures.pop("TestUnit::test_unit") == (kept, 20), session.out
    assert set(figures.values()) == {(6, 20)}, session.out
    assert "leaked" not in session.out


def test_so_it_is_where_the_test_is_not_marked(suite):
    source = """
    HELD = []

    def works():
        kept = mib(6)
        pytest.skip("not here")

    def test_plain(subtests):
        for _ in range(3):
            with subtests.test():
                works()
            HELD.append(torch.cuda.memory_allocated())

    @pytest.mark.gpu_memory
    def test_marked():
        assert HELD == [0, 0, 0]
    """
    session = suite.run("--gpumem-visible=session", "-p", "no:randomly", source=source)
    assert session.outcomes.get("passed") == 2, session.out


def test_a_debugger_sees_the_frames_of_a_subtest_that_failed(suite):
    suite.write(
        "conftest.py",
        """
        def pytest_exception_interact(call):
            frame = call.excinfo.traceback[-2].frame
            print("seen", frame.f_locals["kept"].numel() >> 20)
        """,
    )
    session = suite.run("-s", "-k", "fails", source=SUBTESTS)
    assert session.out.count("seen 6") == 3, session.out


def test_a_further_run_reports_no_subtest(suite):
    """A test over its budget runs again to say why; pytest counts the subtests of the first run."""
    source = """
    @pytest.mark.gpu_memory(max_gib=0.03)
    def test_it(subtests):
        for number in range(2):
            with subtests.test(number=number):
                assert number
        for number in range(2):
            with subtests.test(number=number):
                pass
        kept = [mib(9) for _ in range(9)]
    """
    session = suite.run("-vv", source=source)
    assert session.out.count("SUBPASSED") == 3, session.out
    assert "3 subtests passed" in session.out, session.out
