"""Requests that a GPU may make besides: at the upper end of a range, and nowhere else."""

import re

import pytest

from pytest_gpumem.meter.allocator import expandable_segments

HEAD = """
import time

import pytest
import torch
from pytest_gpumem.devices.virtual.device import VirtualDevice

MIB = 1 << 20
LEFT = []

def request(*mib, reason="a choice", counted=True, until=None, **more):
    choices = VirtualDevice.loaded().gpu_choices
    now = time.time_ns() / 1000
    sizes = [size * MIB for size in mib]
    return choices.add_blocks(reason, sizes, (now, until or now), counted=counted, **more)

def keep(numbers):
    VirtualDevice.loaded().gpu_choices.keep_until(numbers, time.time_ns() / 1000)

def hold(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
"""
RANGE = re.compile(
    r"(?:allocated ([\d.]+) MiB to ([\d.]+) MiB, )?reserved ([\d.]+) MiB to ([\d.]+) MiB: (a .+?); "
    r"the largest figures are compared with limits"
)


def session_of(suite, body, mark=""):
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    source = f"{HEAD}\n@pytest.mark.gpu_memory({mark})\ndef test_it(gpu_memory):\n{lines}\n"
    return suite.run("-vv", source=source)


def range_of(session):
    """Return the allocated and reserved bytes at the ends, in MiB, or None, and the reason."""
    found = RANGE.search(session.flat)
    assert found, session.out
    *sizes, reason = found.groups()
    return [float(size) if size else None for size in sizes], reason


def test_they_are_at_the_upper_end_and_the_figures_are_those_of_the_run(suite):
    session = session_of(suite, "a = hold(20)\nrequest(40, 60)\nb = hold(30)")
    assert session.outcomes == {"passed": 1}
    assert session.table["test_it"]["allocated"] == "50.00"
    assert session.table["test_it"]["reserved"] == "50.00"
    assert range_of(session) == ([50, 120, 50, 120], "a choice")


def test_those_that_do_not_count_leave_memory_in_the_cache_alone(suite):
    session = session_of(suite, "a = hold(20)\nrequest(40, 60, counted=False)\nb = hold(30)")
    assert range_of(session)[0] == [None, None, 50, 120]


def test_they_are_held_until_their_end(suite):
    body = "a = hold(20)\nrequest(40, until={})\nb = hold(30)"
    assert range_of(session_of(suite, body.format("None")))[0][1] == 60
    assert range_of(session_of(suite, body.format("time.time_ns() / 1000 + 6e7")))[0][1] == 90


@pytest.mark.parametrize(("drops", "most"), [("", 100), ("a = None\n", 70)])
def test_they_may_be_held_with_a_block(suite, drops, most):
    body = f"""
a, b = hold(20), hold(10)
request(40, kept_with=a.data_ptr())
{drops}c = hold(30)"""
    assert range_of(session_of(suite, body))[0][1] == most


@pytest.mark.parametrize(("keeps", "most"), [("keep(numbers)\n", 110), ("", None)])
def test_they_may_be_kept_until_a_later_time_though_the_block_is_gone(suite, keeps, most):
    body = f"""a, b = hold(20), hold(10)
numbers = request(40, kept_with=a.data_ptr())
a = None
c = hold(60)
{keeps}d = hold(10)"""
    assert range_of(session_of(suite, body))[0][1] == most


def test_not_with_a_block_that_is_not_of_the_run(suite):
    body = """a = hold(20)
request(40, kept_with=1)
b = hold(30)"""
    assert range_of(session_of(suite, body))[0][1] == 60


def test_the_upper_end_is_the_largest_with_all_and_with_each_choice(suite):
    """What one choice leaves in the cache has room for what else would split a larger block."""
    body = """a = hold(20)
request(30, counted=False, reason="a choice")
request(40, reason="a choice of another kind")
b, c = hold(30), hold(40)"""
    sizes, reason = range_of(session_of(suite, body))
    assert sizes == [None, None, 90, 100]
    assert reason == "a choice; a choice of another kind"


def test_a_step_that_empties_the_cache_has_its_range(suite):
    """What is free of a segment serves the step afterwards, in the replay as in the run."""
    body = """a, b = hold(6), hold(6)
a = None
torch.cuda.empty_cache()
a = hold(5)
request(40)"""
    assert range_of(session_of(suite, body))[0] == [12, 52, 20, 60]


def test_what_a_step_leaves_in_an_expandable_segment_is_in_no_range_s_way(suite):
    """Beside it, other rooms than in the run are the smallest that are large enough."""
    body = """a = hold(20)
LEFT.append(hold(20))
b = hold(40)
LEFT.append(hold(20))
b = None
c = hold(60)
request(80)"""
    with expandable_segments():
        session = session_of(suite, body)
    assert range_of(session)[0] == [120, 200, 160, 240]


PINS = """
@pytest.fixture(scope="module")
def data():
    return torch.empty(4 * MIB, dtype=torch.uint8, pin_memory=True), hold(2)

@pytest.mark.gpu_memory
def test_first(data):
    pass

@pytest.mark.gpu_memory
def test_it(data):
    pinned = torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True)
    a = hold(20)
    request(40)
"""


def test_a_step_that_pins_memory_has_its_range(suite):
    session = suite.run("-vv", source=f"{HEAD}{PINS}")
    assert session.outcomes == {"passed": 2}
    assert range_of(session)[0] == [22, 62, 40, 80]


def test_limits_are_held_to_the_largest_figures(suite):
    body = "a = hold(20)\nrequest(80)"
    assert session_of(suite, body, "max_reserved_gib=0.1").outcomes == {"passed": 1}
    session = session_of(suite, body, "max_reserved_gib=0.09")
    assert session.outcomes == {"failed": 1}
    assert "peak reserved of 100.00 MiB at most is 7.84 MiB over" in session.flat


def test_those_that_find_no_room_are_told(suite):
    session = session_of(suite, "a = hold(20)\nrequest(80)", "max_gib=0.09")
    assert session.outcomes == {"passed": 1}
    assert "the step does not fit with the largest figures: a choice" in session.flat


def test_too_many_have_no_range(suite):
    session = session_of(suite, "a = hold(20)\nrequest(*[1] * 100_001)")
    assert "the range is unknown: the run has too many allocations: a choice" in session.flat


def test_those_of_a_warm_up_do_not_count(suite):
    body = "RUNS.append(1)\na = hold(20)\nif len(RUNS) == 1:\n    request(80)"
    session = session_of(suite, f"RUNS = globals().setdefault('RUNS', [])\n{body}", "warmup=1")
    assert session.outcomes == {"passed": 1}
    assert "a choice" not in session.out


def test_a_part_has_its_own(suite):
    body = """request(80)
with gpu_memory.measure("part"):
    a = hold(10)
    request(40)"""
    session = session_of(suite, body)
    found = [float(found[1]) for found in RANGE.findall(session.flat)]
    assert sorted(found) == [50, 80]
