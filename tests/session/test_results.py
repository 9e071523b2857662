"""One result of a test that several ranks measured: the worst rank's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.sample_report import H100, NOW

from pytest_gpumem.judge.result import Result
from pytest_gpumem.judge.verdict import Kind, Verdict
from pytest_gpumem.measurement import Measurement, Peak
from pytest_gpumem.report.model import urgency
from pytest_gpumem.report.serialize import to_text
from pytest_gpumem.session.results import SessionResults, worst_of_ranks

PASSES = {Kind.WITHIN, Kind.IMPROVED, Kind.NO_BASELINE}


def result(rank, kind=Kind.WITHIN, mib=10, part=""):
    peak = Peak(mib << 20, mib << 20)
    return Result(
        nodeid="test_it.py::test_it",
        verdict=Verdict(kind, kind not in PASSES, str(kind)),
        measurement=Measurement(H100, NOW, (peak,), (Peak(0, 0),), (Peak(0, 0),)),
        part=part,
        world_size=2,
        rank=rank,
    )


def worst(*results, shrinkage_fails=False):
    (found,) = worst_of_ranks([[it] for it in results], shrinkage_fails=shrinkage_fails)
    return found


def test_of_ranks_that_pass_the_fullest_counts():
    found = worst(result(0, mib=10), result(1, mib=30), result(2, mib=20))
    assert (found.rank, found.measurement.peak_allocated) == (1, 30 << 20)
    assert found.verdict.note_texts == ("these figures are from rank 1, which used most memory",)


def test_of_equal_ones_the_first():
    assert worst(result(0), result(1)).rank == 0


def test_one_that_fails_counts_whatever_it_held():
    found = worst(result(0, mib=90), result(1, Kind.REGRESSED, mib=10))
    assert (found.rank, found.verdict.kind) == (1, Kind.REGRESSED)
    assert found.verdict.note_texts == ("these figures are from rank 1, which failed",)


def test_of_several_that_fail_the_worst_kind():
    found = worst(result(0, Kind.REGRESSED, mib=90), result(1, Kind.OUT_OF_MEMORY, mib=10))
    assert found.rank == 1


def test_a_rank_that_shrank_says_nothing_where_another_held_more():
    shrunk, full = result(0, Kind.IMPROVED, mib=10), result(1, mib=30)
    assert not worst(shrunk, full, shrinkage_fails=True).verdict.failed
    assert worst(result(0, Kind.IMPROVED, mib=40), full, shrinkage_fails=True).verdict.failed
    assert not worst(result(0, Kind.IMPROVED, mib=40), full).verdict.failed


def test_parts_are_merged_each_by_itself():
    first = [result(0, mib=10), result(0, mib=9, part="forward")]
    second = [result(1, mib=8), result(1, mib=12, part="forward")]
    found = worst_of_ranks([first, second], shrinkage_fails=False)
    assert [(it.part, it.rank) for it in found] == [("", 0), ("forward", 1)]


def test_one_alone_has_no_note():
    assert worst(result(0)).verdict.notes == ()


# -- what the first rank gathers --


def gathered(*results, passed=True):
    found = SessionResults()
    for when in ("setup", "call", "teardown"):
        data = to_text(results) if when == "call" else None
        ok = passed or when != "call"
        found.add("test_it.py::test_it", when, passed=ok, data=data)
    return found


def test_the_one_baseline_is_the_fullest_ranks_and_names_no_rank():
    first = gathered(result(0, mib=10))
    first.join({1: gathered(result(1, mib=30)).to_plain()}, shrinkage_fails=False)
    (change,) = first.changes()
    (entry,) = change.parts.values()
    assert entry.peaks == (Peak(30 << 20, 30 << 20),)
    assert (entry.world_size, entry.rank) == (2, None)
    assert first.failed_elsewhere == []


def test_a_test_that_failed_in_any_rank_gets_none():
    first = gathered(result(0))
    first.join({1: gathered(result(1), passed=False).to_plain()}, shrinkage_fails=False)
    assert first.changes() == []


def test_a_failure_of_another_rank_is_to_be_told():
    first = gathered(result(0))
    other = gathered(result(1, Kind.REGRESSED), passed=False)
    first.join({1: other.to_plain()}, shrinkage_fails=False)
    assert [[it.rank for it in results] for results in first.failed_elsewhere] == [[1]]
    own = gathered(result(0, Kind.REGRESSED), passed=False)
    own.join({1: other.to_plain()}, shrinkage_fails=False)
    assert own.failed_elsewhere == []


def test_a_rank_that_gave_nothing_is_named():
    first = gathered(result(0))
    first.join({1: None}, shrinkage_fails=False)
    assert first.problems == ["rank 1 sent no results: no baselines are written"]


@pytest.mark.parametrize(
    "data", [{}, {"failed": [], "complete": [], "results": {"a": [{}]}}, {"failed": 3}]
)
def test_what_cannot_be_read_is_said(data):
    first = gathered(result(0))
    first.join({1: data}, shrinkage_fails=False)
    assert len(first.problems) == 1
    assert first.results() == [replace(result(0))]


def test_a_leak_is_worse_than_a_regression_as_in_judging():
    leaked, regressed = result(0, Kind.LEAKED, mib=10), result(1, Kind.REGRESSED, mib=90)
    assert worst(leaked, regressed).rank == 0
    assert sorted([regressed, leaked], key=urgency) == [leaked, regressed]
