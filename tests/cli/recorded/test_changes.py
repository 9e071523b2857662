"""What became of figures: kinds, order, thresholds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.cli.recorded.changes import (
    ChangeKind,
    Changes,
    EntryChange,
    count_changes,
    pair_entries,
)
from pytest_gpumem.measurement import BaselineEntry, Breakdown, Peak, Provenance, Site, Slope
from pytest_gpumem.sizes import MIB, parse_tolerance

NOW = Provenance("2.15.0", "13.2", "9.19.0", "virtual", "")
BEFORE = replace(NOW, torch="2.14.0")


def key(test="test_it", part="", device="virtual-T4"):
    return Key(device, "test_a.py", test, part)


def entry(*peaks, provenance=NOW, **declared):
    """An entry with peaks in MiB, (allocated, reserved) of each device."""
    found = tuple(Peak(int(a * MIB), int(r * MIB)) for a, r in peaks)
    return BaselineEntry(found, provenance, **declared)


def move(old, new, **others):
    return EntryChange(key(), old, new, **others)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (entry((100, 120)), entry((100, 120)), ChangeKind.SAME),
        (entry((100, 120)), entry((100, 120), provenance=BEFORE), ChangeKind.SAME),
        (entry((100, 120)), entry((101, 120)), ChangeKind.GREW),
        (entry((100, 120)), entry((99, 120)), ChangeKind.SHRANK),
        (entry((100, 120)), entry((90, 122)), ChangeKind.GREW),
        (entry((100, 120), (5, 5)), entry((90, 100), (6, 5)), ChangeKind.GREW),
        (None, entry((1, 2)), ChangeKind.APPEARED),
        (entry((1, 2)), None, ChangeKind.VANISHED),
        (entry((1, 2)), entry((1, 2), (1, 2)), ChangeKind.INCOMPARABLE),
        (entry((1, 2), batch_size=8), entry((2, 2), batch_size=16), ChangeKind.INCOMPARABLE),
        (entry((1, 2), batch_size=8), entry((2, 2)), ChangeKind.GREW),
        (
            entry((1, 2), world_size=8, rank=0),
            entry((1, 2), world_size=8, rank=1),
            ChangeKind.INCOMPARABLE,
        ),
    ],
)
def test_each_kind_of_move(old, new, kind):
    assert move(old, new).kind is kind


def grows(fixed, per_sample, *sizes):
    slope = Slope(sizes or (8, 16), fixed * MIB, per_sample * MIB)
    return entry((100, 120), batch_size=16, slope=slope)


def test_what_grows_faster_at_the_same_peak_grew():
    faster = move(grows(40, 3), grows(40, 4))
    assert faster.kind is ChangeKind.GREW
    assert [(it.title, it.difference) for it in faster.rows] == [("memory per sample", MIB)]
    assert faster.grew_beyond(parse_tolerance("2%"))
    assert [it.title for it in move(grows(40, 3), grows(41, 3)).rows] == ["fixed memory"]
    other = move(grows(40, 3), grows(40, 4, 4, 16))
    assert (other.kind, other.mismatch) == (ChangeKind.INCOMPARABLE, "batch sizes 8, 16 -> 4, 16")
    alone = move(grows(40, 3), entry((100, 120), batch_size=16))
    assert alone.mismatch == "batch sizes 8, 16 -> one"


def test_what_cannot_be_compared_says_why():
    assert move(entry((1, 1), batch_size=8), entry((1, 1), batch_size=16)).mismatch == (
        "batch size 8 -> 16"
    )
    assert move(entry((1, 1)), entry((1, 1), (1, 1))).mismatch == "devices 1 -> 2"
    ranked = entry((1, 1), world_size=4, rank=0)
    assert move(ranked, replace(ranked, rank=3)).mismatch == "rank 0 of 4 -> 3 of 4"
    assert move(entry((1, 1)), entry((9, 9))).mismatch == ""


@pytest.mark.parametrize(
    ("limit", "grown", "beyond"),
    [
        ("2%", (102, 120), False),
        ("2%", (102.01, 120), True),
        ("2%", (100, 122.5), True),
        ("2%", (50, 120), False),
        ("2%, 20MiB", (115, 130), False),
        ("2%, 20MiB", (120.01, 120), True),
        ("0%", (100, 120), False),
        ("0%", (100.001, 120), True),
    ],
)
def test_growth_beyond_a_limit_is_of_either_peak_and_exactly_there_is_within(limit, grown, beyond):
    one = move(entry((100, 120)), entry(grown))
    assert one.grew_beyond(parse_tolerance(limit)) is beyond


def test_appearing_is_no_growth_and_running_out_of_memory_is():
    limit = parse_tolerance("0%")
    assert not move(None, entry((9, 9))).grew_beyond(limit)
    assert not move(entry((9, 9)), entry((99, 99), (1, 1))).grew_beyond(limit)
    assert move(entry((9, 9)), None, out_of_memory=True).grew_beyond(limit)


def test_pairs_come_by_kind_and_the_largest_first():
    old = {
        key("same"): entry((1, 1)),
        key("a"): entry((100, 100)),
        key("b"): entry((100, 100)),
        key("less"): entry((100, 100)),
        key("gone"): entry((1, 1)),
    }
    new = {
        **old,
        key("a"): entry((101, 100)),
        key("b"): entry((900, 100)),
        key("less"): entry((1, 100)),
        key("new"): entry((1, 1)),
        key("a", device="virtual-L4"): entry((7, 7)),
    }
    del new[key("gone")]
    moves = pair_entries(old, new)
    assert [(it.key.test, it.key.device, str(it.kind)) for it in moves] == [
        ("b", "virtual-T4", "grew"),
        ("a", "virtual-T4", "grew"),
        ("less", "virtual-T4", "shrank"),
        ("a", "virtual-L4", "appeared"),
        ("new", "virtual-T4", "appeared"),
        ("gone", "virtual-T4", "vanished"),
        ("same", "virtual-T4", "same"),
    ]
    assert count_changes(moves) == {
        ChangeKind.GREW: 2,
        ChangeKind.SHRANK: 1,
        ChangeKind.APPEARED: 2,
        ChangeKind.VANISHED: 1,
        ChangeKind.SAME: 1,
    }
    assert moves[0].difference == 800 * MIB


def test_what_ran_out_of_memory_is_neither_smaller_nor_gone():
    there = {key("a"): entry((100, 100)), key("b"): entry((1, 1))}
    less = {key("a"): entry((10, 10)), key("b"): entry((1, 1))}
    moves = pair_entries(there, less, new_oom={key("a")})
    assert [it.kind for it in moves] == [ChangeKind.OUT_OF_MEMORY, ChangeKind.SAME]
    assert moves[0].rows == ()
    assert [it.kind for it in pair_entries(less, less, old_oom={key("a")}, new_oom={key("a")})] == [
        ChangeKind.SAME
    ]


PEAKS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=2).map(
    lambda peaks: entry(*peaks)
)
SETS = st.dictionaries(st.sampled_from([key(name) for name in "abcd"]), PEAKS)


@given(SETS, SETS)
def test_the_reverse_comparison_is_the_reverse(old, new):
    """Nothing is lost, and with the sides changed nothing but the words changes."""
    there, back = pair_entries(old, new), pair_entries(new, old)
    assert {it.key for it in there} == {it.key for it in back} == old.keys() | new.keys()
    swapped = {ChangeKind.APPEARED: ChangeKind.VANISHED, ChangeKind.VANISHED: ChangeKind.APPEARED}
    kinds = {it.key: it.kind for it in back}
    for it in there:
        if it.kind in (ChangeKind.GREW, ChangeKind.SHRANK):
            assert kinds[it.key] in (ChangeKind.GREW, ChangeKind.SHRANK)
            assert sorted(row.difference for row in it.rows) == sorted(
                -row.difference for back_it in back if back_it.key == it.key for row in back_it.rows
            )
        else:
            assert kinds[it.key] == swapped.get(it.kind, it.kind)


SITE = Site("blocks.py", 88, "Attention.forward", "q @ k", "GPT", "activations", 64 * MIB, 12)


def explained(entry, mib):
    site = replace(SITE, nbytes=mib * MIB)
    return replace(entry, breakdowns=(Breakdown({"activations": mib * MIB}, 0, (site,)),))


def test_growth_that_both_breakdowns_know_has_a_cause():
    grown = move(explained(entry((64, 64)), 64), explained(entry((128, 128)), 128))
    assert grown.cause == "activations +64.00 MiB at blocks.py:88 (Attention.forward)"
    assert move(entry((64, 64)), explained(entry((128, 128)), 128)).cause == ""
    assert move(explained(entry((128, 128)), 128), explained(entry((64, 64)), 64)).cause == ""


def test_what_moved_together_is_told_once_where_that_is_asked_for():
    old = {key(f"t{i}"): entry((100, 100), provenance=BEFORE) for i in range(4)}
    new = {it: entry((128, 100)) for it in old}
    new[key("t3")] = entry((900, 100))
    moves = tuple(pair_entries(old, new))
    for across, alone in ((False, ["t3", "t0", "t1", "t2"]), (True, ["t3"])):
        changes = Changes("a", "b", moves, across=across)
        assert [it.key.test for it in changes.alone] == alone
        (one,) = changes.common_changes
        assert one.sentence == "torch 2.14.0 -> 2.15.0: 3 tests moved by +28.00 MiB allocated"
