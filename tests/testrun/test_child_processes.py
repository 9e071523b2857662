"""Processes that a test starts: their memory is in no figure of the test, and never silent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from pytest_gpumem.devices.children import Child
from pytest_gpumem.measurement import Peak
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.sizes import GIB, MIB
from pytest_gpumem.testrun.rerun import child_notes

SOURCE = """
import subprocess, sys

CODE = '''
import sys, torch
tensor = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")
if not torch.ones(2, device="cuda").all():  # values are computed from the start
    more = torch.empty(300 << 20, device="cuda")
del tensor
torch.cuda.reset_peak_memory_stats()
if sys.argv[2:]:
    torch.cuda.empty_cache()
    tensor = torch.empty(int(sys.argv[2]) << 20, dtype=torch.uint8, device="cuda")
    del tensor
    if hasattr(torch.accelerator, "reset_peak_memory_stats"):  # since torch 2.9
        torch.cuda.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
print(flush=True)
sys.stdin.read()
'''

def started(*sizes):
    command = [sys.executable, "-c", CODE, *map(str, sizes)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    return child

@pytest.fixture(scope="module")
def server():
    child = started(8)
    yield
    child.communicate()

@pytest.mark.gpu_memory(max_gib=0.02)
def test_too_large():
    started(20, 30).communicate()

@pytest.mark.gpu_memory
def test_without(): mib(4)

@pytest.mark.gpu_memory(max_gib=1)
def test_served(server): mib(4)

@pytest.mark.gpu_memory(max_gib=1)
def test_beside(): mib(4)
"""


def test_a_child_process_is_told_and_judged_by_itself(suite):
    """Also its peak before a reset of its own; a fixture's process is told in every test."""
    session = suite.run("-v", source=SOURCE)
    assert session.outcomes == {"passed": 3, "failed": 1}, session.out
    assert session.verdicts()["test_too_large (child processes)"] == "over budget"
    assert (
        "part child processes: over budget: peak reserved of 30.00 MiB is 9.52 MiB over "
        "max_gib=0.02"
    ) in session.flat
    assert (
        "note: 1 child process reserved 30.00 MiB of device 0, which only the part child processes "
        "includes"
    ) in session.flat
    below = {"test_too_large (child processes)": (30, 30)}
    own = {"test_without": (4, 20), "test_served": (4, 20), "test_beside": (4, 20)}
    assert session.figures() == {"test_too_large": (0, 0), **below, **own}
    assert "1 child process used the GPU and reported no peak: a process reports" in session.flat
    assert "or os._exit() (2 tests)" in session.flat


RANK = """
import os, sys, torch
rank = int(os.environ["RANK"])
sizes = [int(size) for size in os.environ["SIZES"].split()]
tensor = torch.empty(sizes[rank] << 20, dtype=torch.uint8, device=f"cuda:{rank % 2}")
"""
LAUNCHER = """
import os, subprocess, sys

@pytest.mark.gpu_memory(devices=2, max_gib=1)
def test_launched():
    ranks = [
        subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, "RANK": str(rank)})
        for rank in range(3)
    ]
    for process in ranks:
        process.wait()
"""


def test_each_rank_is_a_part_with_its_cause_and_alike_ones_are_one_row(suite, monkeypatch):
    suite.write("rank.py", RANK)
    monkeypatch.setenv("SIZES", "32 32 64")
    session = suite.run("--gpumem-update-baselines", source=LAUNCHER)
    assert session.figures() == {
        "test_launched (ranks 0-1)": (32, 32),
        "test_launched (rank 2)": (64, 64),
        "test_launched": (0, 0),
    }
    assert suite.baselined() == {
        "test_it.py::test_launched (rank 0)": (32, 32),
        "test_it.py::test_launched (rank 1)": (32, 32),
        "test_it.py::test_launched (rank 2)": (64, 64),
    }
    # One rank grows, and not beyond the fullest; another one exceeds the test's limit.
    monkeypatch.setenv("SIZES", "32 64 1040")
    session = suite.run()
    assert session.outcomes == {"failed": 1}
    assert session.verdicts()["test_launched (rank 0)"] == "ok"
    assert "part rank 1: regressed: other +32.00 MiB at rank.py:4 (<module>)" in session.flat
    assert "part rank 2: over budget: peak reserved of 1040.00 MiB is 16.00 MiB over" in (
        session.flat
    )


SPAWNED = """
import torch

def work(rank, folder, sizes):
    torch.cuda.set_device(rank)
    torch.ones(1, device="cuda")  # CUDA is used before the group is joined
    torch.distributed.init_process_group("nccl", f"file://{folder}/ranks", rank=rank, world_size=2)
    tensor = torch.empty(sizes[rank] << 20, dtype=torch.uint8, device="cuda")
    torch.distributed.destroy_process_group()
"""
SPAWNER = """
from spawned import work

@pytest.mark.gpu_memory(devices=2)
def test_spawned(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path), (32, 48)), nprocs=2)
"""


def test_a_spawned_process_is_the_rank_that_it_joins_as(suite):
    suite.write("spawned.py", SPAWNED)
    session = suite.run("-v", source=SPAWNER)
    assert session.figures() == {
        "test_spawned (rank 0)": (32, 34),
        "test_spawned (rank 1)": (48, 50),
        "test_spawned": (0, 0),
    }


def notes_of(*children, guesses=((), ()), notes=(), limit=None, part="child processes"):
    run = SimpleNamespace(
        root=Path("/root"),
        limit=limit,
        meter=SimpleNamespace(peaks=lambda: (Peak(0, GIB),)),
        info=SimpleNamespace(total_memory=16 * GIB, context=GIB),
    )
    processes = [
        Child(str(number), part, sizes, ended=True, guesses=guesses, notes=notes)
        for number, sizes in enumerate(children)
    ]
    return [note.text for note in child_notes(run, processes)]


def sizes(*nbytes):
    return {device: Peak(0, size) for device, size in enumerate(nbytes) if size}


def test_processes_are_told_by_device_in_any_order():
    expected = (
        "3 child processes reserved 5.00 MiB and 4.00 MiB of device 0, 7.00 MiB of device "
        "1, which only the part child processes includes"
    )
    children = sizes(4 * MIB), sizes(5 * MIB), sizes(0, 7 * MIB)
    assert notes_of(*children) == notes_of(*reversed(children)) == [expected]
    assert notes_of(sizes()) == []
    (many,) = notes_of(*[sizes(2 * MIB)] * 5)
    assert "reserved at most 2.00 MiB each, 10.00 MiB in all, of device 0, which" in many


def test_together_they_may_be_more_than_the_limit_or_the_card_with_their_contexts():
    assert len(notes_of(sizes(GIB), limit=2 * GIB)) == 1
    (_, note) = notes_of(sizes(GIB), sizes(MIB), limit=2 * GIB)
    assert note == (
        "together with the test's own memory, child processes may use up to 2049.00 MiB on "
        "device 0 at the same time: the limit is 2048.00 MiB"
    )
    assert len(notes_of(sizes(6 * GIB), sizes(6 * GIB))) == 1
    assert len(notes_of(sizes(6 * GIB), sizes(6 * GIB + 2 * MIB))) == 2


def test_values_that_they_decided_by_are_told_once_for_all_of_them():
    unknown = [("/root/work.py", 4, "", 2, 10, 500)]
    assumed = [("/root/work.py", 9, "", 1, 0, 0)]
    assert notes_of(
        sizes(), sizes(), guesses=(unknown, assumed), notes=[Note(NoteKind.VALUES, "op: none")]
    ) == [
        (
            "in child processes: 4 values were read back from the virtual GPU (20 of 1,000 taken "
            "at work.py:4): shapes that depend on them are not predicted"
        ),
        (
            "in child processes: 2 values were assumed (work.py:9): the figures hold for finite, "
            "evenly spread values"
        ),
        "in child processes: op: none",
    ]
