"""All baselines of a folder: what is read, what is refused, and how fast names are."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from helpers.command_line import T4, write
from helpers.damage import DEPTHS, nested, places
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.baselines.file_format import read_names
from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.baselines.store import BaselineStore, NewBaseline
from pytest_gpumem.cli.recorded.folder import read_contents, read_folder
from pytest_gpumem.measurement import BaselineEntry, Peak, Provenance

NAMES = st.sampled_from(["format", "device", "key", "module", "tests", "provenance"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | NAMES, inner),
    max_leaves=12,
)


def test_names_are_those_of_the_entries(tmp_path):
    write(tmp_path, {"test_a": (1, 2), "test_b[x/y]": (3, 4)})
    write(tmp_path, {"test_c": (1, 2)}, module="other/test_größe.py")
    figures = read_folder(tmp_path)
    assert not figures.errors
    assert (
        set(read_names(tmp_path))
        == set(figures.entries)
        == {
            Key("virtual-T4", "tests/test_a.py", "test_a"),
            Key("virtual-T4", "tests/test_a.py", "test_b[x/y]"),
            Key("virtual-T4", "other/test_größe.py", "test_c"),
        }
    )


def test_what_is_no_baseline_is_no_name_and_an_error(tmp_path):
    write(tmp_path, {"test_a": (1, 2)})
    (tmp_path / "virtual-T4/other.json").write_text("{}")
    (tmp_path / "virtual-T4/folder.json").mkdir()
    (tmp_path / "virtual-T4/gone.json").symlink_to(tmp_path / "absent")
    (tmp_path / "README").write_text("text")
    path = tmp_path / "virtual-T4/tests/test_a.json"
    (tmp_path / "virtual-T4/copy.json").write_bytes(path.read_bytes())
    figures = read_folder(tmp_path)
    assert len(figures.entries) == 1
    assert sorted(Path(it.given).name for it in figures.errors) == ["copy.json", "other.json"]
    assert [key.test for key in read_names(tmp_path)] == ["test_a"]


def test_a_folder_that_is_not_there_has_nothing(tmp_path):
    assert read_folder(tmp_path / "absent").files == 0
    assert read_names(tmp_path / "absent") == []


@settings(max_examples=200, deadline=None)
@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_a_file_holds_is_read_or_refused_by_name(content):
    path = Path("baselines/virtual-T4/a.json")
    figures = read_contents([(path, lambda _: content)], Path("baselines"))
    assert figures.files == 1
    assert not figures.entries
    for error in figures.errors:
        assert error.given == str(path)
        assert "\n" not in str(error)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("bracket", "[{")
def test_brackets_of_any_depth_cost_one_file(tmp_path, bracket, depth):
    """Such a file ended the session once, and no baseline was written."""
    write(tmp_path, {"test_a": (1, 2)})
    write(tmp_path, {"test_b": (1, 2)}, module="deep.py")
    deep = tmp_path / "virtual-T4/deep.json"
    text = deep.read_text()
    for place in places(json.loads(text)):
        deep.write_text(nested(text, place, depth, bracket=bracket))
        figures = read_folder(tmp_path)
        assert [key.test for key in figures.entries] == ["test_a"]
        assert [error.given for error in figures.errors] == [str(deep)]
        names = {key.test for key in read_names(tmp_path)}
        assert "test_a" in names
        assert names <= {"test_a", "test_b", "a"}
        assert not BaselineStore(tmp_path).update([]).errors


def test_ten_thousand_names_are_read_in_a_second(tmp_path):
    """About 0.01 s of CPU; what grows with the square takes minutes."""
    entry = BaselineEntry((Peak(1, 2),), Provenance("2.15.0", "13.2", "9", "virtual", ""), 32)
    changes = (NewBaseline(T4, "test_a.py", f"test_{i}", {"": entry}) for i in range(10_000))
    assert not BaselineStore(tmp_path).update(changes).errors
    start = time.process_time()
    assert len(read_names(tmp_path)) == 10_000
    assert time.process_time() - start < 1
