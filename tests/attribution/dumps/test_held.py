"""The blocks of a snapshot by source line, of snapshots of any machine."""

from __future__ import annotations

import pytest
from helpers.dumps import CXX, LINEAR, MAKE_GRADS, alloc, block, frame, free, snapshot

from pytest_gpumem.attribution.dumps.held import NOWHERE, Place, held_memory
from pytest_gpumem.attribution.dumps.reading import SnapshotError, as_snapshot

TRAIN = frame("/home/ann/project/train.py", 14, "train")
MODEL = frame("/home/ann/project/model.py", 29, "forward")
STEP = Place("/home/ann/project/train.py", "train", 14)
HEAD = Place("/home/ann/project/model.py", "forward", 29)


def held(data, **options):
    (device,) = held_memory(as_snapshot(data, "a.pickle"), **options)
    return device


def test_the_peak_of_the_history_is_told_by_the_users_line():
    events = [
        alloc(0, 4096, CXX, LINEAR, MODEL, TRAIN),
        alloc(8192, 1024, LINEAR, MODEL, TRAIN),
        *free(8192, 1024),
        alloc(8192, 512, TRAIN),
        *free(0, 4096),
    ]
    peak = held(snapshot(events, [block(8192, 512, TRAIN)]))
    assert (peak.allocated, peak.at_peak) == (5120, True)
    assert (peak.places, peak.blocks) == ({HEAD: 5120}, {HEAD: 2})


def test_blocks_from_before_the_history_are_in_it():
    kept = block(0, 2048, TRAIN)
    gone_in_history = free(4096, 1024)
    peak = held(snapshot([*gone_in_history, alloc(4096, 512, MODEL)], [kept, block(4096, 512)]))
    assert peak.places == {STEP: 2048, NOWHERE: 1024}


def test_sizes_are_rounded_up_as_the_allocator_does():
    settings = {"roundup_power2_divisions": {"1": 4, "2": 4, "4": 4}}
    odd = 5 << 20 | 1
    assert held(snapshot([alloc(0, 700, MODEL)])).allocated == 1024
    assert held(snapshot([alloc(0, odd, MODEL)], settings=settings)).allocated == 6 << 20


def test_memory_of_autograds_threads_is_of_the_line_that_ran_the_backward_pass():
    events = [
        alloc(0, 512, MODEL),
        alloc(512, 512, MAKE_GRADS, TRAIN),
        alloc(1024, 4096, CXX),
        alloc(8192, 4096),
    ]
    backward = STEP._replace(phase="backward")
    assert held(snapshot(events)).places == {HEAD: 512, backward: 512 + 2 * 4096}


def test_the_end_of_a_snapshot_has_the_blocks_sizes():
    pending = block(3072, 512, state="active_pending_free")
    blocks = [block(0, 1024, MODEL), block(1024, 2048, state="inactive"), pending]
    end = held(snapshot([alloc(0, 700, MODEL)], blocks), at_end=True)
    assert (end.allocated, end.reserved, end.at_peak) == (1024, 3584, False)
    assert end.places == {HEAD: 1024}


def test_without_a_history_the_end_is_told():
    assert held(snapshot([], [block(0, 1024, MODEL)])).at_peak is False


@pytest.mark.parametrize(
    "name",
    [
        "/usr/lib/python3.11/contextlib.py",
        "/x/lib/python3.12/site-packages/torch/_ops.py",
        "/x/pytest_gpumem/recording/observer.py",
        "/tmp/torchinductor_ann/ab/cab.py",
        "<string>",
        "??",
    ],
)
def test_lines_of_no_interest_are_passed_over(name):
    assert held(snapshot([alloc(0, 512, frame(name, 1, "f"), MODEL)])).places == {HEAD: 512}


def test_a_library_that_uses_torch_has_lines_of_its_own():
    library = frame("/x/lib/python3.12/site-packages/transformers/llama.py", 7, "forward")
    (place,) = held(snapshot([alloc(0, 512, library, MODEL)])).places
    assert place.function == "forward"
    assert place.path.endswith("transformers/llama.py")


@pytest.mark.parametrize(
    "data",
    [
        {"segments": [{}]},
        {"segments": [3]},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 0, "size": "x"}]]},
        {"segments": [], "device_traces": 3},
    ],
)
def test_what_has_not_the_form_of_a_snapshot_is_refused_by_name(data):
    with pytest.raises(SnapshotError, match=r"^a\.pickle: is not a readable snapshot"):
        as_snapshot(data, "a.pickle")
