"""Progress of a long search: a line for each probe, past pytest's capture."""

from __future__ import annotations

from functools import partial

from pytest_gpumem.fit.prober import Prober

SEARCHES = """
    @pytest.mark.gpu_memory(max_gib=1)
    def test_it(gpu_memory):
        assert gpu_memory.largest(lambda size: mib(20 * size)).value == 51
"""
LINE = ".py::test_it: probe 1: 1 fits, 20.00 MiB of 1024.00 MiB reserved"


def test_a_search_shows_its_probes_while_the_test_runs(suite, monkeypatch):
    at_once = partial(Prober, patience=-1.0)
    monkeypatch.setattr("pytest_gpumem.testrun.fixture.Prober", at_once)
    session = suite.run(source=SEARCHES)
    assert session.outcomes == {"passed": 1}
    assert LINE in session.out
    assert session.out.index(LINE) < session.out.index("1 passed")


def test_a_short_search_shows_none(suite, monkeypatch):
    """Seconds are long here: a busy machine makes no search a long one."""
    patient = partial(Prober, patience=3600.0)
    monkeypatch.setattr("pytest_gpumem.testrun.fixture.Prober", patient)
    assert "probe 1" not in suite.run(source=SEARCHES).out
