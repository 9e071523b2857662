"""Parts of node ids."""

from __future__ import annotations

import pytest

from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.nodeids import module_of, split_nodeid, without_card


def test_a_nodeid_is_a_module_and_a_test():
    assert split_nodeid("a/test_b.py::TestC::test_d[x::y]") == (
        "a/test_b.py",
        "TestC::test_d[x::y]",
    )
    assert split_nodeid("a/test_b.py") == ("a/test_b.py", "")
    assert module_of("a/test_b.py::test_d") == "a/test_b.py"


@pytest.mark.parametrize(
    ("nodeid", "card", "name"),
    [
        ("a.py::test_x[T4]", "T4", "a.py::test_x"),
        ("a.py::test_x[A100-80GB-8]", "A100-80GB", "a.py::test_x[8]"),
        ("a.py::test_x[8-A100-80GB]", "A100-80GB", "a.py::test_x[8]"),
        ("a.py::test_x[8-T4-rank0]", "T4", "a.py::test_x[8-rank0]"),
        ("a[T4]b.py::test_x[1]", "T4", "a[T4]b.py::test_x[1]"),
        ("a.py::test_x[T40]", "T4", "a.py::test_x[T40]"),
        ("a.py::test_x", "T4", "a.py::test_x"),
    ],
)
def test_a_tests_name_without_its_card(nodeid, card, name):
    assert without_card(nodeid, [card]) == name


def test_of_cards_whose_names_begin_alike_the_longest_is_meant():
    assert without_card("a.py::test_x[H100-PCIe-8]", CARDS) == "a.py::test_x[8]"
    assert without_card("a.py::test_x[H100-8]", CARDS) == "a.py::test_x[8]"
