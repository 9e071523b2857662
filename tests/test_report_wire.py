"""Results as plain data and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.records import (
    DeviceInfo,
    Measurement,
    OutOfMemory,
    Peak,
    Provenance,
)
from pytest_gpumem.report.model import Result
from pytest_gpumem.report.wire import from_dict, to_dict
from pytest_gpumem.verdict import PEAKS, Comparison, Kind, Verdict

SIZES = st.integers(0, 2**48)
TEXTS = st.text(max_size=20)
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
    notes=st.lists(TEXTS, max_size=3).map(tuple),
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
    st.lists(TEXTS, max_size=3).map(tuple),
    TEXTS,
    TEXTS,
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


@given(RESULTS)
def test_a_result_comes_back_equal_through_json(result):
    back = from_dict(Result, json.loads(json.dumps(to_dict(result))))
    assert back == result
    assert hash(back) == hash(result)  # tuples, not lists, and all the way down


@given(MEASUREMENTS)
def test_a_measurement_travels_by_itself(measurement):
    assert from_dict(Measurement, to_dict(measurement)) == measurement


def kinds_within(value):
    yield type(value)
    children = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for child in children:
            yield from kinds_within(child)


@given(RESULTS)
def test_plain_data_is_of_builtin_types_alone(result):
    """The very types, for execnet (xdist) refuses subclasses, and json would forget them."""
    plain = {str, int, float, bool, type(None), list, dict}
    assert set(kinds_within(to_dict(result))) <= plain


def test_a_name_that_is_not_valid_unicode_travels():
    result = Result("t_\udcff.py::test", RESULT.verdict)
    assert from_dict(Result, to_dict(result)) == result


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"nodeid": 1}, "$.nodeid"),
        ({**to_dict(RESULT), "verdict": {"kind": "superb"}}, "$.verdict.kind"),
        ({**to_dict(RESULT), "batch_size": "32"}, "$.batch_size"),
        ([], "expected"),
    ],
)
def test_what_is_no_result_is_refused_with_its_place(data, place):
    with pytest.raises(GpuMemError, match="same version of pytest-gpumem") as caught:
        from_dict(Result, data)
    assert place.lower() in str(caught.value).lower()
