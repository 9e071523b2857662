"""Tests that are one rank of a distributed run."""

from __future__ import annotations

import pytest

WORLD = """
import os
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def training(model):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        model(torch.zeros(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def run(suite, *args, source):
    return suite.run(*args, source=f"import pytest, torch\n{WORLD}{source}\nimport pytest\n")


def test_a_marked_test_is_a_rank_and_its_fixtures_are_as_well(suite):
    session = run(
        suite,
        source="""
@pytest.fixture
def model():
    assert distributed.get_rank() == 3
    with torch.device("meta"):
        model = nn.Linear(1024, 1024, bias=False)
    fully_shard(model)
    return model.to_empty(device="cuda")

@pytest.mark.gpu_memory(world_size=64, rank=3)
def test_rank(gpu_memory, model):
    assert (gpu_memory.world_size, gpu_memory.rank) == (64, 3)
    assert (distributed.get_world_size(), distributed.get_rank()) == (64, 3)
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    assert [os.environ[name] for name in names] == ["64", "3", "0"]
    assert gpu_memory.allocated == 4 * 1024 * 1024 // 64
    training(model)

@pytest.mark.gpu_memory(world_size=2)
def test_another(gpu_memory, model_of_two):
    training(model_of_two)
    assert gpu_memory.peak_allocated >= 12 * 1024 * 1024 + 4 * 1024 * 1024

@pytest.fixture
def model_of_two():
    return DistributedDataParallel(nn.Linear(1024, 1024, bias=False).cuda())

@pytest.mark.gpu_memory
def test_alone(gpu_memory):
    assert (gpu_memory.world_size, gpu_memory.rank) == (1, 0)
    assert not distributed.is_initialized()

def test_unmarked():
    assert not distributed.is_initialized()
    assert "RANK" not in os.environ
""",
    )
    assert session.outcomes == {"passed": 4}


def test_a_test_that_fails_leaves_no_process_group_behind(suite):
    session = run(
        suite,
        source="""
@pytest.mark.gpu_memory(world_size=4)
def test_fails():
    assert distributed.get_world_size() == 5

@pytest.mark.gpu_memory(world_size=8, max_gib=0.01)
def test_out_of_memory():
    mib = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    distributed.all_reduce(mib)

@pytest.mark.gpu_memory(world_size=8)
def test_good():
    assert distributed.get_world_size() == 8
""",
    )
    assert session.outcomes == {"failed": 2, "passed": 1}
    assert session.verdicts()["test_out_of_memory"] == "out of memory"
    assert "rank 0 of 8" in session.flat


def test_a_process_group_that_is_there_already_is_said_and_left_alone(suite):
    session = run(
        suite,
        source="""
@pytest.fixture(scope="module", autouse=True)
def other():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()

def test_first():
    assert distributed.get_backend() == "gloo"

@pytest.mark.gpu_memory(world_size=4)
def test_marked():
    pass

def test_last():
    assert distributed.get_world_size() == 1
""",
    )
    assert session.outcomes == {"errors": 1, "passed": 2}
    assert "world_size=4: this process already has a default process group" in session.flat


@pytest.mark.parametrize("options", [[], ["-p", "no:randomly", "-n", "2"]])
def test_figures_are_the_same_alone_and_beside_others(suite, options):
    source = """
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.gpu_memory(world_size=8, rank=5)
def test_it(rank):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024))
    fully_shard(model[0])
    fully_shard(model)
    training(model.to_empty(device="cuda"))
"""
    if options:
        pytest.importorskip("xdist")
        suite.write("test_it.py", f"import pytest, torch\n{WORLD}{source}\nimport pytest\n")
        session = suite.run_warm(*options)
    else:
        session = run(suite, source=source)
    assert session.outcomes == {"passed": 2}
    figures = session.figures()
    assert figures["test_it[0]"] == figures["test_it[5]"]
