"""Blocks that other streams used, told by the history and the events that are asked for."""

from math import inf

import pytest

from pytest_gpumem.devices.base import AllocatorEvent, Alternative
from pytest_gpumem.recording.recording import Recording
from pytest_gpumem.replay.match_alternatives import add_alternatives
from pytest_gpumem.replay.request_script import RequestScript

MIB = 2**20
ACTIONS = {"A": "alloc", "F": "free_requested", "C": "free_completed"}


def script_of(history, *events, awaited=inf):
    """Return the script of a history.

    Args:
        history: such as "A0 10, F0 20, C0 21": the events of blocks with their times.
        events: of the allocator: when each was recorded and answered.
        awaited: when the program has waited for all of them.
    """
    entries = [entry.split() for entry in history.split(", ")]
    told = [
        {"action": ACTIONS[what[0]], "addr": int(what[1:]), "size": MIB, "stream": 0}
        | {"time_us": float(time)}
        for what, time in entries
    ]
    asked = [AllocatorEvent(*times, awaited=awaited, device=0) for times in events]
    script = RequestScript.read(Recording(events=[told]), 0)
    add_alternatives(script, [], asked)
    return script


def late_in(history, *events):
    """Return the blocks of a history that a GPU may give back late."""
    return set(script_of(history, *events).late)


def test_a_block_that_is_given_back_at_once_waited_if_it_has_an_event():
    history = "A0 1, A1 2, A2 3, F0 10, C0 10, F1 20, C1 22, A3 23, F2 30, C2 32, A4 33"
    assert late_in(history, (20.5, 21.5)) == {1}
    assert late_in(history, (30.5, 31.5)) == {2}
    assert late_in(history, (20.5, 21.5), (30.5, 31.5)) == {1, 2}


def test_a_block_that_another_drop_follows_did_not_wait():
    assert late_in("A0 1, A1 2, F0 20, C0 20, F1 20, C1 21, A2 22", (20.5, 20.9)) == {1}


def test_on_a_busy_machine_each_event_has_its_own_block():
    """The thread lost its turn between a drop and its event, and between an answer and its end."""
    taken = ", ".join(f"A{number} {number}" for number in range(5))
    dropped = "F0 100, F1 101, F2 102, F3 133, F4 134"
    given = "C0 200, C1 201, C2 260, C3 261, C4 262, A5 263"
    events = [(100.5, 199.5), (101.5, 200.5), (132.5, 210), (133.5, 260.5), (170.5, 261.5)]
    assert late_in(f"{taken}, {dropped}, {given}", *events) == {0, 1, 2, 3, 4}


def test_blocks_between_two_that_waited_did_not_where_they_have_no_event():
    history = (
        "A0 1, A1 2, A2 3, F0 10, A3 12, F1 20, C1 21, C0 22, A4 23, F2 24, A5 25, C2 26, A6 27"
    )
    assert late_in(history, (10.5, 21.5), (24.5, 25.5)) == {0, 2}


def test_a_block_that_two_streams_use_has_two_events():
    history = "A0 1, A1 2, F0 10, A2 15, F1 20, A3 25, C0 30, C1 31, A4 32"
    assert late_in(history, (10.3, 14), (10.6, 29.5), (20.5, 30.5)) == {0, 1}


@pytest.mark.parametrize("events", [[(90.0, 100.0)], [(90.0, 100.0), (91.0, 101.0)]])
def test_events_that_are_recorded_later_have_the_last_block_that_waited(events):
    """So it is while a CUDA graph is captured."""
    assert late_in("A0 1, A1 2, F0 10, F1 20, C1 22, A2 30, C0 100, A3 101", *events) == {0}


@pytest.mark.parametrize(("share", "place"), [(0, 0), (0.25, 0), (0.5, 1), (0.75, 2), (1, 3)])
@pytest.mark.parametrize("slow", [1, 100])
def test_a_share_of_a_wait_is_one_of_the_requests_and_of_no_time(share, place, slow):
    """The script is the same on a busy machine, which takes longer for some of them."""
    last = 30 + slow
    history = f"A0 1, F0 10, C0 20, A1 21, A2 30, A3 {last}, A4 {last + 10}"
    script = script_of(history, (10.5, 19.5), awaited=last + 5)
    steps = [(action, number) for _, action, number in script.steps_with_waits(share)]
    assert steps.index(("free late", 0)) - steps.index(("free", 0)) - 1 == place


def test_workspaces_of_calls_at_one_time_are_there_one_after_the_other():
    """The clock of a call may tell no difference; each call ends before the next."""
    script = script_of("A0 1, A1 20")
    calls = [Alternative(10, "planned", 0, 0, 0, size) for size in (MIB, 2 * MIB)]
    timed = [Alternative(10, "spanning", 0, 0, 0, MIB, ended=10, place=(0, 7))] * 2
    add_alternatives(script, [*calls, *timed], [])
    assert [(action, number) for _, action, number in script.steps] == [
        *(("allocate", 0), ("allocate", 2), ("free", 2), ("allocate", 3), ("free", 3)),
        *(("allocate", 4), ("allocate", 5), ("free", 4), ("free", 5), ("allocate", 1)),
    ]
    assert [request.stream for request in script.requests[4:]] == [7, 7]
