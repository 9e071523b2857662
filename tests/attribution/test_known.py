"""What a recording knows of a fixture's blocks goes with them to later tests."""

from __future__ import annotations

from pytest_gpumem.attribution.history_replay import Block, History
from pytest_gpumem.attribution.recorder import lying_in, seen_where
from pytest_gpumem.attribution.recording import Sweep

BLOCKS = {(0, 1000): 512, (0, 4000): 1024, (1, 1000): 512}


def test_tensors_are_those_that_lie_in_the_blocks_of_their_device():
    names = ["first", "behind", "inside", "end", "other device", "no device"]
    devices, addresses = [0, 0, 0, 0, 1, 2], [1000, 1512, 5023, 5024, 1256, 1000]
    seen = seen_where(lying_in(BLOCKS), Sweep(7, "parameters", names, devices, addresses))
    assert seen == Sweep(
        7, "parameters", ("first", "inside", "other device"), (0, 0, 1), (1000, 5023, 1256)
    )


def test_none_of_a_sweep_may_lie_in_them():
    seen = seen_where(lying_in(BLOCKS), Sweep(7, "buffers", ["b"], [0], [2000]))
    assert seen == Sweep(7, "buffers", (), (), ())


def test_blocks_begin_when_the_run_uses_them():
    taken, foreign, new = Block(8, 512, -1, 0), Block(9, 512, -1, 0), Block(8, 512, 2, 5)
    history = History([taken, foreign, new], [2, 4, 5], [0, 0, 0])
    history.begin_later(4.5, {8})
    assert (taken.start, taken.time) == (1, 4.5)
    assert foreign.start == -1
    assert (new.start, new.time) == (2, 5)
