"""What differs between two breakdowns: rows, order, and the sentence that leads."""

from dataclasses import replace

from pytest_gpumem.breakdowns import category_rows, site_rows
from pytest_gpumem.measurement import Breakdown, Site

MIB = 1 << 20

ATTENTION = Site(
    "blocks.py", 88, "Attention.forward", "a = q @ k", "GPT.h.*.attn", "activations", 64 * MIB, 12
)
WEIGHTS = Site("model.py", 10, "Net", "nn.Linear(9, 9)", "Net.fc", "parameters", 10 * MIB, 2)
BEFORE = Breakdown({"parameters": 10 * MIB, "activations": 64 * MIB}, 5 * MIB, (ATTENTION, WEIGHTS))


def grown(**changes):
    site = replace(ATTENTION, **{"nbytes": 576 * MIB, "blocks": 12, "line": 95, **changes})
    categories = {"parameters": 10 * MIB, "activations": 576 * MIB, "temporaries": MIB}
    return Breakdown(categories, 2 * MIB, (site, WEIGHTS))


def test_categories_come_with_the_largest_growth_first_and_cached_last():
    rows = category_rows(grown(), BEFORE)
    assert [(row.name, row.baseline, row.nbytes, row.difference) for row in rows] == [
        ("activations", 64 * MIB, 576 * MIB, 512 * MIB),
        ("temporaries", 0, MIB, MIB),
        ("parameters", 10 * MIB, 10 * MIB, 0),
        ("cached", 5 * MIB, 2 * MIB, -3 * MIB),
    ]


def test_without_a_baseline_nothing_is_compared():
    rows = category_rows(BEFORE)
    assert [(row.name, row.nbytes, row.difference) for row in rows] == [
        ("parameters", 10 * MIB, None),
        ("activations", 64 * MIB, None),
        ("cached", 5 * MIB, None),
    ]
    assert [row.baseline for row in site_rows(BEFORE)] == [None, None]


def test_a_line_that_moved_or_was_edited_is_the_same():
    for now in (grown(), grown(code="a = k @ q")):
        rows = site_rows(now, BEFORE)
        assert [(row.name, row.baseline, row.difference) for row in rows] == [
            ("blocks.py:95 (Attention.forward)", 64 * MIB, 512 * MIB),
            ("model.py:10 (Net)", 10 * MIB, 0),
        ]


def test_of_several_new_lines_none_is_taken_for_one_that_is_gone():
    other = replace(ATTENTION, line=96, code="b = k @ v", nbytes=MIB)
    now = grown(code="a = k @ q")
    now = replace(now, sites=(*now.sites, other))
    rows = site_rows(now, BEFORE)
    assert [(row.name, row.baseline, row.nbytes) for row in rows] == [
        ("blocks.py:95 (Attention.forward)", 0, 576 * MIB),
        ("blocks.py:96 (Attention.forward)", 0, MIB),
        ("model.py:10 (Net)", 10 * MIB, 10 * MIB),
        ("blocks.py:88 (Attention.forward)", 64 * MIB, 0),
    ]
    elsewhere = replace(now, sites=(replace(ATTENTION, function="Other.forward"),))
    assert [row.baseline for row in site_rows(elsewhere, BEFORE)] == [0, 10 * MIB, 64 * MIB]


def test_of_what_is_smaller_than_all_that_a_baseline_kept_it_does_not_say():
    before = replace(BEFORE, categories={**BEFORE.categories, "other": MIB})  # more than its sites
    small = replace(WEIGHTS, line=11, code="nn.Linear(1, 1)", category="other", nbytes=MIB)
    now = replace(BEFORE, sites=(ATTENTION, WEIGHTS, small))
    assert [(row.name, row.baseline) for row in site_rows(now, before)][-1] == (
        "model.py:11 (Net)",
        None,
    )
    assert ("model.py:11 (Net)", 0) in [(row.name, row.baseline) for row in site_rows(now, BEFORE)]
    large = replace(small, nbytes=11 * MIB)
    now = replace(BEFORE, sites=(ATTENTION, WEIGHTS, large))
    assert ("model.py:11 (Net)", 0) in [(row.name, row.baseline) for row in site_rows(now, before)]


def test_a_line_that_a_baseline_did_not_keep_had_nothing_if_its_category_had_no_more():
    before = replace(BEFORE, categories={**BEFORE.categories, "other": MIB})
    for category, nbytes, most in (("other", 3 * MIB, None), (WEIGHTS.category, MIB, 0)):
        new = replace(WEIGHTS, line=11, code="nn.Linear(1, 1)", category=category, nbytes=nbytes)
        rows = site_rows(replace(BEFORE, sites=(ATTENTION, WEIGHTS, new)), before)
        assert ("model.py:11 (Net)", most) in [(row.name, row.baseline) for row in rows]


def test_two_lines_with_the_same_code_in_one_function_are_added_up():
    twice = replace(BEFORE, sites=(ATTENTION, replace(ATTENTION, line=90)))
    (row,) = site_rows(twice, replace(BEFORE, sites=(ATTENTION,)))
    assert (row.baseline, row.nbytes, row.blocks) == (64 * MIB, 128 * MIB, 24)
