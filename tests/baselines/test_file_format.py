"""A baseline file's content: read strictly, with an error that names file, place and remedy."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import damage
from helpers.damage import ANY_TEXT, JSON, damaged, damages, places
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.baselines.file_format import BaselineFile, check, decode, encode
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.measurement import (
    BaselineEntry,
    Breakdown,
    DeviceInfo,
    LinePeak,
    Peak,
    Provenance,
)

T4 = DeviceInfo("virtual", "T4", 15_828_320_256, (7, 5), 40)
MADE = Provenance("2.15.0", "13.2", "92600", "virtual", "")
PATH = Path("baselines/virtual-T4/m.json")
ENTRY = BaselineEntry((Peak(1, 2),), MADE, 32)
FILE = BaselineFile(T4, "m.py", {"test_a": {"": ENTRY, "forward": ENTRY}, "test_b": {"x": ENTRY}})
TEXT = encode(FILE).decode()


def read(content):
    return decode(PATH, content if isinstance(content, bytes) else content.encode(), T4.key, "m.py")


def refused(content):
    """The error that reading this content is, after a look at its parts."""
    with pytest.raises(BaselineError) as caught:
        read(content)
    assert caught.value.given == str(PATH)
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()
    return caught.value


def with_value(value, *place):
    """The file with one value of it replaced; with ``...``, taken away."""
    return damage.with_value(TEXT, value, place)


def test_what_was_encoded_is_decoded():
    file = read(TEXT)
    assert (file.module, file.tests) == (FILE.module, FILE.tests)
    assert file.labels == {MADE: "torch-2.15.0+cu132"}
    assert encode(file).decode() == TEXT


def test_a_hand_written_label_stays():
    text = TEXT.replace("torch-2.15.0+cu132", "nightly")
    assert encode(read(text)).decode() == text


def test_a_provenance_that_nothing_refers_to_is_dropped():
    record = json.loads(TEXT)["provenance"]["torch-2.15.0+cu132"]
    text = with_value({**record, "torch": "1"}, "provenance", "old")
    assert encode(read(text)).decode() == TEXT


def test_a_label_with_a_hash_that_another_has_already_is_avoided():
    """However a file was edited, two provenances never share a label."""
    other = [Provenance("2.15.0", "13.2", "92600", f"driver {i}", "") for i in range(3)]
    entries = {f"test_{i}": {"": BaselineEntry((Peak(1, 2),), it)} for i, it in enumerate(other)}
    first = read(encode(BaselineFile(T4, "m.py", entries)))
    (hashed,) = [label for it, label in first.labels.items() if it == other[1]]
    taken = BaselineFile(T4, "m.py", entries, {other[0]: "torch-2.15.0+cu132", other[2]: hashed})
    assert read(encode(taken)).tests == entries


def test_which_label_a_provenance_gets_does_not_depend_on_the_order_of_tests():
    made = [Provenance("2.15.0", "13.2", "92600", f"driver {i}", "") for i in range(9)]
    tests = {f"test_{it.driver}": {"": BaselineEntry((Peak(1, 2),), it)} for it in made[::-1]}
    labels = read(encode(BaselineFile(T4, "m.py", tests))).labels
    assert labels[made[0]] == "torch-2.15.0+cu132"


def test_figures_of_several_devices_stand_on_one_line():
    entry = BaselineEntry((Peak(1, 2), Peak(3, 4)), MADE)
    text = encode(BaselineFile(T4, "m.py", {"test_a": {"": entry}})).decode()
    assert '   "peak_allocated": [1, 3],\n   "peak_reserved": [2, 4],\n' in text
    assert read(text).tests["test_a"][""] == entry


def test_the_rank_that_was_measured_stands_with_its_figures():
    entry = BaselineEntry((Peak(1, 2),), MADE, world_size=64, rank=0)
    text = encode(BaselineFile(T4, "m.py", {"test_a": {"": entry}})).decode()
    assert '   "rank": 0,\n   "world_size": 64\n' in text
    assert read(text).tests["test_a"][""] == entry


def test_a_breakdown_has_the_peaks_of_lines_where_these_were_recorded():
    lines = (
        LinePeak("train.py", 9, "step", "loss.backward()", 8 << 20, calls_pass=True),
        LinePeak("model.py", 29, "Tiny.forward", "return self.head(x)", 4 << 20),
    )
    first = Breakdown({"activations": 9 << 20}, 0)
    second = replace(first, lines=lines, unsplit=512, autocast=False)
    texts = []
    for breakdown in (first, second):
        entry = BaselineEntry((Peak(9 << 20, 9 << 20),), MADE, breakdowns=(breakdown,))
        texts.append(encode(BaselineFile(T4, "m.py", {"test_a": {"": entry}})).decode())
        assert read(texts[-1]).tests["test_a"][""] == entry
    assert "unsplit" not in texts[0]
    own = '"calls_pass": true, "code": "loss.backward()", "function": "step", "line": 9'
    assert f'      {{"bytes": 8388608, {own}, "path": "train.py"}},\n' in texts[1]


def test_a_breakdown_may_have_the_memory_in_the_course_of_the_step():
    course = tuple(range(0, 40 << 20, 1 << 20))
    breakdown = Breakdown({"activations": 40 << 20}, 0, unsplit=0, autocast=False, course=course)
    entry = BaselineEntry((Peak(40 << 20, 40 << 20),), MADE, breakdowns=(breakdown,))
    text = encode(BaselineFile(T4, "m.py", {"test_a": {"": entry}})).decode()
    (line,) = [line for line in text.splitlines() if "course" in line]  # a reviewer sees one line
    assert line == f'     "course": {json.dumps(course)},'
    assert read(text).tests["test_a"][""] == entry
    old = read(text.replace(f"{line}\n", ""))
    assert old.tests["test_a"][""].breakdowns[0].course == ()


@pytest.mark.parametrize("lines", ["\r\n", "\r"])
def test_line_ends_of_other_systems_are_read(lines):
    assert read(TEXT.replace("\n", lines)).tests == FILE.tests


def test_a_byte_order_mark_is_read_over():
    assert read(b"\xef\xbb\xbf" + TEXT.encode()).tests == FILE.tests


def test_a_file_cut_short_is_named_with_line_and_column():
    error = refused(TEXT[: TEXT.index('1,\n "module"')])
    assert str(error) == (
        "baselines/virtual-T4/m.json: is not JSON: Expecting value in line 9, column 12; "
        "restore it from version control, or delete it and run with --gpumem-update-baselines"
    )


@pytest.mark.parametrize("content", ["", " \r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_called_empty(content):
    assert refused(content).problem == "is empty"


@pytest.mark.parametrize("lines", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "marker", ["<<<<<<< HEAD", "=======", ">>>>>>> 1a2b", "||||||| base", "<<<<<<<"]
)
def test_a_merge_conflict_is_called_one_and_its_line_named(marker, lines):
    before, after = TEXT.split(' "format"')
    error = refused(f'{before}{marker}\n "format"{after}'.replace("\n", lines))
    assert error.problem == f"has a merge-conflict marker ({marker[:7]}) in line 9"
    assert "git checkout --ours FILE, or --theirs" in error.remedy


def test_a_conflict_marker_in_a_name_is_no_conflict():
    name = "test_a[\n<<<<<<< HEAD]"
    text = encode(BaselineFile(T4, "m.py", {name: {"": ENTRY}}))
    assert list(read(text).tests) == [name]
    broken = refused(text.decode().replace('"tests": {', '"tests": {{'))
    assert broken.problem.startswith("is not JSON")


def test_a_ruler_is_no_conflict_marker():
    assert refused(f"========\n{TEXT}").problem.startswith("is not JSON")


def test_a_newer_format_asks_for_an_upgrade():
    document = '{"format": 2, "something": ["new"]}'
    assert str(refused(document)) == (
        "baselines/virtual-T4/m.json: was written by a newer pytest-gpumem (format 2; "
        "this one reads 1); upgrade pytest-gpumem"
    )


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '{"format": 0}', '{"format": true}'])
def test_json_that_is_no_baseline_is_called_that(content):
    assert refused(content).problem == 'is not a baseline: it has no "format" number'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff\xfe{\x00", "is not UTF-8 text: byte 0xff at 0"),
        (b'{"format\xe9": 1}', "is not UTF-8 text: byte 0xe9 at 8"),
        ("[" * 100_000, "is nested too deeply for a baseline"),
        ('{"a":' * 100_000, "is nested too deeply for a baseline"),
        ('{"format": NaN}', "is not a baseline: NaN is not a number of bytes"),
        ('{"format": -Infinity}', "is not a baseline: -Infinity is not a number of bytes"),
        ('{"format": 1, "format": 1}', 'is not a baseline: "format" occurs twice in one object'),
    ],
    ids=lambda it: repr(it[:15]),
)
def test_what_is_not_fit_to_be_a_baseline_is_said(content, problem):
    assert refused(content).problem == problem


def test_a_number_of_endless_digits_is_refused():
    assert refused(TEXT.replace("[1]", f"[{'9' * 100_000}]", 1)).problem


def test_a_test_that_is_there_twice_is_refused():
    assert (
        '"test_a" occurs twice in one object' in refused(TEXT.replace("test_b", "test_a")).problem
    )


FIGURE = ("tests", "test_a", "peak_allocated")
PART = ("tests", "test_a", "parts", "forward")
MADE_AT = ("provenance", "torch-2.15.0+cu132")
MADE_PLACE = '$.provenance["torch-2.15.0+cu132"]'


@pytest.mark.parametrize(
    ("value", "place", "problem"),
    [
        ([-1], FIGURE, 'Expected `int` >= 0 at $.tests["test_a"].peak_allocated[0]'),
        ([True], FIGURE, 'Expected `int`, got `bool` at $.tests["test_a"].peak_allocated[0]'),
        (["1"], FIGURE, 'Expected `int`, got `str` at $.tests["test_a"].peak_allocated[0]'),
        ([1.0], FIGURE, 'Expected `int`, got `float` at $.tests["test_a"].peak_allocated[0]'),
        ([None], FIGURE, 'Expected `int`, got `null` at $.tests["test_a"].peak_allocated[0]'),
        (
            [2**63],
            FIGURE,
            f'Expected `int` <= {2**63 - 1} at $.tests["test_a"].peak_allocated[0]',
        ),
        ([], FIGURE, 'Expected `array` of length >= 1 at $.tests["test_a"].peak_allocated'),
        (1, FIGURE, 'Expected `array`, got `int` at $.tests["test_a"].peak_allocated'),
        (
            [1, 2],
            FIGURE,
            ('peak_allocated and peak_reserved have different numbers of devices at '
                '$.tests["test_a"]'),
        ),
        (..., FIGURE, 'Object missing required field `peak_allocated` at $.tests["test_a"]'),
        (1, (*FIGURE[:2], "more"), 'Object contains unknown field `more` at $.tests["test_a"]'),
        (-1, (*FIGURE[:2], "batch_size"), 'Expected `int` >= 0 at $.tests["test_a"].batch_size'),
        (
            "other",
            (*FIGURE[:2], "provenance"),
            'provenance "other" is not in the file at $.tests["test_a"]',
        ),
        ([], ("tests", "test_a"), 'Expected `object`, got `array` at $.tests["test_a"]'),
        (
            {},
            ("tests", "test_a"),
            'Object missing required field `peak_allocated` at $.tests["test_a"]',
        ),
        (
            {"parts": {}},
            ("tests", "test_a"),
            'Object missing required field `peak_allocated` at $.tests["test_a"]',
        ),
        (
            3,
            (*FIGURE[:2], "parts"),
            'Expected `object`, got `int` at $.tests["test_a"].parts',
        ),
        (3, PART, 'Expected `object`, got `int` at $.tests["test_a"].parts["forward"]'),
        (
            {},
            (*PART, "parts"),
            'Object contains unknown field `parts` at $.tests["test_a"].parts["forward"]',
        ),
        ({}, (*PART[:3], ""), 'a part has no name at $.tests["test_a"].parts'),
        (..., ("module",), "Object missing required field `module` at $"),
        (1, ("more",), "Object contains unknown field `more` at $"),
        (..., (*MADE_AT, "cuda"), f"Object missing required field `cuda` at {MADE_PLACE}"),
        (1, (*MADE_AT, "x"), f"Object contains unknown field `x` at {MADE_PLACE}"),
        (1, ("device", "x"), "Object contains unknown field `x` at $.device"),
        ([7, -1], ("device", "capability"), "Expected `int` >= 0 at $.device.capability[1]"),
        (-1, ("device", "total_memory"), "Expected `int` >= 0 at $.device.total_memory"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_place(value, place, problem):
    error = refused(with_value(value, *place))
    assert error.problem == problem
    assert "restore it from version control" in error.remedy


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (("device", "key"), 'belongs to device "other", but is in the place of "virtual-T4"'),
        (("module",), 'belongs to module "other", but is in the place of "m.py"'),
    ],
)
def test_a_file_that_was_copied_from_elsewhere_is_foreign(place, problem):
    error = refused(with_value("other", *place))
    assert error.problem == problem
    assert error.remedy == "move the file back to its place, or delete it"


def test_a_name_of_odd_characters_is_escaped_in_the_error():
    assert "`\\u202e\\u001b[31m`" in refused(with_value(1, "\u202e\x1b[31m")).problem
    refused(with_value(1, "\ud800"))
    refused(with_value(1, "tests", "test_a", "\udc80"))
    refused(with_value(1, "tests", "\u202e\x1b[31m"))


def test_the_format_is_a_number_that_the_file_has():
    assert json.loads(TEXT)["format"] == 1


NUMBERS = st.integers(0, 2**63 - 1)
PROVENANCES = st.builds(Provenance, *[st.text("13.+é", max_size=3)] * 5)
ENTRIES = st.builds(
    BaselineEntry,
    st.lists(st.builds(Peak, NUMBERS, NUMBERS), min_size=1, max_size=3).map(tuple),
    PROVENANCES,
    st.none() | NUMBERS,
)
NAMES = ANY_TEXT.filter(lambda name: json.loads(json.dumps(name)) == name)  # see the next
TESTS = st.dictionaries(NAMES, st.dictionaries(NAMES, ENTRIES, min_size=1, max_size=2), max_size=3)


@pytest.mark.parametrize(("test", "part"), [("\ud800\udc00", ""), ("test_a", "\ud800\udc00")])
def test_a_name_that_json_cannot_keep_is_refused(test, part):
    with pytest.raises(BaselineError, match=r'"\\ud800\\udc00.* reads as one character; rename it'):
        check(test, T4, {part: ENTRY})
    check("\ud800", T4, {"\udc00": ENTRY})


@settings(deadline=None)
@given(TESTS)
def test_whatever_is_written_is_read_back(tests):
    content = encode(BaselineFile(T4, "m.py", tests))
    file = read(content)
    assert file.tests == tests
    assert encode(file) == content


def decoded_or_refused(content):
    """A file is an error, or stays what it is when it is written and read again."""
    file = None
    with suppress(BaselineError):
        file = read(content)
    if file is not None:
        again = read(encode(file))
        assert (again.tests, encode(again)) == (file.tests, encode(file))


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_an_error_or_a_baseline(content):
    decoded_or_refused(content)


@settings(deadline=None)
@given(damages(len(TEXT)))
def test_any_damage_to_a_file_is_an_error_or_a_baseline(pieces):
    decoded_or_refused(damaged(TEXT.encode(), pieces))


@settings(deadline=None)
@given(JSON | st.just(...), st.sampled_from(list(places(json.loads(TEXT)))))
def test_any_json_in_any_place_is_an_error_or_a_baseline(value, place):
    decoded_or_refused(with_value(value if place or value is not ... else None, *place))
