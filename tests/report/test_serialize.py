"""Results as text and back."""

from __future__ import annotations

import json

import pytest
from helpers.damage import DEPTHS, nested, places
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.result import Result
from pytest_gpumem.judge.verdict import PEAKS, Comparison, Kind, UpdateCommand, Verdict
from pytest_gpumem.measurement import DeviceInfo, Measurement, OutOfMemory, Peak, Provenance
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.report.serialize import from_text, to_text

SIZES = st.integers(0, 2**48)
TEXTS = st.text(max_size=20)
NOTES = st.lists(st.builds(Note, st.sampled_from(NoteKind), TEXTS), max_size=3).map(tuple)
WORDS = st.lists(TEXTS, max_size=2).map(tuple)
PEAK = st.builds(Peak, SIZES, SIZES)
PEAK_TUPLES = st.lists(PEAK, max_size=3).map(tuple)
OUT_OF_MEMORY = st.builds(
    OutOfMemory, st.none() | SIZES, SIZES, SIZES, TEXTS, st.integers(0, 7), st.none() | PEAK
)
MEASUREMENTS = st.builds(
    Measurement,
    device=st.builds(
        DeviceInfo,
        st.sampled_from(["cuda", "virtual"]),
        TEXTS,
        SIZES,
        st.tuples(st.integers(5, 12), st.integers(0, 9)),
        st.integers(1, 200),
        SIZES,
    ),
    provenance=st.builds(Provenance, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS),
    peaks=PEAK_TUPLES,
    held=PEAK_TUPLES,
    retained=PEAK_TUPLES,
    alloc_retries=SIZES,
    segments=SIZES,
    out_of_memory=st.none() | OUT_OF_MEMORY,
    notes=NOTES,
)
VERDICTS = st.builds(
    Verdict,
    st.sampled_from(Kind),
    st.booleans(),
    TEXTS,
    st.lists(
        st.builds(
            Comparison,
            st.integers(0, 7),
            st.sampled_from(PEAKS),
            SIZES,
            st.none() | SIZES,
            st.none() | SIZES,
            st.none() | SIZES,
        ),
        max_size=4,
    ).map(tuple),
    NOTES,
    TEXTS,
    st.none() | st.builds(UpdateCommand, WORDS, WORDS, WORDS),
)
RESULTS = st.builds(
    Result,
    nodeid=TEXTS,
    verdict=VERDICTS,
    measurement=st.none() | MEASUREMENTS,
    part=TEXTS,
    batch_size=st.none() | st.integers(1, 4096),
    budget=TEXTS,
    location=st.none() | st.tuples(TEXTS, st.integers(1, 9999)),
    world_size=st.none() | st.integers(1, 4096),
    rank=st.none() | st.integers(0, 4095),
)
RESULT = Result("t.py::test", Verdict(Kind.WITHIN, failed=False, headline="within: 1 B"))


@given(st.lists(RESULTS, max_size=3))
def test_results_come_back_equal(results):
    back = from_text(to_text(results))
    assert back == results
    assert list(map(hash, back)) == list(map(hash, results))  # tuples, all the way down


@given(RESULTS)
def test_the_text_is_json_of_the_very_type_str(result):
    """For execnet (xdist) refuses subclasses."""
    text = to_text([result])
    assert type(text) is str
    (plain,) = json.loads(text)
    assert plain["nodeid"] == result.nodeid
    assert plain["verdict"]["kind"] == result.verdict.kind


def test_a_name_that_is_not_valid_unicode_travels():
    result = Result("t_\udcff.py::test", RESULT.verdict)
    text = to_text([result])
    assert text.isascii()
    assert from_text(text) == [result]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[{"nodeid": 1}]', "$[0].nodeid"),
        (to_text([RESULT]).replace('"within"', '"superb"'), "$[0].verdict.kind"),
        (to_text([RESULT]).replace('"batch_size":null', '"batch_size":"32"'), "$[0].batch_size"),
        ("{}", "expected `array`"),
        ('["\\udcff"]', "surrogates not allowed"),
        ("[", "expecting value"),
        ("", "expecting value"),
        (b"[]", "of type bytes"),
        ([], "of type list"),
    ],
)
def test_what_is_no_result_is_refused_with_its_place(text, place):
    with pytest.raises(GpuMemError, match="same version of pytest-gpumem") as caught:
        from_text(text)
    assert place in str(caught.value).lower()


@pytest.mark.parametrize("depth", DEPTHS)
def test_brackets_of_any_depth_are_refused(depth):
    text = to_text([Result("a.py::test_a", Verdict(Kind.WITHIN, failed=False, headline=""))])
    for place in places(json.loads(text)):
        with pytest.raises(GpuMemError, match="cannot be read"):
            from_text(nested(text, place, depth))
