"""Sources of inner sessions and of programs: the files of tests/programs, and short texts."""

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
"""a test without a baseline, a test over its budget that has a part, and an unmarked test"""

SIZED = """
log = []

def step(size, fixed={fixed}, per_sample={per_sample}):
    log.append(size)
    tensors = [mib(fixed), mib(per_sample * size)]
    assert tensors
"""
"""a step that allocates ``fixed`` MiB plus ``per_sample`` MiB per sample, and logs its size"""

WITHOUT = ("-p", "no:hypothesispytest", "-p", "no:randomly", "-p", "no:asyncio")
"""options without plugins: Hypothesis's imports Hypothesis at the end of every session, which takes
seconds; tests that need one of the others load it themselves (``-p randomly``)"""


def program(name):
    """Return the text of a file of tests/programs: a program, or an inner session's test file."""
    return (TESTS / "programs" / name).read_text(encoding="utf-8")
