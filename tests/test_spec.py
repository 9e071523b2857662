"""Marker arguments become a MemorySpec, and every mistake in them an error that helps."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import GIB, MIB, Tolerance
from pytest_gpumem.spec import MemorySpec, spec_from_call, spec_from_marks

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELDS = [field.name for field in fields(MemorySpec)]
BUDGETS = ["max_gib", "max_allocated_gib", "max_reserved_gib"]
EVERY_FIELD: dict[str, object] = {
    "max_gib": 8,
    "max_allocated_gib": 6.5,
    "max_reserved_gib": 7,
    "card": "t4",
    "batch_size": 32,
    "tolerance": "2%, 64MiB",
    "baseline": False,
    "devices": 2,
    "warmup": 1,
    "max_leak_mib": 0,
    "steady": True,
}
WORLD = {"world_size": 64, "rank": 3}
"""what goes with no number of devices above 1"""
NAN, INF = float("nan"), float("inf")


def find_card(name: str) -> str:
    if name.lower() == "t4":
        return "T4"
    raise SpecError(name, "nobody knows this card", "write card='T4'")


def spec(*marks: Mapping[str, object]) -> MemorySpec:
    """Return the spec of these markers, the nearest first."""
    return spec_from_marks([((), mark) for mark in marks], find_card=find_card)


def refusal(**mark: object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        spec(mark)
    return caught.value


class Hostile:
    """An object on which nothing works."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError

    __repr__ = __index__ = __float__ = __int__ = __bool__ = __len__ = __lt__ = _raise


class Indexable:
    """An integer of another library, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**400)
    | st.floats()
    | st.fractions()
    | st.decimals()
    | st.complex_numbers()
    | st.text()
    | st.sampled_from(["8GiB", "2%", "64MiB", "T4", "-1B", "1e3"])
    | st.binary()
    | st.builds(Hostile),
    lambda inner: st.lists(inner) | st.tuples(inner, inner),
    max_leaves=4,
)
KWARGS = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=100), JUNK, max_size=4)


# what the marker says


def test_marker_with_every_field_says_them_all() -> None:
    assert spec(EVERY_FIELD) == MemorySpec(
        max_gib=8,
        max_allocated_gib=6.5,
        max_reserved_gib=7,
        card="T4",
        batch_size=32,
        tolerance=Tolerance(Fraction(1, 50), 64 * MIB),
        baseline=False,
        devices=2,
        warmup=1,
        max_leak_mib=0,
        steady=True,
    )


@pytest.mark.parametrize("marks", [[], [{}], [{}, {}]])
def test_marker_without_arguments_leaves_the_defaults(marks: list[Mapping[str, object]]) -> None:
    defaults = dict.fromkeys(FIELDS) | {"baseline": True, "devices": 1, "warmup": 0}
    defaults["steady"] = False
    assert asdict(spec(*marks)) == defaults


def test_budgets_are_also_there_in_bytes() -> None:
    declared = spec({"max_gib": 8, "max_allocated_gib": 0.1, "max_reserved_gib": 1.5})
    assert declared.max_bytes == 8 * GIB
    assert declared.max_allocated_bytes == 107_374_182
    assert declared.max_reserved_bytes == 3 * GIB // 2


def test_a_leak_is_in_mib_and_may_be_a_fraction() -> None:
    assert spec({"max_leak_mib": 0}).max_leak_bytes == 0
    assert spec({"max_leak_mib": 0.1}).max_leak_bytes == 104_857
    assert spec({"max_leak_mib": 3}).max_leak_bytes == 3 << 20
    assert spec({}).max_leak_bytes is None


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
    assert (empty.max_bytes, empty.max_allocated_bytes, empty.max_reserved_bytes) == (None,) * 3


def test_spec_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        MemorySpec().max_gib = 8  # type: ignore[misc]


def test_spec_is_hashable() -> None:
    assert len({spec({"tolerance": "2%"}), spec({"tolerance": ["2.0%"]})}) == 1


# several markers


def test_nearest_marker_wins_field_by_field() -> None:
    function = {"max_gib": 8}
    class_ = {"max_gib": 16, "batch_size": 32}
    module = {"max_gib": 24, "batch_size": 64, "devices": 2}
    assert spec(function, class_, module) == MemorySpec(max_gib=8, batch_size=32, devices=2)


@pytest.mark.parametrize("name", FIELDS)
def test_none_on_a_nearer_marker_takes_back_what_an_outer_one_says(name: str) -> None:
    world = {"world_size": 64} if name == "rank" else {}
    outer = {name: {**EVERY_FIELD, **WORLD}[name]}
    assert spec(outer, world) != spec(world)
    assert spec({name: None}, outer, world) == spec(world)


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
    remedy = f"write {right}" if right else "it may be one of "
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
        "@pytest.mark.gpu_memory(tolerance=0.02): this is not a tolerance; "
        "write it as '2%', as '64MiB' or as both, '2%, 64MiB'"
    )


def test_unknown_card_is_refused_with_the_marker_and_the_remedy_of_the_one_who_knows() -> None:
    assert str(refusal(card="Voodoo 2")) == (
        "@pytest.mark.gpu_memory(card='Voodoo 2'): nobody knows this card; write card='T4'"
    )


@pytest.mark.parametrize("value", [4, b"T4", True, ["T4"], Hostile()])
def test_card_that_is_not_text_is_refused(value: object) -> None:
    assert refusal(card=value).problem == "card must be a card's name, as text"


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


# one rank of many


def test_a_rank_is_the_first_where_none_is_given() -> None:
    assert spec(WORLD) == MemorySpec(world_size=64, rank=3)
    assert spec({"world_size": 64}) == MemorySpec(world_size=64, rank=0)
    assert spec({"rank": 2}, {"world_size": 8}) == MemorySpec(world_size=8, rank=2)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", 1_000_000, NAN, Hostile()])
def test_a_rank_is_a_whole_number(value: object) -> None:
    error = refusal(rank=value)
    assert error.problem == "rank must be a whole number from 0 to 999,999"


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        (
            [{"rank": 3}],
            "@pytest.mark.gpu_memory(rank=3): rank is one of world_size ranks; write world_size=4",
        ),
        (
            [{"rank": 0, "devices": 2}],
            (
                "@pytest.mark.gpu_memory(devices=2, rank=0): rank is one of world_size ranks; "
                "write world_size=8"
            ),
        ),
        (
            [{"rank": 8}, {"world_size": 8}],
            (
                "@pytest.mark.gpu_memory(world_size=8, rank=8): rank must be below world_size (8); "
                "write for example rank=7"
            ),
        ),
        (
            [{"world_size": 8}, {"devices": 2}],
            (
                "@pytest.mark.gpu_memory(devices=2, world_size=8): a rank runs on one device, and "
                "there is one rank in a test's process; leave out devices, or world_size"
            ),
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused(
    marks: list[Mapping[str, object]], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        spec(*marks)
    assert str(caught.value) == message


def test_a_part_is_of_the_tests_rank() -> None:
    test = MemorySpec(world_size=64, rank=3)
    assert spec_from_call("forward", {}, test) == test
    with pytest.raises(SpecError, match="rank holds for the whole test"):
        spec_from_call("forward", {"rank": 1}, test)


# parts of a test


def test_part_has_its_own_budgets_and_none_of_the_tests() -> None:
    test = MemorySpec(max_gib=8, max_allocated_gib=7, max_reserved_gib=7, card="T4")
    assert spec_from_call("forward", {"max_gib": 2}, test) == MemorySpec(max_gib=2)


def test_part_inherits_what_is_no_budget() -> None:
    test = MemorySpec(
        tolerance=Tolerance(Fraction(1, 50), 0), batch_size=32, baseline=False, devices=2
    )
    assert spec_from_call("forward", {}, test) == test


def test_part_is_not_warmed_up_on_its_own() -> None:
    assert spec_from_call("forward", {}, MemorySpec(warmup=3)).warmup == 0


def test_part_overrides_what_it_inherits() -> None:
    test = MemorySpec(tolerance=Tolerance(Fraction(1, 50), 0), batch_size=32, baseline=False)
    own = {"tolerance": "1MiB", "batch_size": 16, "baseline": True}
    assert spec_from_call("forward", own, test) == MemorySpec(
        tolerance=Tolerance(Fraction(0), MIB), batch_size=16, baseline=True
    )


@pytest.mark.parametrize("name", ["tolerance", "batch_size", "baseline"])
def test_part_takes_back_with_none_what_it_would_inherit(name: str) -> None:
    test = MemorySpec(tolerance=Tolerance(Fraction(1, 50), 0), batch_size=32, baseline=False)
    default = getattr(MemorySpec(), name)
    assert spec_from_call("forward", {name: None}, test) == replace(test, **{name: default})


@pytest.mark.parametrize(("name", "value"), [("card", "T4"), ("devices", 2), ("warmup", None)])
def test_part_refuses_what_holds_for_the_whole_test(name: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        spec_from_call("forward", {name: value}, MemorySpec())
    assert str(caught.value) == (
        f"gpu_memory.measure('forward', {name}={value!r}): "
        f"{name} holds for the whole test, not for a part of it; "
        f"put {name} on the test, in @pytest.mark.gpu_memory(...)"
    )


def test_bad_argument_of_a_part_is_refused_with_the_call() -> None:
    with pytest.raises(SpecError) as caught:
        spec_from_call("forward", {"max_gib": -1, "baseline": False}, MemorySpec())
    assert caught.value.given == "gpu_memory.measure('forward', max_gib=-1, ...)"
    assert caught.value.problem == "max_gib must be a number above 0"


def test_misspelt_argument_of_a_part_is_refused_with_a_suggestion() -> None:
    with pytest.raises(SpecError, match=r"no argument named max_mib; write max_gib, which is in"):
        spec_from_call("forward", {"max_mib": 512}, MemorySpec())


@pytest.mark.parametrize("name", ["", "  ", None, 1, Hostile()])
def test_part_without_a_name_is_refused(name: object) -> None:
    with pytest.raises(SpecError, match=r"needs a name, as text; write gpu_memory.measure\('forw"):
        spec_from_call(name, {}, MemorySpec())


@settings(deadline=None)
@given(st.text(), KWARGS)
def test_any_call_makes_a_usable_spec_or_a_spec_error(
    name: str, kwargs: Mapping[str, object]
) -> None:
    try:
        made = spec_from_call(name, kwargs, MemorySpec())
    except SpecError as error:
        assert error.given.startswith("gpu_memory.measure(")  # noqa: PT017
        return
    assert_usable(made)


def assert_usable(made: MemorySpec) -> None:
    for budget in (made.max_bytes, made.max_allocated_bytes, made.max_reserved_bytes):
        assert budget is None or 1 <= budget <= 10**9 * GIB
    assert made.card in (None, "T4")
    assert made.batch_size is None or made.batch_size >= 1
    assert made.tolerance is None or made.tolerance.allowance(GIB) >= 0
    assert isinstance(made.baseline, bool)
    assert made.devices in range(1, 17)
    assert made.warmup in range(1001)
    if made.world_size is None:
        assert made.rank is None
    else:
        assert made.devices == 1
        assert made.rank in range(made.world_size)
