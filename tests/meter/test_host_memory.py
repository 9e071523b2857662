"""The process's own memory: how much it grows in a test, and its limit."""

from __future__ import annotations

import json

import pytest

from pytest_gpumem.meter import host_memory
from pytest_gpumem.meter.host_memory import HostWatch
from pytest_gpumem.sizes import MIB

LOAD = """
def load(nbytes):
    return bytearray(nbytes)  # every page is written

"""


def test_the_growth_is_the_highest_above_the_beginning():
    kept = bytearray(64 * MIB)
    gone = bytearray(256 * MIB)
    del gone
    watch = HostWatch()
    watch.start()
    assert watch.peak() < 8 * MIB
    more = bytearray(128 * MIB)
    del more
    assert 120 * MIB < watch.peak() < 160 * MIB
    del kept
    watch.start()
    assert watch.peak() < 8 * MIB


@pytest.mark.parametrize("limit", ["max_host_gib=0.25", "max_host='256MiB'"])
def test_a_doubled_load_is_over_the_limit(suite, limit):
    source = f"{LOAD}@pytest.mark.gpu_memory({limit})\ndef test_it():\n    torch.ones(1).cuda()\n"
    once = f"{source}    weights = load(160 << 20)\n"
    assert suite.run(source=once).outcomes == {"passed": 1}
    session = suite.run("--gpumem-json=r.json", source=f"{once}    again = load(160 << 20)\n")
    assert session.outcomes == {"failed": 1}
    assert "over budget: peak host memory of 3" in session.flat
    assert f"MiB over {limit}" in session.flat
    assert "values of the virtual GPU are in host memory too" in session.flat
    assert "next: try to load or keep less at a time" in session.flat
    (result,) = json.loads((suite.path / "r.json").read_text())["results"]
    assert 310 * MIB <= result["measurement"]["host"] < 400 * MIB
    rows = {row["peak"]: row for row in result["verdict"]["comparisons"]}
    assert rows["host"]["measured"] == result["measurement"]["host"]
    assert rows["host"]["baseline"] is None
    assert "ran a second time" not in session.flat


def test_without_a_limit_it_is_shown_and_judged_by_nothing(suite):
    source = f"{LOAD}@pytest.mark.gpu_memory\ndef test_it():\n    torch.ones(1).cuda()\n"
    suite.run("--gpumem-update-baselines", source=source)
    session = suite.run("-vv", source=f"{source}    load(160 << 20)\n")
    assert session.outcomes == {"passed": 1}
    (titles,) = (line for line in session.out.splitlines() if "held before" in line)
    assert titles.split()[-1] == "host"


def test_where_the_system_does_not_tell_a_limit_is_refused(suite, monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "RESET", tmp_path / "none" / "clear_refs")
    source = f"{LOAD}@pytest.mark.gpu_memory\ndef test_it(): torch.ones(1).cuda()"
    session = suite.run("--gpumem-json=r.json", source=source)
    assert session.outcomes == {"passed": 1}
    (result,) = json.loads((suite.path / "r.json").read_text())["results"]
    assert result["measurement"]["host"] is None
    session = suite.run(source=source.replace("gpu_memory", "gpu_memory(max_host_gib=1)"))
    assert session.outcomes == {"errors": 1}
    assert "max_host_gib=1: this system does not reset the highest memory" in session.flat


# -- baselines, with a tolerance --

ONCE = f"""{LOAD}@pytest.mark.gpu_memory
def test_it():
    torch.ones(1).cuda()
    weights = load(160 << 20)
"""
TWICE = f"{ONCE}    again = load(160 << 20)\n"
TOLERANT = "[pytest]\ngpumem_host_tolerance = 20%, 32MiB"
BASELINE = "baselines/virtual-H100/test_it.json"


@pytest.fixture
def loading(suite):
    """A test that takes 160 MiB of host memory, with a baseline that has this figure."""
    suite.write("pytest.ini", TOLERANT)
    assert suite.run("--gpumem-update-baselines", source=ONCE).outcomes == {"passed": 1}
    return suite


def baseline_of(suite):
    return json.loads((suite.path / BASELINE).read_text())


def test_with_a_tolerance_a_doubled_load_is_a_regression(loading):
    recorded = baseline_of(loading)
    assert recorded["format"] == 4
    assert 150 * MIB <= recorded["tests"]["test_it"]["peak_host"] < 200 * MIB
    assert loading.run().outcomes == {"passed": 1}
    session = loading.run("--gpumem-json=r.json", source=TWICE)
    assert session.outcomes == {"failed": 1}
    assert "regressed: peak host memory grew by 1" in session.flat
    assert "ran a second time" not in session.flat
    (result,) = json.loads((loading.path / "r.json").read_text())["results"]
    assert result["keeps_host"] is True
    assert result["baseline"]["peak_host"] == recorded["tests"]["test_it"]["peak_host"]
    # Without the option, the figure of the baseline is compared with nothing.
    assert loading.run("-o", "gpumem_host_tolerance=").outcomes == {"passed": 1}


def test_an_update_keeps_the_figure_while_the_new_one_is_within_tolerance(loading):
    before = (loading.path / BASELINE).read_text()
    more = ONCE.replace("160", "170")
    assert loading.run("--gpumem-update-baselines", source=more).outcomes == {"passed": 1}
    assert (loading.path / BASELINE).read_text() == before
    session = loading.run("--gpumem-update-baselines", "-v", source=TWICE)
    assert session.outcomes == {"passed": 1}
    assert baseline_of(loading)["tests"]["test_it"]["peak_host"] >= 300 * MIB
    assert "host: 1" in session.flat


def test_a_baseline_without_the_figure_is_missing_it(suite, monkeypatch):
    suite.run("--gpumem-update-baselines", source=ONCE)
    assert baseline_of(suite)["format"] < 4
    assert "peak_host" not in baseline_of(suite)["tests"]["test_it"]
    suite.write("pytest.ini", TOLERANT)
    assert suite.run().outcomes == {"passed": 1}
    monkeypatch.setenv("CI", "1")
    session = suite.run()
    assert session.outcomes == {"failed": 1}
    assert "MiB of host memory" in session.flat


def test_where_the_system_does_not_tell_a_note_says_so(loading, monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "RESET", tmp_path / "none" / "clear_refs")
    session = loading.run("-v")
    assert session.outcomes == {"passed": 1}
    assert "peak host memory is not compared: this system does not report it" in session.flat
