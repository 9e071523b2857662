"""What one rank of many and a part of a test may declare."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from helpers.spec_marks import KWARGS, NAN, WORLD, Hostile, assert_usable, refusal, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import MIB, Tolerance
from pytest_gpumem.spec import MemorySpec, spec_from_call

if TYPE_CHECKING:
    from collections.abc import Mapping

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
            "@pytest.mark.gpu_memory(rank=3): rank needs world_size; write world_size=4",
        ),
        (
            [{"rank": 0, "devices": 2}],
            (
                "@pytest.mark.gpu_memory(devices=2, rank=0): rank needs world_size; write "
                "world_size=8"
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
                "@pytest.mark.gpu_memory(devices=2, world_size=8): a rank runs on one "
                "device, and a test's process runs one rank; leave out devices, or "
                "world_size"
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
    with pytest.raises(SpecError, match="rank is for the whole test, not for a part"):
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
        f"gpu_memory.measure('forward', {name}={value!r}): {name} is for the whole test, "
        f"not for a part; put {name} on the test, in @pytest.mark.gpu_memory(...)"
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
