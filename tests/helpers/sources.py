"""Source texts of inner sessions and of programs: the files of tests/programs, and short ones."""

from __future__ import annotations

from helpers.paths import TESTS

HELPER = """
def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)
"""

TWO_TESTS = """
@pytest.mark.gpu_memory(batch_size=4)
def test_fits():
    mib(100)

@pytest.mark.parametrize("x", [1])
@pytest.mark.gpu_memory(max_allocated_gib=0.1)
def test_too_much(gpu_memory, x):
    with gpu_memory.measure("part"):
        mib(300)

def test_unmarked():
    pass
"""
"""a test that has no baseline, one that is over its budget with a part, one that is not marked"""

SIZED = """
log = []

def step(size, fixed={fixed}, per_sample={per_sample}):
    log.append(size)
    tensors = [mib(fixed), mib(per_sample * size)]
    assert tensors
"""
"""a step that takes so many MiB, by its size, and notes it down"""

WITHOUT = ("-p", "no:hypothesispytest", "-p", "no:randomly", "-p", "no:asyncio")
"""Hypothesis's plugin imports Hypothesis at the end of every session: seconds each; the others are
for the tests that ask for them (``-p randomly``)."""


def program(name):
    """Return the text of a file of tests/programs: a program, or an inner session's test file."""
    return (TESTS / "programs" / name).read_text(encoding="utf-8")
