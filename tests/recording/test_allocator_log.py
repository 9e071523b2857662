"""Replaying an allocator's history gives the block sizes that PyTorch counts, to the byte."""

import json
import random
from pathlib import Path

import pytest
from helpers.virtual_gpu import MIB, child, highest, virtual_card

from pytest_gpumem.meter.allocator import current, reset_peaks
from pytest_gpumem.recording.allocator_log import AllocatorLog, Block, next_division
from pytest_gpumem.recording.recorder import Recorder
from pytest_gpumem.recording.recording import Tag

SETTINGS = [
    "expandable_segments:True",
    "max_split_size_mb:25",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "garbage_collection_threshold:0.5",
]
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
import test_allocator_log
from pytest_gpumem.meter.allocator import _set_allocator
standard = torch.cuda.memory._snapshot()["allocator_settings"]
_set_allocator(sys.argv[2])
assert torch.cuda.memory._snapshot()["allocator_settings"] != standard
print(json.dumps([test_allocator_log.wild(seed) for seed in range(3)]))
"""


def wild(seed, number=400):
    """Allocate and free at random; return the allocator's figures and the replay's."""
    import torch

    chance = random.Random(seed)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = [tensor(chance) for _ in range(20)]
    del before[::3]
    recorder = Recorder()
    recorder.start()
    reset_peaks(1)
    start = current(0)
    held, streams = [], [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    currents = []
    for _ in range(number):
        move = chance.random()
        if move < 0.55 or not held:
            with torch.cuda.stream(chance.choice(streams)):
                held.append(tensor(chance))
            if chance.random() < 0.1:
                held[-1].record_stream(chance.choice(streams))
        elif move < 0.97:
            held.pop(chance.randrange(len(held)))
        else:
            torch.cuda.empty_cache()
        currents.append(torch.cuda.memory_allocated())
    top, end = highest(0), current(0)
    recording = recorder.stop()
    segments = [it for it in recording.initial_segments if it["device"] == 0]
    history = AllocatorLog(recording.events[0], segments, recording.settings)
    totals = [
        sum(b.size for b in history.blocks if b.alive(i)) for i in range(-1, len(history.times))
    ]
    return {
        "start": [start.allocated, totals[0]],
        "peak": [top.allocated, max(totals)],
        "end": [end.allocated, totals[-1]],
        "reserved": [end.reserved - start.reserved, history.reserved[-1]],
        "all": [len(set(currents) - set(totals)), 0],
    }


def tensor(chance):
    import torch

    sizes = (chance.randint(1, 4096), chance.randint(1, MIB), chance.randint(1, 70 * MIB))
    return torch.empty(chance.choice(sizes), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("seed", range(4))
def test_every_allocated_figure_is_that_of_the_allocator(seed):
    with virtual_card("H100"):
        found = wild(seed)
    assert {name: pair[0] for name, pair in found.items()} == {
        name: pair[1] for name, pair in found.items()
    }
    assert found["peak"][0] > 100 * MIB


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_is_so_with_other_settings_of_the_allocator(settings):
    here = str(Path(__file__).parent)
    for found in json.loads(child(PROGRAM, args=[here, settings], warm=True)):
        assert all(one == other for one, other in found.values()), found


def test_divisions_between_powers_of_two():
    assert next_division(1200 * MIB, 4) == 1280 * MIB  # the documentation's example
    assert next_division(1024 * MIB, 4) == 1024 * MIB
    assert next_division(1025, 4) == 1280


def test_a_tag_is_given_to_the_block_that_lies_there_then():

    def event(action, time, size=0):
        return {"action": action, "addr": 1000, "size": size, "time_us": time}

    segment = {"address": 1000, "total_size": 2 * MIB, "blocks": []}
    events = [
        event("alloc", 10, 700),
        event("free_requested", 20, 700),
        event("free_completed", 20, 700),
        event("alloc", 30, 900),
    ]
    tags = [
        Tag(15, 1100, "parameters", "a"),
        Tag(25, 1000, "gradients", "in between"),
        Tag(40, 1000, "buffers", "b"),
        Tag(41, 1000, "buffers", "b"),
        Tag(42, 999, "gradients", "before it"),
    ]
    history = AllocatorLog(events, [segment], tags=tags)
    assert [block.size for block in history.blocks] == [1024, 1024]
    assert [[tag.name for tag in block.tags] for block in history.blocks] == [["a"], ["b"]]


def test_blocks_begin_when_the_run_uses_them():
    earlier, later = (Tag(time, 8, "parameters", "") for time in (0, 3))
    taken, foreign, new = Block(8, 512, -1, 0), Block(9, 512, -1, 0), Block(8, 512, 2, 5)
    taken.tags = (later,)
    history = AllocatorLog([])
    history.blocks, history.times = [taken, foreign, new], [2, 4, 5]
    history.begin_later(4.5, {8: (earlier,)})
    assert (taken.start, taken.time, taken.tags) == (1, 4.5, (earlier, later))
    assert foreign.start == -1
    assert (new.start, new.time, new.tags) == (2, 5, ())
