"""Marker arguments become a MemorySpec, and every mistake in them an error that helps."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from helpers.spec_marks import (
    BUDGETS,
    FIELDS,
    INF,
    JUNK,
    KWARGS,
    NAN,
    WORLD,
    Hostile,
    Indexable,
    assert_usable,
    find_card,
    refusal,
    spec,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.errors import SpecError
from pytest_gpumem.judge.result import describe_budget
from pytest_gpumem.plugin.entry import MARKER_HELP
from pytest_gpumem.sizes import GIB, MIB, Tolerance
from pytest_gpumem.spec import MemorySpec, spec_from_marks
from pytest_gpumem.typed_marker import Declaration

if TYPE_CHECKING:
    from collections.abc import Mapping

EVERY_FIELD: dict[str, object] = {
    "max_gib": 8,
    "max_allocated_gib": 6.5,
    "max_reserved_gib": 7,
    "max_pinned_gib": 3,
    "max_host_gib": 9,
    "min_cache_tokens": 100,
    "card": "t4",
    "batch_size": 32,
    "tolerance": "2%, 64MiB",
    "baseline": False,
    "devices": 2,
    "warmup": 1,
    "max_leak_mib": 0,
    "steady": True,
    "values": "full",
}


# what the marker says


def test_marker_with_every_field_says_them_all() -> None:
    assert spec(EVERY_FIELD) == MemorySpec(
        max_gib=8,
        max_allocated_gib=6.5,
        max_reserved_gib=7,
        max_pinned_gib=3,
        max_host_gib=9,
        min_cache_tokens=100,
        card="T4",
        batch_size=32,
        tolerance=Tolerance(Fraction(1, 50), 64 * MIB),
        baseline=False,
        devices=2,
        warmup=1,
        max_leak_mib=0,
        steady=True,
        values="full",
    )


@pytest.mark.parametrize("marks", [[], [{}], [{}, {}]])
def test_marker_without_arguments_leaves_the_defaults(marks: list[Mapping[str, object]]) -> None:
    defaults = dict.fromkeys(FIELDS) | {"baseline": True, "devices": 1, "warmup": 0}
    defaults |= {"steady": False, "variants": {}}
    assert asdict(spec(*marks)) == defaults


def test_budgets_are_also_there_in_bytes() -> None:
    declared = spec({"max_gib": 8, "max_allocated_gib": 0.1, "max_reserved_gib": 1.5})
    assert declared.bytes_of("max_gib") == 8 * GIB
    assert declared.bytes_of("max_allocated_gib") == 107_374_182
    assert declared.bytes_of("max_reserved_gib") == 3 * GIB // 2


def test_a_leak_is_in_mib_and_may_be_a_fraction() -> None:
    assert spec({"max_leak_mib": 0}).bytes_of("max_leak_mib") == 0
    assert spec({"max_leak_mib": 0.1}).bytes_of("max_leak_mib") == 104_857
    assert spec({"max_leak_mib": 3}).bytes_of("max_leak_mib") == 3 << 20
    assert spec({}).bytes_of("max_leak_mib") is None


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "8MiB", True, 10**13])
def test_a_leak_is_a_plain_number_from_0(value: object) -> None:
    with pytest.raises(SpecError, match="max_leak_mib must be a plain number of MiB, 0 or more"):
        spec({"max_leak_mib": value})


@pytest.mark.parametrize("value", [1, "yes", [True]])
def test_steady_is_true_or_false(value: object) -> None:
    with pytest.raises(SpecError, match=r"steady must be True or False; write steady=True"):
        spec({"steady": value})


def test_budgets_that_are_not_declared_have_no_bytes() -> None:
    empty = MemorySpec()
    assert (
        empty.bytes_of("max_gib"),
        empty.bytes_of("max_allocated_gib"),
        empty.bytes_of("max_reserved_gib"),
    ) == (None,) * 3


def test_spec_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        MemorySpec().max_gib = 8  # type: ignore[misc]


def test_spec_is_hashable() -> None:
    assert len({spec({"tolerance": "2%"}), spec({"tolerance": ["2.0%"]})}) == 1


@pytest.mark.parametrize("value", ["all", True, 1])
def test_values_are_auto_full_or_off(value: object) -> None:
    with pytest.raises(
        SpecError, match=r'values is one of auto, full and off; write values="full"'
    ):
        spec({"values": value})


# several markers


def test_nearest_marker_wins_field_by_field() -> None:
    function = {"max_gib": 8}
    class_ = {"max_gib": 16, "batch_size": 32}
    module = {"max_gib": 24, "batch_size": 64, "devices": 2}
    assert spec(function, class_, module) == MemorySpec(max_gib=8, batch_size=32, devices=2)


SIZES: dict[str, object] = {
    "batch_sizes": [8, 16],
    "max_mib_per_sample": 3,
    "max_fixed_gib": 1,
    "variants": {"amp": True},
}


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"ranks"}))
def test_none_on_a_nearer_marker_takes_back_what_an_outer_one_says(name: str) -> None:
    world: dict[str, object] = {"world_size": 64} if name == "rank" else {}
    if name in {"max_mib_per_sample", "max_fixed_gib"}:
        world = {"batch_sizes": [8, 16]}
    outer = {name: {**EVERY_FIELD, **WORLD, **SIZES}[name]}
    assert spec(outer, world) != spec(world)
    assert spec({name: None}, outer, world) == spec(world)


def test_the_markers_help_and_types_have_every_field_in_its_order() -> None:
    named = MARKER_HELP.removeprefix("gpu_memory(").partition(")")[0]
    assert named.split(", ") == [*Declaration.__annotations__] == FIELDS


@pytest.mark.parametrize(
    "name", [name for name in EVERY_FIELD if name.startswith(("max_", "min_"))]
)
def test_every_limit_is_named_in_reports(name: str) -> None:
    assert f"{name}={EVERY_FIELD[name]!r}" in describe_budget(spec({name: EVERY_FIELD[name]}))


def test_none_on_an_outer_marker_takes_nothing_back() -> None:
    assert spec({"max_gib": 8}, {"max_gib": None}) == MemorySpec(max_gib=8)


def test_mistake_on_an_outer_marker_is_refused_even_where_it_is_overridden() -> None:
    with pytest.raises(SpecError, match="max_gib=-1"):
        spec({"max_gib": 8}, {"max_gib": -1})


# what is refused


def test_positional_argument_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        spec_from_marks([((8,), {})], find_card=find_card)
    assert str(caught.value) == (
        "@pytest.mark.gpu_memory(8): the marker takes named arguments only; "
        "name each argument, for example max_gib=8"
    )


def test_positional_text_is_taken_for_a_card() -> None:
    with pytest.raises(SpecError, match=r"gpu_memory\('T4', \.\.\.\).*for example card='T4'"):
        spec_from_marks([(("T4", 8), {"devices": 1})], find_card=find_card)


def test_misspelt_budget_is_refused_with_a_suggestion_and_its_unit() -> None:
    assert str(refusal(max_gb=8)) == (
        "@pytest.mark.gpu_memory(max_gb=8): there is no argument named max_gb; "
        "write max_gib, which is in GiB (2**30 bytes)"
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("batchsize", "batch_size"), ("tolerence", "tolerance"), ("CARD", "card"), ("GPU", None)],
)
def test_unknown_name_is_refused_with_the_nearest_one_or_all(wrong: str, right: str | None) -> None:
    remedy = f"write {right}" if right else "write one of "
    error = refusal(**{wrong: 1})
    assert error.problem == f"there is no argument named {wrong}"
    assert error.remedy.startswith(remedy)
    if right is None:
        assert set(error.remedy.removeprefix(remedy).split(", ")) == set(FIELDS)


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (-1, "must be a number above 0"),
        (0, "must be a number above 0"),
        (-0.0, "must be a number above 0"),
        (-INF, "must be a number above 0"),
        (NAN, "must be a number above 0"),
        (INF, "is more than 1,000,000,000 GiB"),
        (1e300, "is more than 1,000,000,000 GiB"),
        (10**400, "is more than 1,000,000,000 GiB"),
        (8 * GIB, "is more than 1,000,000,000 GiB"),
        (1e-10, "is less than one byte"),
        (True, "must be a plain number of GiB"),
        ("8GiB", "must be a plain number of GiB"),
        (8j, "must be a plain number of GiB"),
        ([8], "must be a plain number of GiB"),
        (Fraction(10**400), "must be a plain number of GiB"),
        (Hostile(), "must be a plain number of GiB"),
    ],
)
def test_bad_budget_is_refused(name: str, value: object, problem: str) -> None:
    assert refusal(**{name: value}).problem == f"{name} {problem}"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8GiB", "8"),
        ("12", "12"),
        ("512 MiB", "0.5"),
        ("1GB", "0.9313225746154785"),
        ("much", "8"),
        ("-3GiB", "8"),
        ("9999999TiB", "8"),
    ],
)
def test_budget_given_as_text_is_answered_with_the_number_to_write(text: str, number: str) -> None:
    assert refusal(max_gib=text).remedy == f"write max_gib={number}"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("devices", 1, 16),
        ("batch_size", 1, 1_000_000_000),
        ("warmup", 0, 1000),
        ("world_size", 1, 1_000_000),
    ],
)
def test_counts_are_whole_numbers_within_their_limits(name: str, least: int, most: int) -> None:
    for good in (least, most):
        assert getattr(spec({name: good}), name) == good
    for bad in (least - 1, most + 1, 1.0, "1", True, NAN, 10**5000, [1], Hostile()):
        error = refusal(**{name: bad})
        assert error.problem == f"{name} must be a whole number from {least} to {most:,}"
        assert error.remedy == f"write for example {name}=1"


def test_integers_of_other_libraries_are_taken_as_plain_ones() -> None:
    declared = spec({"max_gib": Indexable(8), "batch_size": Indexable(32)})
    assert declared == MemorySpec(max_gib=8, batch_size=32)
    assert type(declared.max_gib) is type(declared.batch_size) is int


def test_real_numbers_of_other_libraries_are_taken_as_plain_floats() -> None:
    declared = spec({"max_gib": Fraction(3, 2)})
    assert (declared.max_gib, type(declared.max_gib)) == (1.5, float)


@pytest.mark.parametrize("value", [0, 1, "no", [], Hostile()])
def test_baseline_that_is_not_a_bool_is_refused(value: object) -> None:
    assert refusal(baseline=value).problem == "baseline must be True or False"


def test_bad_tolerance_is_refused_with_the_marker_and_the_ways_to_write_one() -> None:
    assert str(refusal(tolerance=0.02)) == (
        "@pytest.mark.gpu_memory(tolerance=0.02): this is not a tolerance; write '2%', "
        "'64MiB', '2%, 64MiB' (the larger of the two), or their sum, '2% + 64MiB'"
    )


def test_unknown_card_is_refused_with_the_marker_and_the_remedy_of_the_one_who_knows() -> None:
    assert str(refusal(card="Voodoo 2")) == (
        "@pytest.mark.gpu_memory(card='Voodoo 2'): nobody knows this card; write card='T4'"
    )


@pytest.mark.parametrize("value", [4, b"T4", True, [], [4], Hostile()])
def test_card_that_is_not_text_is_refused(value: object) -> None:
    assert refusal(card=value).problem == "card must be a card's name, as text, or a list of them"


def test_error_shows_the_argument_at_fault_and_that_there_are_others() -> None:
    assert refusal(batch_size=32, max_gib=-1).given == "@pytest.mark.gpu_memory(max_gib=-1, ...)"


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, [["y" * 99] * 99] * 99, 10**5000, Hostile()],
    ids=["text", "nested", "integer beyond printing", "no repr"],
)
def test_hostile_value_makes_no_long_or_broken_error(value: object) -> None:
    assert len(str(refusal(devices=value))) < 500


def test_hostile_name_makes_no_long_or_broken_error() -> None:
    assert len(str(refusal(**{"x" * 10**6: 1}))) < 500
    assert "\n" not in str(refusal(**{"max\ngib": 1}))


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(JUNK, max_size=1).map(tuple), KWARGS), max_size=3))
def test_any_markers_make_a_usable_spec_or_a_spec_error(
    marks: list[tuple[tuple[object, ...], Mapping[str, object]]],
) -> None:
    try:
        made = spec_from_marks(marks, find_card=find_card)
    except SpecError as error:
        assert error.given.startswith("@pytest.mark.gpu_memory(")  # noqa: PT017
        return
    assert_usable(made)
