"""The process's own memory: how much it grows in a test, and its limit."""

from __future__ import annotations

import json
from functools import partial

import pytest

from pytest_gpumem.meter import meter
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


@pytest.mark.parametrize("limit", ["max_host_gib=0.25"])
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


@pytest.mark.parametrize("written", [True, False])
def test_a_limit_that_holds_because_pinned_memory_is_not_written_is_said(suite, written):
    """On a GPU, the driver makes pinned memory resident; the virtual GPU leaves that to writes."""
    buffer = "torch.empty(128 << 20, dtype=torch.uint8, pin_memory=True)"
    source = f"""
    @pytest.mark.gpu_memory(max_host_gib=0.3)
    def test_it():
        torch.ones(1).cuda()
        buffers = [{buffer} for _ in range({1 if written else 3})]
        if {written}:
            buffers[0].fill_(1)
    """
    session = suite.run(source=source)
    assert session.outcomes == {"passed": 1}
    said = "the limit on host memory may hold only because pinned memory was not written: on a GPU"
    assert (said in session.flat) is not written


def test_without_a_limit_it_is_recorded_and_judged_by_nothing(suite):
    source = f"{LOAD}@pytest.mark.gpu_memory\ndef test_it():\n    torch.ones(1).cuda()\n"
    suite.run("--gpumem-update-baselines", source=source)
    session = suite.run("--gpumem-json=r.json", source=f"{source}    load(160 << 20)\n")
    assert session.outcomes == {"passed": 1}
    (result,) = json.loads((suite.path / "r.json").read_text())["results"]
    assert result["measurement"]["host"] >= 150 * MIB


def test_where_the_system_does_not_tell_a_limit_is_refused(suite, monkeypatch, tmp_path):
    untold = partial(HostWatch, tmp_path / "none" / "clear_refs")
    monkeypatch.setattr(meter, "HostWatch", untold)
    source = f"{LOAD}@pytest.mark.gpu_memory\ndef test_it(): torch.ones(1).cuda()"
    session = suite.run("--gpumem-json=r.json", source=source)
    assert session.outcomes == {"passed": 1}
    (result,) = json.loads((suite.path / "r.json").read_text())["results"]
    assert result["measurement"]["host"] is None
    session = suite.run(source=source.replace("gpu_memory", "gpu_memory(max_host_gib=1)"))
    assert session.outcomes == {"errors": 1}
    assert "max_host_gib=1: this system does not reset the highest memory" in session.flat
