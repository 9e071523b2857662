"""Which baselines are stale, given what was collected."""

from __future__ import annotations

import pytest

from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.plugin.stale_hooks import Collection, find_stale, stale_line


def key(nodeid, device="virtual-T4"):
    module, _, test = nodeid.partition("::")
    return Key(device, module, test)


def collected(*tests, files=("a.py",), **others):
    return Collection(set(tests), set(files), **others)


@pytest.mark.parametrize(
    ("collection", "there", "stale"),
    [
        (collected("a.py::x"), True, False),
        (collected("a.py::y"), True, True),
        (collected("a.py::y"), False, True),
        (collected("b.py::x", files=("b.py",)), True, False),  # nobody looked into a.py
        (collected("b.py::x", files=("b.py",)), False, True),
        (collected("a.py::y", skipped={"a.py"}), True, False),
        (collected("a.py::y", skipped={"a.py"}), False, True),
        (collected("a.py::y", partial="-k was given"), True, False),
        (collected("a.py::y", partial="-k was given"), False, False),
        (collected("a.py::x[1]"), True, True),
        (collected("a.py::X::x"), True, True),
    ],
)
def test_a_baseline_is_stale_if_its_test_is_known_to_be_gone(collection, there, stale):
    found = find_stale(collection, [key("a.py::x")], lambda module: there)
    assert found == ([key("a.py::x")] if stale else [])


@pytest.mark.parametrize(
    ("tests", "baseline", "stale"),
    [
        (["x"], "x[T4]", False),
        (["x"], "x[A100-80GB]", False),
        (["x[8]"], "x[8-T4]", False),
        (["x[8]"], "x[9-T4]", True),
        (["x[rank0]"], "x[T4-rank0]", False),
        (["x[8-rank0]"], "x[8-T4-rank0]", False),
        (["x[8-rank0]"], "x[8-T4-rank1]", True),
        (["x"], "x[Voodoo]", True),
        (["x"], "y[T4]", True),
        (["x[T4]"], "x", True),
    ],
)
def test_baselines_of_the_option_that_names_cards_are_their_tests(tests, baseline, stale):
    collection = collected(*(f"a.py::{name}" for name in tests))
    assert bool(find_stale(collection, [key(f"a.py::{baseline}")], bool)) == stale


def test_each_file_is_looked_for_once():
    asked = []
    keys = [key(f"a.py::{i}", device) for i in range(9) for device in ("virtual-T4", "virtual-L4")]
    stale = find_stale(collected(), keys, asked.append)
    assert asked == ["a.py"]
    assert len(stale) == 18


def test_reports_say_what_was_collected():
    collection = Collection()
    for nodeid, outcome in (
        ("", "passed"),
        ("a.py", "passed"),
        ("b.py", "skipped"),
        ("c.py", "passed"),
        ("c.py::TestX", "skipped"),
    ):
        collection.record(nodeid, outcome)
    assert collection.skipped == {"b.py", "c.py"}
    assert collection.files >= {"a.py", "c.py"}
    assert collection.partial == ""
    collection.record("d.py", "failed")
    collection.record("e.py", "failed")
    assert collection.partial == "d.py could not be collected"


def test_the_line_names_three():
    assert stale_line([]) == ""
    assert stale_line([key("a.py::x")]) == (
        "gpumem: 1 baseline has no test any more (pytest --collect-only --gpumem-stale=delete "
        "deletes them): a.py::x on virtual-T4"
    )
    five = stale_line(key(f"a.py::{i}") for i in range(5))
    assert five.startswith("gpumem: 5 baselines have no test any more (")
    assert five.endswith(
        "a.py::0 on virtual-T4, a.py::1 on virtual-T4, a.py::2 on virtual-T4, 2 more"
    )


def test_a_module_too_long_for_any_path_is_gone(tmp_path):
    """It is in a baseline file, whose own name is cut."""
    collection = Collection(tests={"a.py::x"}, files={"a.py"})
    long = key(f"{'a' * 300}.py::x")
    assert find_stale(collection, [long], lambda module: (tmp_path / module).exists()) == [long]
