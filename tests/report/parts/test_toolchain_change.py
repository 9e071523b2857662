"""Which tests moved together with what they were measured with, and what that is told as."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.measurement import Breakdown, Provenance
from pytest_gpumem.report.parts.toolchain_change import (
    ToolchainChange,
    find_common_changes,
    moved_categories,
    toolchain_text,
)
from pytest_gpumem.sizes import MIB

NOW = Provenance("2.15.0", "13.2", "9.19.0", "virtual", "")
BEFORE = replace(NOW, torch="2.14.0")


def shifts(*amounts, before=BEFORE, after=NOW, peak="allocated", start=0, categories=()):
    """A shift of each amount in MiB, of tests with consecutive names."""
    return [
        ToolchainChange(
            f"a.py::t{start + i}", "", "virtual-T4", before, after, peak, int(n * MIB), categories
        )
        for i, n in enumerate(amounts)
    ]


def sentences(found):
    return [it.sentence for it in find_common_changes(found)]


def test_the_same_amount_is_one_event():
    moved = shifts(*[28] * 40, categories=(("workspaces", 28 * MIB), ("other", -MIB)))
    assert sentences(moved) == [
        "torch 2.14.0 -> 2.15.0: 40 tests moved by +28.00 MiB allocated, workspaces +28.00 MiB"
    ]


def test_about_the_same_amount_tells_its_range_and_median():
    (told,) = sentences(shifts(27.5, 28, 28, 28.5))
    assert told == (
        "torch 2.14.0 -> 2.15.0: 4 tests moved by +27.50 MiB to +28.50 MiB "
        "(median +28.00 MiB) allocated"
    )


def test_one_direction_is_enough_and_downwards_is_one():
    (told,) = sentences(shifts(-32, -8.12, -20))
    assert told == (
        "torch 2.14.0 -> 2.15.0: 3 tests moved by -8.12 MiB to -32.00 MiB "
        "(median -20.00 MiB) allocated"
    )


@pytest.mark.parametrize(
    ("amounts", "number"),
    [
        ((28, 28), 0),  # too few
        ((28, 28, 28), 1),
        ((28, 28, 28, 0, 0, 0), 1),  # half of them
        ((28, 28, 28, 0, 0, 0, 0), 0),  # fewer than half
        ((28, -28, 100, -100), 0),  # all different
        ((0, 0, 0, 0), 0),
        ((), 0),
    ],
)
def test_how_many_it_takes(amounts, number):
    assert len(find_common_changes(shifts(*amounts))) == number


def test_a_regression_of_its_own_stays_out():
    (one,) = find_common_changes(shifts(28, 28, 28, 28, 900))
    assert one.tests == 4
    assert one.remaining == 1
    assert 900 * MIB not in one.amounts


def test_the_same_toolchain_is_no_reason():
    assert find_common_changes(shifts(28, 28, 28, after=BEFORE)) == []


def test_parts_of_one_test_are_not_several_tests():
    parts = [replace(it, nodeid="a.py::t", part=it.nodeid) for it in shifts(28, 28, 28)]
    assert find_common_changes(parts) == []


def test_each_change_of_toolchain_and_each_peak_is_told_apart():
    older = replace(NOW, torch="2.13.0", cuda="13.0")
    found = [
        *shifts(28, 28, 28),
        *shifts(20, 20, 20, 20, before=older, start=10, peak="reserved"),
    ]
    assert sentences(found) == [
        "torch 2.13.0 -> 2.15.0, CUDA 13.0 -> 13.2: 4 tests moved by +20.00 MiB reserved",
        "torch 2.14.0 -> 2.15.0: 3 tests moved by +28.00 MiB allocated",
    ]


def test_no_cause_is_named_where_they_have_different_ones():
    moved = [
        *shifts(28, 28, categories=(("workspaces", 28 * MIB),)),
        *shifts(28, 28, start=2, categories=(("activations", 28 * MIB),)),
    ]
    assert find_common_changes(moved)[0].cause == ""
    assert find_common_changes(moved[1:])[0].cause == "activations +28.00 MiB"
    assert find_common_changes(shifts(28, 28, 28))[0].cause == ""


def test_where_they_shrank_the_cause_is_what_shrank():
    moved = shifts(-28, -28, -28, categories=(("workspaces", -30 * MIB), ("other", 2 * MIB)))
    assert find_common_changes(moved)[0].cause == "workspaces -30.00 MiB"


def test_categories_are_compared_where_both_sides_know_them():
    was = Breakdown({"workspaces": 8 * MIB, "other": MIB}, 0)
    now = Breakdown({"workspaces": 36 * MIB, "other": MIB}, 5 * MIB)
    assert moved_categories([was], [now], 0) == (("workspaces", 28 * MIB),)
    assert moved_categories([was], [], 0) == ()
    assert moved_categories([was], [now], 1) == ()


def test_a_change_names_all_that_differs():
    other = replace(BEFORE, cuda="13.0", allocator="expandable_segments:True")
    assert toolchain_text(other, NOW) == (
        "torch 2.14.0 -> 2.15.0, CUDA 13.0 -> 13.2, "
        "allocator settings expandable_segments:True -> none"
    )


@given(st.lists(st.integers(-99, 99), max_size=12))
def test_a_group_is_large_enough_and_goes_one_way(amounts):
    for one in find_common_changes(shifts(*amounts)):
        assert one.tests >= 3
        assert len(one.changes) * 2 >= len(amounts)
        assert one.remaining == len(amounts) - len(one.changes)
        assert len({it > 0 for it in one.amounts}) == 1
        assert 0 not in one.amounts
