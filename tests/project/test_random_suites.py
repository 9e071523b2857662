"""Figures of random suites are those of each test alone; benchmarks/fidelity has many."""

from __future__ import annotations

import pytest
from helpers import random_suites
from helpers.random_suites import (
    OPTIONS,
    File,
    Runner,
    Test,
    differ_as_told,
    differences,
    random_suite,
    shrunk,
)

SEEDS = (
    *(10, 17, 20, 27, 45, 100, 116, 1010, 1090, 3223, 6000, 6011, 6029, 6104),
    *(*range(200, 203), *range(3000, 3005), *range(6001, 6004)),
)
"""those of the first line were wrong once; FIRST_WIDE and FIRST_CHAINED begin new kinds"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return Runner(tmp_path_factory.mktemp("suites"))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_figures_of_a_random_suite_are_those_of_each_test_alone(runner, seed):
    assert differences(runner, random_suite(seed), seed) == []


def test_so_they_are_in_workers_and_with_all_of_the_garbage_collector(runner, tmp_path):
    pytest.importorskip("xdist")
    assert differences(Runner(tmp_path, cheap=False), random_suite(7), 7, workers=True) == []


def test_a_suite_whose_figures_depend_on_the_order_is_seen_and_made_smaller(runner):
    """A test that takes more with each leak before it."""
    tests = (
        Test("test_a", "", (), ("leaked.append(mib(3))", "kept = mib(7)")),
        Test("test_b", "", (), ("mib(3)",)),
        Test("test_c", "", (), ("mib(1 + len(leaked))", "gc.collect()")),
    )
    files = (File("test_a.py", (), tests),)
    assert any("test_c" in sentence for sentence in differences(runner, files, 0))
    (file,) = shrunk(runner, files, 0)
    assert [test.name for test in file.tests] == ["test_a", "test_c"]
    assert [test.operations for test in file.tests] == [
        ("leaked.append(mib(3))",),
        ("mib(1 + len(leaked))",),
    ]


def test_a_pair_that_no_allocator_can_have_is_seen(runner, monkeypatch):
    """Less reserved than allocated, also in every order alike."""
    row = {"peaks": [[1, 2]], "retained": [], "garbage": False, "out_of_memory": None}
    refusal = {"allocated": 3, "reserved": 4, "needed": {"allocated": 6, "reserved": 5}}
    files = (File("test_a.py", (), (Test("test_a", "", (), ()),)),)
    for shown, count in ((row, 0), ({**row, "out_of_memory": refusal}, 3)):
        rows = [{"test_a.py::test_a": [shown]}] * 3
        monkeypatch.setattr(runner, "figures", lambda _plans, rows=rows: rows)
        assert len(differences(runner, files, 0)) == count


def test_suites_that_are_not_measured_are_seen(runner, monkeypatch):
    """Without the virtual GPU's libraries, say, each test is skipped, alone and in every order."""
    monkeypatch.setattr(random_suites, "OPTIONS", (*OPTIONS, "--gpumem-device=none"))
    tests = Test("test_a", "", (), ("mib(1)",)), Test("test_b", None, (), ())
    (sentence,) = differences(runner, (File("test_a.py", (), tests),), 0)
    assert sentence.startswith("test_a.py::test_a (skipped): ")


@pytest.mark.parametrize(
    ("peak", "told", "is_told"),
    [
        ([100, 120 << 20, 0], "20.00", True),
        ([100, 121 << 20, 0], "20.00", False),
        ([100, 99 << 20, 0], "20.00", False),
        ([101, 120 << 20, 0], "20.00", False),
        ([100, 120 << 20, 1], "20.00", False),
        ([100, 120 << 20, 0], "", False),
    ],
)
def test_more_reserved_than_alone_is_right_within_what_a_note_tells(peak, told, is_told):
    notes = [f"peak reserved may be too high by up to {told} MiB"] if told else []
    row = {"kind": "ok", "retained": [], "garbage": False, "out_of_memory": None}
    rows = {"test_a": [{**row, "peaks": [peak], "earlier": notes}]}
    alone = {"test_a": [{**rows["test_a"][0], "peaks": [[100, 100 << 20, 0]], "earlier": []}]}
    assert differ_as_told("test_a", rows, alone) == is_told
    other = {"test_a": [{**alone["test_a"][0], "kind": "over"}]}
    assert not differ_as_told("test_a", rows, other)
    refusals = [
        {"allocated": it[0], "reserved": it[1], "needed": None} for it in (peak, [100, 100 << 20])
    ]
    for results, refusal in zip((rows, alone), refusals, strict=True):
        results["test_a"][0] |= {"peaks": [], "out_of_memory": refusal}
    assert differ_as_told("test_a", rows, alone) == (is_told or peak[2] == 1)
