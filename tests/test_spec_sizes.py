"""Marker arguments of which one test makes several runs: sizes, variants, cards, ranks."""

from __future__ import annotations

import pytest
from helpers.spec_marks import Hostile, refusal, spec

from pytest_gpumem.sizes import GIB, MIB


def test_batch_sizes_are_ascending_and_the_last_is_the_batch_size() -> None:
    declared = spec({"batch_sizes": [32, 8, 16], "max_mib_per_sample": 0.5, "max_fixed_gib": 2})
    assert declared.batch_sizes == (8, 16, 32)
    assert declared.batch_size == 32
    assert declared.bytes_of("max_mib_per_sample") == MIB // 2
    assert declared.bytes_of("max_fixed_gib") == 2 * GIB


@pytest.mark.parametrize(
    "value", [[], [8], [8, 8], [8, 0], [8, -1], [8, 1.5], "8,16", 8, {8: 1}, [True, 8], Hostile()]
)
def test_batch_sizes_that_are_no_list_of_two_are_refused(value: object) -> None:
    error = refusal(batch_sizes=value)
    assert error.problem == (
        "batch_sizes must be a list of two or more different whole numbers above 0"
    )
    assert error.remedy == "write for example batch_sizes=[8, 16, 32]"


@pytest.mark.parametrize("name", ["max_mib_per_sample", "max_fixed_gib"])
def test_limits_of_growth_take_several_batch_sizes(name: str) -> None:
    assert str(refusal(**{name: 3})) == (
        f"@pytest.mark.gpu_memory({name}=3): {name} needs several batch sizes; write "
        "batch_sizes=[8, 16, 32] as well, and use gpu_memory.batch_size in the test"
    )


@pytest.mark.parametrize("value", [0, -1, "3", True, float("nan"), 10**10, Hostile()])
def test_a_bad_limit_per_sample_is_refused(value: object) -> None:
    error = refusal(max_mib_per_sample=value, batch_sizes=[1, 2])
    assert error.problem == "max_mib_per_sample must be a number of MiB above 0"


def test_one_batch_size_and_several_are_refused_and_the_nearer_marker_wins() -> None:
    assert refusal(batch_size=8, batch_sizes=[8, 16]).remedy == "leave out batch_size"
    assert spec({"batch_sizes": [8, 16]}, {"batch_size": 4}).batch_size == 16
    assert spec({"batch_size": 4}, {"batch_sizes": [8, 16]}).batch_sizes is None


def test_variants_are_what_they_switch() -> None:
    declared = spec({"variants": {"amp": True, "small": {"layers": 2}}})
    assert declared.variants == {"amp": {"amp": True}, "small": {"layers": 2}}


@pytest.mark.parametrize(
    "value", ["amp", ["amp"], {1: True}, {"": True}, {"amp": 1}, {"amp": {1: 2}}, Hostile()]
)
def test_variants_that_switch_nothing_are_refused(value: object) -> None:
    assert refusal(variants=value).remedy == 'write for example variants={"amp": {"amp": True}}'


def test_nobody_declares_the_variant_that_is_tried() -> None:
    assert refusal(variant={}).problem == "there is no argument named variant"


def test_several_cards_and_ranks_are_several_tests_and_else_refused() -> None:
    assert str(refusal(card=["T4", "T4"])) == (
        "@pytest.mark.gpu_memory(card=['T4']): a method of a unittest.TestCase cannot run "
        "as several tests; write card='T4', or a plain class or function"
    )
    assert spec({"card": "T4"}, {"card": ["T4"]}).card == "T4"
    assert refusal(ranks="all", world_size=4).remedy == "write rank=0, or a plain class or function"
    assert spec({"rank": 2, "ranks": None}, {"ranks": "all", "world_size": 4}).rank == 2
    assert refusal(ranks=[0]).problem == "ranks needs world_size"


@pytest.mark.parametrize("value", ["some", [], [-1], [0, 0], [0.5], 3, Hostile()])
def test_ranks_that_are_none_are_refused(value: object) -> None:
    error = refusal(ranks=value, world_size=4)
    assert error.problem == 'ranks must be "all", or a list of different ranks from 0'
