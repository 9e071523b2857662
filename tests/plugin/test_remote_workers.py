"""Workers that pytest-xdist starts by ``--tx``, as on other machines: by execnet, over loopback."""

from __future__ import annotations

import pytest
from helpers.warm import warm_python

from pytest_gpumem.report.json_report import read_report

pytest.importorskip("xdist")

THREE = """
@pytest.mark.parametrize("number", range(3))
@pytest.mark.gpu_memory
def test_numbered(number):
    mib(22 + 2 * number)
"""
REMOTE = "--tx", f"popen//python={warm_python()}//chdir=."
SENTENCE = "workers on other machines may test other code: no baselines are written"


def test_figures_of_workers_elsewhere_make_no_baselines(suite, gpumem):
    """They may be of other code: another commit may be checked out there."""
    options = (*REMOTE, *REMOTE, "--dist=load", "--gpumem-json=r.json")
    session = suite.run_warm(*options, source=THREE)
    assert (session.ret, SENTENCE in session.flat) == (0, True)
    assert len(read_report(suite.path / "r.json").results) == 3
    status, _, err = gpumem("accept", "r.json", "--yes")
    assert (status, suite.baselines()) == (2, {})
    assert "r.json: is from a run that did not finish: pytest-xdist's workers on other" in err
    session = suite.run_warm(*options, "--gpumem-update-baselines")
    assert (session.ret, SENTENCE in session.flat) == (1, True)
    assert suite.baselines() == {}


def test_a_session_without_marked_tests_says_nothing_of_its_workers(suite):
    session = suite.run_warm(*REMOTE, "--dist=load", source="def test_it(): pass")
    assert (session.ret, SENTENCE in session.flat) == (0, False)


@pytest.mark.parametrize(
    ("workers", "names"),
    [(["-n2"], ("gw0", "gw1")), (["--tx=popen//id=one", "--tx=popen//id=two"], ("one", "two"))],
)
def test_where_all_workers_run_all_tests_the_figures_are_those_of_the_first(suite, workers, names):
    source = """
        import os

        @pytest.mark.gpu_memory
        def test_own():
            mib({"FIRST": 30, "SECOND": 90}[os.environ["PYTEST_XDIST_WORKER"]])
    """.replace("FIRST", names[0]).replace("SECOND", names[1])
    session = suite.run_warm(
        *workers, "--dist=each", "--gpumem-update-baselines", "--gpumem-json=r.json", source=source
    )
    assert session.ret == 0
    assert suite.baselined() == {"test_it.py::test_own": (30, 30)}
    assert len(read_report(suite.path / "r.json").results) == 1
