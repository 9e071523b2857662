"""Limits that another part tells: the text that is understood, and the bytes that come of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_gpumem.errors import SpecError
from pytest_gpumem.relations import read_relations
from pytest_gpumem.sizes import MIB

PARTS = ("eager", "eager + 1", "a*b", "step 2")
EAGER = SimpleNamespace(part="eager")


def read(**declared):
    (relation,), others = read_relations(declared, PARTS, "gpu_memory.measure('graph', ")
    assert not others
    return relation


@pytest.mark.parametrize(
    ("declared", "limit", "text"),
    [
        ({"at_most": "eager"}, 100, "at_most='eager'"),
        ({"at_most": EAGER}, 100, "at_most='eager'"),
        ({"at_most": " eager + 64 MiB "}, 164, "at_most='eager + 64.00 MiB'"),
        ({"at_most": "eager-64MiB"}, 36, "at_most='eager - 64.00 MiB'"),
        ({"at_most": "1.1*eager"}, 110, "at_most='1.1 * eager'"),
        ({"at_most": "eager * 1.1 + 1MiB"}, 111, "at_most='1.1 * eager + 1.00 MiB'"),
        ({"at_most": "110% of eager"}, 110, "at_most='1.1 * eager'"),
        ({"at_most": "eager + 1"}, 100, "at_most='eager + 1'"),
        ({"at_most": "2 * a*b"}, 200, "at_most='2 * a*b'"),
        ({"at_most": "step 2 + 1MiB"}, 101, "at_most='step 2 + 1.00 MiB'"),
        ({"at_most": 1.1, "of": EAGER}, 110, "at_most='1.1 * eager'"),
        ({"at_most": "110%", "of": "eager"}, 110, "at_most='1.1 * eager'"),
        ({"at_most": "+ 1GiB", "of": EAGER}, 1124, "at_most='eager + 1024.00 MiB'"),
        ({"at_most": "110% + 1MiB", "of": EAGER}, 111, "at_most='1.1 * eager + 1.00 MiB'"),
        ({"at_most": "5GiB"}, 5 * 1024, "at_most='5120.00 MiB'"),
        ({"at_least": "before - 8MiB"}, 92, "at_least='before - 8.00 MiB'"),
        ({"at_least": "2 * eager", "figure": "held"}, 200, "at_least='2 * eager', figure='held'"),
    ],
)
def test_a_relation_has_a_limit_and_can_be_written_again(declared, limit, text):
    relation = read(**declared)
    assert relation.limit(100 * MIB) == limit * MIB
    assert str(relation) == text


def test_less_than_is_below_by_a_byte():
    assert read(less_than="eager").limit(100) == 99
    assert read(less_than=0.5, of="eager").limit(101) == 50  # below 50.5
    assert read(less_than="eager + 8B").limit(100) == 107


def test_lower_limits_are_rounded_up():
    assert read(at_least=0.5, of="eager").limit(101) == 51
    assert read(more_than=0.5, of="eager").limit(101) == 51
    assert read(more_than=0.5, of="eager").limit(100) == 51
    assert read(at_least=0.5, of="eager").limit(100) == 50


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (
            {"at_most": "lazy"},
            "names no part that was measured before (measured: 'eager', 'eager + 1'",
        ),
        ({"at_most": 1.1}, "this number names no part to compare with"),
        ({"at_most": -1, "of": "eager"}, "at_most must be a number above 0"),
        ({"at_most": float("nan"), "of": "eager"}, "at_most must be a number above 0"),
        ({"at_most": True}, "this is not a part that was measured before"),
        ({"at_most": 1.1, "of": "lazy"}, "this is not a part that was measured before"),
        ({"at_most": "eager", "of": "eager"}, "this is neither a share of that part nor a size"),
        ({"at_most": "", "of": "eager"}, "this is neither a share of that part nor a size"),
        ({"at_most": "eager + 64"}, "names no part"),
        ({"at_most": "eager + 64 apples"}, "names no part"),
        ({"at_most": "2 * eager * 2"}, "names no part"),
        ({"at_most": "0 * eager"}, "names no part"),
        ({"of": "eager"}, "of= needs a limit; write at_most=1.1 as well"),
    ],
)
def test_a_mistake_is_shown_with_the_call_and_an_example(declared, words):
    with pytest.raises(SpecError) as caught:
        read(**declared)
    assert words in str(caught.value)
    assert str(caught.value).startswith("gpu_memory.measure('graph', ")


def test_what_is_no_relation_is_left_and_none_is_no_relation():
    relations, others = read_relations({"max_gib": 8, "at_most": None}, (), "")
    assert (relations, others) == ((), {"max_gib": 8})
    with pytest.raises(SpecError, match=r"measured: none\)"):
        read_relations({"less_than": "eager"}, (), "")
