"""Which blocks make memory grow: those that came in the last half of the steps, and stayed."""

from __future__ import annotations

import itertools
import json

from helpers.random_growth import mistake, random_program

from pytest_gpumem.recording.allocator_log import Block
from pytest_gpumem.recording.grown_blocks import grown_blocks

ENDS = [step * 10.0 for step in range(1, 9)]
"""of eight steps: the last half begins at 40, with the end of the step of index 3"""
NUMBERS = itertools.count()


def block(step, line, size=1, freed=9):
    """A block that a line allocates in a step, and that is freed in another."""
    frames = [{"filename": "f.py", "line": line}]
    time, end = step * 10.0 - 5, freed * 10.0 - 4
    return Block(0, 0, next(NUMBERS), time, frames, None, end, requested=size)


def grown(*blocks):
    """The blocks that grew: the step, the line and the bytes of each."""
    counted = grown_blocks(blocks, ENDS, 3).items()
    return sorted((int(it.time + 5) // 10, it.frames[0]["line"], size) for it, size in counted)


def test_blocks_of_the_last_half_that_stay_are_growth():
    kept = [block(step, 1, step) for step in range(1, 9)]
    assert grown(*kept) == [(step, 1, step) for step in (5, 6, 7, 8)]


def test_blocks_that_are_made_anew_in_each_step_are_none():
    batches = [block(step, 1, freed=step + 1) for step in range(1, 9)]
    states = [block(step, 2, freed=step + 2) for step in range(1, 9)]
    fixed = [block(1, 3)]
    late = [block(1, 4, freed=8), block(8, 5)]  # one line's memory became another's
    assert grown(*batches, *states, *fixed, *late) == []


def test_of_a_block_that_is_larger_than_the_one_before_the_difference_is_growth():
    assert grown(*[block(step, 1, 10 * step, freed=step + 1) for step in range(1, 9)]) == [
        (8, 1, 40)
    ]


def test_the_youngest_blocks_are_those_that_replace_others():
    kept = [block(step, 1) for step in range(1, 9)]
    last = [
        Block(0, 0, -1, step * 10.0 - 2, kept[0].frames, None, step * 10.0 + 8, requested=1)
        for step in range(1, 9)
    ]
    for index, one in enumerate(last):
        one.start = 100 + index
    assert grown(*kept, *last) == [(step, 1, 1) for step in (4, 5, 6, 7)]


def test_where_the_block_of_the_step_before_stays_it_counts_for_that_of_the_last_step():
    kept = [block(step, 1) for step in range(1, 9)]
    assert grown(*kept) == [(step, 1, 1) for step in (4, 5, 6, 7)]


def test_blocks_of_an_earlier_run_that_are_freed_replace_nothing():
    earlier = [Block(0, 0, -1, float("-inf"), (), None, 65.0, requested=1)]
    assert grown(*earlier, *[block(step, 1, step) for step in (5, 6, 7, 8)]) == [
        (step, 1, step) for step in (5, 6, 7, 8)
    ]


def test_random_programs_have_the_holder_and_the_line_that_were_planted(suite):
    """As python -m benchmarks.reports.growth_holders, which runs more of them."""
    programs = {f"test_{seed}.py": random_program(seed) for seed in range(100, 141, 4)}
    programs |= {f"test_{seed}.py": random_program(seed, steady=True) for seed in (1, 2)}
    for name, program in programs.items():
        (suite.path / name).write_text(program.source)
    suite.run_warm("--gpumem-json=r.json")  # some programs keep memory for good
    for result in json.loads((suite.path / "r.json").read_text())["results"]:
        program = programs.pop(result["nodeid"].partition("::")[0])
        assert mistake(program, result) == "", program.source
    assert not programs
