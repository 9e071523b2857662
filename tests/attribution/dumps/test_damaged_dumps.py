"""Snapshots, whatever was done to them: refused as such, or compared in every format."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress

import pytest
from helpers.damage import JSON, damaged, damages, places, with_value
from helpers.dumps import alloc, block, frame, free, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.attribution.dumps import reading
from pytest_gpumem.attribution.dumps.growth import growth_by_device
from pytest_gpumem.attribution.dumps.held import held_memory
from pytest_gpumem.attribution.dumps.reading import SnapshotError, as_snapshot, read_dump
from pytest_gpumem.report.dumps.growth_text import RENDERERS, DumpChanges, growth_table
from pytest_gpumem.sizes import MIB

HEAD = frame("/home/ann/project/model.py", 29, "Tiny.forward")
LOSS = frame("/home/ann/project/train.py", 14, "train")
EVENTS = [alloc(0, 100 * MIB, HEAD), alloc(1, 20 * MIB, LOSS), *free(0, 100 * MIB)]
WHOLE = snapshot(
    EVENTS, [block(1, 20 * MIB, LOSS)], settings={"roundup_power2_divisions": {"1": 4}}
)
OTHER = as_snapshot(snapshot(EVENTS[:2], [block(0, 100 * MIB, HEAD)]), "a.pickle")
PICKLE = pickle.dumps(WHOLE)
PLACES = list(places(WHOLE))[1:]
FIGURES = (0, -1, 2**63 - 1, 2**63, 10**400, 1.5, True)
TEXTS = ("", "\x1b[31m\udc80|`", None)


def compared(content, *, at_end):
    """The snapshot beside a sound one, in all formats."""
    new = held_memory(as_snapshot(content, "b.pickle"), at_end=at_end)
    devices = tuple(growth_by_device(held_memory(OTHER, at_end=at_end), new))
    changes = DumpChanges("a.pickle", "b.pickle", devices, True)
    shown = [growth_table(changes, 80), *(render(changes) for render in RENDERERS.values())]
    assert "\x1b" not in "".join(shown)
    "".join(shown).encode()


def refused_or_compared(content):
    for at_end in (False, True):
        with suppress(SnapshotError):
            compared(content, at_end=at_end)


def test_as_it_is():
    compared(WHOLE, at_end=False)
    compared(WHOLE, at_end=True)


def test_another_value_in_any_place_is_an_error_or_compared():
    for place in PLACES:
        for value in (*FIGURES, *TEXTS, [], {}, [[]], ...):
            refused_or_compared(json.loads(with_value(json.dumps(WHOLE), value, place)))


@settings(deadline=None, max_examples=200)
@given(JSON | st.just(...), st.sampled_from(PLACES))
def test_any_json_in_any_place_is_an_error_or_compared(value, place):
    refused_or_compared(json.loads(with_value(json.dumps(WHOLE), value, place)))


@settings(deadline=None, max_examples=200)
@given(pieces=damages(len(PICKLE)))
def test_a_damaged_file_is_an_error_or_read(pieces, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    path.write_bytes(damaged(PICKLE, pieces))
    with suppress(SnapshotError):
        held_memory(read_dump(path))


@pytest.mark.parametrize("value", [None, [], 3])
def test_a_function_without_a_name_is_refused_with_its_place(value):
    event = alloc(1, 20 * MIB, frame("model.py", 1, value))
    with pytest.raises(SnapshotError, match=r"Expected `str`.* - at `\$\.device_traces"):
        as_snapshot(snapshot([event]), "a.pickle")


# -- lists that a small file refers to many times --


def within_itself():
    frames = [{"filename": "a.py", "name": "f", "line": 1}]
    frames[0]["more"] = frames
    return [block(0, 512) | {"frames": frames}]


def many_times(number):
    """Return blocks of a file of a few bytes each: lists that are referred to at each level."""
    frames = [{"filename": "a.py", "name": "f", "line": 1}] * number
    return [block(0, 512) | {"frames": frames}] * number


@pytest.mark.parametrize(
    "segments",
    [
        [{"device": 0, "address": 0, "total_size": 512, "blocks": many_times(400)}] * 400,
        [{"device": 0, "address": 0, "total_size": 512, "blocks": within_itself()}],
    ],
    ids=["cubed", "within itself"],
)
def test_a_small_file_of_very_many_values_is_refused_before_it_is_expanded(
    tmp_path, monkeypatch, segments
):
    path = tmp_path / "small.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": []}))
    monkeypatch.setattr(reading, "as_snapshot", lambda *_: pytest.fail("it is expanded"))
    with pytest.raises(SnapshotError) as caught:
        read_dump(path)
    assert str(path) in str(caught.value)
    assert "refers to its lists too often" in str(caught.value)


def test_deep_stacks_that_many_events_share_are_read(tmp_path):
    """As PyTorch writes them: of equal stacks, one list."""
    frames = [frame("model.py", line, "forward") for line in range(500)]
    events = [
        {"action": "alloc", "addr": at << 20, "size": at << 9, "time_us": at << 9, "frames": frames}
        for at in range(1, 2_000)
    ]
    path = tmp_path / "deep.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
    (trace,) = read_dump(path).device_traces
    assert [len(event.frames) for event in trace] == [500] * 1_999
