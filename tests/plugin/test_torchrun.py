"""Under torchrun each rank measures itself: one verdict, one report, one baseline."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from helpers.git import commit, git
from helpers.paths import ROOT
from helpers.warm import HANGS, warm_python

from pytest_gpumem.devices.virtual.device import VirtualDevice


@pytest.fixture
def torchrun(suite, monkeypatch, tmp_path_factory):
    """Sessions of two ranks."""
    folder = tmp_path_factory.mktemp("exchange")

    def run(*args, source=None, **environment):
        if source is not None:
            suite.write("test_it.py", source)
        command = [warm_python(), "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "--redirects=3", f"--log-dir={folder / str(time.time())}"]
        command += ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *args]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=suite.path,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(folder),
                **environment,
            },
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=HANGS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        logs = sorted(folder.rglob("stdout.log"), key=lambda it: it.stat().st_mtime)[-2:]
        texts = {int(it.parent.name): it.read_text() for it in logs}
        assert sorted(texts) == [0, 1], out
        return SimpleNamespace(
            ret=process.returncode,
            first=" ".join(texts[0].split()),
            other=" ".join(texts[1].split()),
        )

    return run


SOURCE = """
import os
from torch import distributed

RANK = int(os.environ["RANK"])

@pytest.mark.gpu_memory(batch_size=8)
def test_uneven(gpu_memory):
    assert (gpu_memory.rank, gpu_memory.world_size) == (RANK, 2)
    assert gpu_memory.device == torch.device("cuda", RANK)
    assert torch.cuda.current_device() == RANK
    assert torch.cuda.device_count() == 2
    kept = mib(40 + 20 * RANK, f"cuda:{os.environ['LOCAL_RANK']}")
    with gpu_memory.measure("part"):
        more = mib(30 - 25 * RANK)

@pytest.mark.gpu_memory
def test_even():
    distributed.init_process_group("cpu:gloo,cuda:nccl")
    told = [None, None]
    distributed.all_gather_object(told, RANK)
    assert told == [0, 1]
    layer = torch.nn.Linear(4, 4).cuda()
    torch.nn.parallel.DistributedDataParallel(layer, device_ids=[RANK])
    kept = mib(10 + GROWN * RANK)
    distributed.destroy_process_group()
""".replace("GROWN", "int(os.environ.get('GROWN', 0))")


def test_one_report_and_one_baseline_of_the_fullest_rank(torchrun, suite):
    session = torchrun("--gpumem-update-baselines", source=SOURCE)
    assert session.ret == 0
    assert "GPU memory" in session.first
    assert "test_uneven 70.00" in session.first  # rank 0: 40 + 30, rank 1: 60 + 5
    assert "note: these figures are from rank 0, which used most memory" in session.first
    assert "gpumem: baselines: 3 created" in session.first
    assert "GPU memory" not in session.other
    assert "baselines:" not in session.other
    (content,) = suite.baselines().values()
    entry = json.loads(content)["tests"]["test_uneven"]
    assert entry["peak_allocated"] == [70 << 20]
    assert entry["parts"]["part"]["peak_allocated"] == [70 << 20]
    assert (entry["world_size"], entry.get("rank")) == (2, None)

    session = torchrun()
    assert session.ret == 0
    assert "gpumem: 3 ok" in session.first
    assert suite.baselines() == {next(iter(suite.baselines())): content}

    session = torchrun("-k", "even", GROWN="50")
    assert session.ret == 1
    assert "1 failed" in session.other
    assert "3 passed" not in session.other
    assert "2 passed" in session.first
    assert "regressed: " in session.first
    assert "rank 1 of 2" in session.first
    assert "1 regressed" in session.first.partition("Peak memory")[2]
    assert suite.baselines() == {next(iter(suite.baselines())): content}
    # The command that is printed starts the ranks as well: one process alone has other figures.
    (command,) = re.findall(
        r"torchrun --standalone --nproc-per-node=2 -m pytest (\S+ --gpumem-update-baselines)",
        session.first,
    )
    accepted = torchrun(*command.split(), GROWN="50")
    assert "gpumem: baselines: 1 changed" in accepted.first


def test_a_report_of_ranks_is_accepted_as_their_update_writes(torchrun, suite, gpumem):
    git("init", "-q")
    suite.write(".gitignore", "r.json\n")
    suite.write("test_it.py", SOURCE)
    commit("one")
    torchrun("-p", "no:randomly", "--gpumem-json=r.json")
    assert gpumem("accept", "r.json", "--yes")[0] == 0
    accepted = suite.baselines()
    shutil.rmtree(suite.path / "baselines")
    torchrun("-p", "no:randomly", "--gpumem-update-baselines")
    assert suite.baselines() == accepted
    assert len(accepted) == 1


def test_a_rank_that_ends_without_results_is_named_and_nothing_is_written(torchrun, suite):
    source = """
    import os

    @pytest.mark.gpu_memory
    def test_it():
        mib(5)
        if os.environ["RANK"] == "1":
            os._exit(0)
    """
    session = torchrun("--gpumem-update-baselines", source=source)
    assert session.ret == 1
    assert "gpumem: rank 1 sent no results: no baselines are written" in session.first
    assert suite.baselines() == {}


# -- a rank's device is the one of its number --


@pytest.fixture
def second(suite, monkeypatch):
    """Sessions in this process, which is a rank whose device is the second."""
    names = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {"TORCHELASTIC_RUN_ID": "a", **names}.items():
        monkeypatch.setenv(name, str(value))
    yield suite
    device = VirtualDevice.loaded()
    device.first, device.least = 0, 1


def test_all_that_is_measured_is_of_that_device(second):
    session = second.run(
        "--gpumem-attribution=on",
        "-vv",
        source="""
        KEPT = []

        @pytest.mark.gpu_memory(max_allocated_gib=0.01)
        def test_over():
            first = mib(90, "cuda:0")
            x = mib(20)

        @pytest.mark.gpu_memory(max_gib=0.5)
        def test_out_of_memory():
            first = mib(900, "cuda:0")
            x = mib(300)
            y = mib(301)

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_leaks():
            KEPT.append(mib(7))

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_of_no_interest():
            KEPT.append(mib(7, "cuda:0"))

        @pytest.mark.gpu_memory(steady=True)
        def test_grows(gpu_memory):
            for _ in range(5):
                KEPT.append(mib(3))
                gpu_memory.step()
        """,
    )
    found = {name: (row["allocated"], row["reserved"]) for name, row in session.table.items()}
    assert found == {
        "test_over": ("20.00", "20.00"),
        "test_out_of_memory": (">300.00", ">300.00"),
        "test_leaks": ("7.00", "20.00"),
        "test_of_no_interest": ("0.00", "0.00"),
        "test_grows": ("15.00", "20.00"),
    }
    assert session.outcomes == {"failed": 3, "passed": 2, "errors": 1}
    assert "held 300.00 MiB allocated" in session.flat
    assert re.search(r"leaked: 7.00 MiB .* of which test_it.py:\d+ \(mib\) 7.00", session.flat)
    assert re.search(r"grew by 3.00 MiB .* of which test_it.py:\d+ \(mib\) 6.00", session.flat)
    assert "held by global variable KEPT of test_it.py (list of" in session.flat
    assert "ranks 1 to 1 ran on other machines" in session.flat


def test_a_rank_is_not_run_again_alone_and_says_where_its_peak_is_from(second):
    session = second.run(
        source="""
        RUNS = []

        @pytest.mark.gpu_memory(max_allocated_gib=0.01)
        def test_over():
            RUNS.append(1)
            x = mib(20)

        @pytest.mark.gpu_memory(max_gib=0.01)
        def test_out_of_memory():
            RUNS.append(2)
            x = mib(20)

        def test_runs():
            assert RUNS == [1, 2]
        """,
    )
    assert session.outcomes == {"failed": 2, "passed": 1}
    assert "20.00 MiB other test_it.py:" in session.flat
    assert "it needs" not in session.flat


@pytest.mark.parametrize("option", ["--collect-only", "--fixtures", "--fixtures-per-test"])
def test_a_session_that_only_lists_waits_for_no_rank(suite, monkeypatch, tmp_path, option):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {"TORCHELASTIC_RUN_ID": "listing", **ranks}.items():
        monkeypatch.setenv(name, value)
    session = suite.run(option, source="def test_it(): pass")
    assert session.ret == 0
    assert [path.name for path in tmp_path.iterdir() if "pytest-gpumem" in path.name] == []
