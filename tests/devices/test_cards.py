"""Cards: their figures are sane and sourced, and their names are found however they are spelt."""

from __future__ import annotations

import dataclasses
import re

import pytest

from pytest_gpumem.devices.cards import CARDS, LIMITS, Card, card_names, find_card
from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import GIB, KIB, MIB

NOMINAL_GB = {
    "V100-16GB": 16, "V100-32GB": 32, "T4": 16, "RTX 2080 Ti": 11, "RTX 3060": 12, "RTX 3090": 24,
    "RTX 3090 Ti": 24, "RTX 4060": 8, "RTX 4090": 24, "RTX 5090": 32, "RTX PRO 5000 72GB": 72,
    "A10G": 24, "A10": 24, "L4": 24, "A40": 48, "A100-40GB": 40, "A100-80GB": 80, "A800-80GB": 80,
    "RTX A6000": 48, "RTX 6000 Ada": 48, "L40S": 48, "H100": 80, "H100-PCIe": 80, "H200": 141,
    "B200": 192,
}  # fmt: skip

every_card = pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)


def test_the_cards_that_are_promised_are_there():
    assert set(card_names()) == set(NOMINAL_GB)


@every_card
def test_total_memory_is_within_ten_percent_of_the_nominal_size(card: Card):
    """The nominal size is GiB on most boxes, and GB on those of H200 and B200."""
    unit = 10**9 if NOMINAL_GB[card.name] > 80 else GIB
    assert card.total_memory == pytest.approx(NOMINAL_GB[card.name] * unit, rel=0.1)


@every_card
def test_total_memory_comes_in_whole_64_kib_as_the_driver_counts_it(card: Card):
    """Every total in the deviceQuery logs does, so a mistyped digit shows."""
    assert card.total_memory % (64 * KIB) == 0


@every_card
def test_the_context_is_what_the_sms_explain(card: Card):
    explained = 2 * KIB * card.limits.max_threads_per_sm * card.sm_count + 8 * MIB
    assert 64 * MIB < card.context < 1 * GIB
    assert abs(card.context - explained) <= 48 * MIB


@every_card
def test_an_estimated_context_is_the_estimate_and_another_names_its_source(card: Card):
    explained = 2 * KIB * card.limits.max_threads_per_sm * card.sm_count + 8 * MIB
    if "context: estimated from the SM count" in card.source:
        assert card.context == explained
    else:
        assert re.search(r"context: \S", card.source) or "total and context: " in card.source


@every_card
def test_usable_memory_is_the_total_less_the_context(card: Card):
    assert card.usable_memory == card.total_memory - card.context


@every_card
def test_limits_are_those_of_the_capability(card: Card):
    assert card.limits is LIMITS[card.capability]


@every_card
def test_remaining_figures_are_sane_and_sourced(card: Card):
    assert card.device_name.startswith(("NVIDIA ", "Tesla "))
    assert 20 <= card.sm_count <= 200
    assert 2 * MIB <= card.l2_cache_size <= 128 * MIB
    assert card.memory_bus_width % 32 == 0
    assert 128 <= card.memory_bus_width <= 8192
    assert re.search(r"#\d+|thamada/gls|log|torch \d|measured by \S+/", card.source)


def test_cards_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CARDS["T4"].total_memory = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        CARDS["T5"] = CARDS["T4"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("capability", "threads", "blocks", "shared_kib"),
    [
        ((7, 0), 2048, 32, (96, 96, 0)),
        ((7, 5), 1024, 16, (64, 64, 0)),
        ((8, 0), 2048, 32, (164, 163, 1)),
        ((8, 6), 1536, 16, (100, 99, 1)),
        ((8, 9), 1536, 24, (100, 99, 1)),
        ((9, 0), 2048, 32, (228, 227, 1)),
        ((10, 0), 2048, 32, (228, 227, 1)),
        ((12, 0), 1536, 24, (100, 99, 1)),
    ],
)
def test_limits_of_a_capability(capability, threads, blocks, shared_kib):
    """Shared memory: of an SM, of a block that opts in, and what CUDA keeps of each block."""
    limits = LIMITS[capability]
    assert (limits.max_threads_per_sm, limits.max_blocks_per_sm) == (threads, blocks)
    assert (
        limits.shared_memory_per_sm // KIB,
        limits.shared_memory_per_block_optin // KIB,
        limits.reserved_shared_memory_per_block // KIB,
    ) == shared_kib
    assert limits.shared_memory_per_block == 49152
    assert limits.registers_per_sm == 65536


@every_card
def test_a_card_is_found_by_its_name_and_by_cuda_s_name_for_it(card: Card):
    assert find_card(card.name) is card
    assert find_card(card.device_name) is card


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("t4", "T4"),
        ("  Tesla_T4 ", "T4"),
        ("nvidia t4", "T4"),
        ("a100 80gb", "A100-80GB"),
        ("A100_80GB", "A100-80GB"),
        ("a100-40g", "A100-40GB"),
        ("A100-40GiB", "A100-40GB"),
        ("NVIDIA A100 80GB SXM", "A100-80GB"),
        ("a100 40gb sxm", "A100-40GB"),
        ("v100 32gb", "V100-32GB"),
        ("RTX3090", "RTX 3090"),
        ("GeForce RTX 3090", "RTX 3090"),
        ("3090 ti", "RTX 3090 Ti"),
        ("4090", "RTX 4090"),
        ("rtx pro 5000 72 GiB", "RTX PRO 5000 72GB"),
        ("rtx2080ti", "RTX 2080 Ti"),
        ("a6000", "RTX A6000"),
        ("6000 ada", "RTX 6000 Ada"),
        ("nvidia h100", "H100"),
        ("h100 sxm5", "H100"),
        ("H100-SXM", "H100"),
        ("h100 80gb pcie", "H100-PCIe"),
        ("H100 80GB", "H100"),
        ("h100pcie", "H100-PCIe"),
        ("a10g", "A10G"),
        ("a10", "A10"),
        ("l4", "L4"),
    ],
)
def test_a_name_is_found_however_it_is_spelt(given: str, name: str):
    assert find_card(given).name == name


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("A100", "write A100-40GB or A100-80GB"),
        ("nvidia v100", "write V100-16GB or V100-32GB"),
        ("A100-SXM4", "write A100-40GB or A100-80GB"),
        ("RTX 40", "write RTX 4060 or RTX 4090"),
    ],
)
def test_an_ambiguous_name_is_refused_with_the_cards_that_it_may_mean(given: str, remedy: str):
    with pytest.raises(SpecError) as refused:
        find_card(given)
    assert refused.value.given == f"card {given!r}"
    assert refused.value.problem == "this name fits several cards"
    assert refused.value.remedy == remedy


@pytest.mark.parametrize(
    ("given", "likely"),
    [("H1000", "H100"), ("A8", "A800-80GB"), ("L50S", "L40S"), ("RTX 3091", "RTX 3090")],
)
def test_an_unknown_name_is_refused_with_the_likeliest_card_and_all_names(given: str, likely: str):
    with pytest.raises(SpecError) as refused:
        find_card(given)
    assert refused.value.problem == "no card has this name"
    assert refused.value.remedy.startswith(f"did you mean {likely!r}?")
    assert refused.value.remedy.endswith(", ".join(card_names()))


@pytest.mark.parametrize("given", ["", "RTX", "nvidia", "zzz", "---"])
def test_a_name_like_no_other_is_refused_with_all_names(given: str):
    with pytest.raises(SpecError) as refused:
        find_card(given)
    assert refused.value.remedy == "write one of " + ", ".join(card_names())
