"""The table of tests by cards."""

from dataclasses import replace

from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.judge.result import Result
from pytest_gpumem.judge.verdict import Kind, Verdict
from pytest_gpumem.measurement import DeviceInfo, Measurement, OutOfMemory, Peak, Provenance
from pytest_gpumem.report.parts.card_matrix import cards_matrix, headroom
from pytest_gpumem.sizes import GIB

DEVICE = DeviceInfo("virtual", "T4", 15 * GIB, (7, 5), 40)
MADE = Provenance("2.15.0", "13.2", "9", "virtual", "")


def result(name, card, gib, *, kind=Kind.WITHIN, **more):
    oom = None
    if kind is Kind.OUT_OF_MEMORY:
        oom = OutOfMemory(1, 1, 1, "", needed=more.get("needed"))
    peak = Peak(gib * GIB, gib * GIB)
    measurement = Measurement(DEVICE, MADE, (peak,), (), (), out_of_memory=oom)
    verdict = Verdict(kind, kind is not Kind.WITHIN, "")
    return Result(
        f"test_a.py::{name}[{card}]", verdict, measurement, part=more.get("part", ""), card=card
    )


def test_cards_are_in_the_order_of_their_memory_and_cells_say_what_is_left():
    results = [
        result("test_a", "L4", 8),
        result("test_a", "T4", 8),
        result("test_b", "T4", 1, kind=Kind.OUT_OF_MEMORY, needed=Peak(20 * GIB, 20 * GIB)),
        result("test_b", "L4", 1, kind=Kind.OUT_OF_MEMORY),
        result("test_c", "T4", 8, kind=Kind.OVER_BUDGET),
        result("test_c", "L4", 8, part="forward"),
        replace(result("test_c", "L4", 8), measurement=None),
    ]
    assert cards_matrix(results).splitlines() == [
        "GiB left on each card               T4     L4",
        "---------------------  ---------------  -----",
        "test_a.py::test_a                 6.44  13.77",
        "test_a.py::test_b      no, needs 20.00     no",
        "test_a.py::test_c          over budget      ?",
    ]


def test_nothing_is_shown_of_one_card_or_none():
    assert cards_matrix([]) == ""
    assert cards_matrix([result("test_a", "T4", 8), result("test_b", "L4", 8)]) == ""


def test_many_cards_are_several_tables_of_the_width():
    results = [result("test_" + "x" * 60, card, 2) for card in CARDS]
    text = cards_matrix(results, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.split("\n\n")) > 2
    assert all(card in text for card in CARDS)


def test_what_is_left_is_the_cards_memory_for_a_step_less_the_peak():
    assert headroom(result("test_a", "T4", 8)) == CARDS["T4"].usable_memory - 8 * GIB
    assert headroom(replace(result("test_a", "T4", 8), card="")) is None
