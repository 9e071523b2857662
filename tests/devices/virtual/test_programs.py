"""Programs of several processes, as users start them: torchrun, data loaders, multiprocessing."""

import ctypes
import importlib.metadata
import os
import re
import signal
import subprocess
from contextlib import suppress
from functools import cache

import pytest
from helpers.native_sources import compiler
from helpers.paths import ROOT
from helpers.program_runs import gpumem_run
from helpers.semaphores import need_semaphores
from helpers.sources import program
from helpers.virtual_gpu import virtual_card
from helpers.warm import HANGS, warm_python
from packaging.version import Version

from pytest_gpumem.devices.virtual import native

RANKS = program("torchrun_ranks.py")


def launched(script, *groups):
    """What two ranks of a script printed, which torchrun has started under ``gpumem run``."""
    gpumem = "import sys; from pytest_gpumem.cli.main import main; sys.exit(main())"
    command = [warm_python(), "-c", gpumem]
    command += ["run", "--card=L4", "--devices=2", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(script), *groups]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=HANGS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what two ranks of torchrun under ``gpumem run`` tell: sorted lines, by their titles.

    Its argument is their groups: a program has one of the two.
    """
    if Version(importlib.metadata.version("torch")) < Version("2.15"):
        pytest.skip(
            "FSDP2 holds other amounts, a stage tells its shapes in another way, and DDP's "
            "init_sync is newer than this torch"
        )
    script = tmp_path_factory.mktemp("ranks") / "train.py"
    script.write_text(RANKS, encoding="utf-8")

    @cache
    def told(groups):
        out = launched(script, groups)
        lines = {"peaks": re.findall(r"^rank \d +\(pid \d+\) +cuda:\d", out, re.MULTILINE)}
        for title, text in re.findall(r"^(\w+): (rank \d+ NVIDIA L4 .*)$", out, re.MULTILINE):
            lines.setdefault(title, []).append(text.replace(" NVIDIA L4", ""))
        return {title: sorted(texts) for title, texts in lines.items()}

    return told


def test_each_of_torchruns_ranks_has_a_device_of_its_own(ranks):
    """A half of parameters and of gradients under FSDP2."""
    assert ranks("nccl")["NCCL"] == [
        f"rank {rank} fully_shard holds 4 MiB, elsewhere 0" for rank in (0, 1)
    ]


def test_each_ranks_peak_is_told(ranks):
    told = [re.sub(r" +", " ", re.sub(r"\d{2,}", "N", row)) for row in ranks("nccl")["peaks"]]
    assert told == ["rank 0 (pid N) cuda:0", "rank 1 (pid N) cuda:1"]


def test_ranks_that_have_gloo_talk(ranks):
    """With DDP, all of parameters and gradients, and the buckets."""
    assert ranks("gloo")["Gloo"] == [
        f"rank {rank} {model} holds {mib} MiB, elsewhere 0"
        for rank in (0, 1)
        for model, mib in (("ddp", 12), ("fully_shard", 4))
    ]
    assert ranks("gloo")["gathered"] == ["rank 0 [0, 10]", "rank 1 [0, 10]"]


def test_the_stages_of_a_pipeline_tell_each_other_their_shapes(ranks):
    """By objects that ranks send to each other, as a program may itself."""
    assert ranks("nccl")["pipeline"] == [
        "rank 0 [{'rows': 8}, 'back'] 0 losses",
        "rank 1 ['first', {'rows': 8}] 4 losses",
    ]


GROUPS = ("nccl", "None device", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl device")


def test_barriers_of_a_rank_alone_hold_what_those_of_torchruns_ranks_hold(tmp_path):
    """A block of 512 bytes, or none, by the group's backends and PyTorch's version."""
    script = tmp_path / "barriers.py"
    script.write_text(program("barriers.py"), encoding="utf-8")
    alone = ("--card=L4", "--world-size=2", "--rank=1", str(script), *GROUPS)
    status, text = gpumem_run(tmp_path, *alone)
    assert status == 0, text
    found = [
        re.findall(r"rank 1 of .*? holds \[.*?\]", out) for out in (text, launched(script, *GROUPS))
    ]
    assert found[0] == found[1]
    assert len(found[0]) == len(GROUPS)


LOADER = """
from torch.utils.data import DataLoader, TensorDataset

@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
@pytest.mark.gpu_memory(card="T4")
def test_loader(context, workers):
    data = TensorDataset(torch.arange(64.0).reshape(16, 4))
    loader = DataLoader(
        data, batch_size=4, num_workers=workers, pin_memory=True, multiprocessing_context=context
    )
    seen = []
    for (batch,) in loader:
        assert batch.is_pinned()
        seen.append(batch.cuda(non_blocking=True).cpu())
    assert torch.equal(torch.cat(seen), data.tensors[0])
"""
PROCESSES = """
import torch.multiprocessing as mp

def on_host(queue):
    queue.put(torch.ones(3).sum().item())

def on_device(queue):
    torch.ones(3, device="cuda")
    queue.put(torch.cuda.get_device_name())

def refused(queue):
    try:
        torch.ones(3, device="cuda")
    except RuntimeError as error:
        queue.put(str(error)[:44])

@pytest.mark.parametrize(
    ("context", "target", "said"),
    [
        ("fork", on_host, 3.0),
        ("spawn", on_device, "Tesla T4"),
        ("fork", refused, "Cannot re-initialize CUDA in forked subproce"),
    ],
)
@pytest.mark.gpu_memory(card="T4")
def test_process(context, target, said):
    held = torch.ones(3, device="cuda")
    context = mp.get_context(context)
    queue = context.SimpleQueue()
    process = context.Process(target=target, args=(queue,))
    process.start()
    assert queue.get() == said
    process.join()
    assert process.exitcode == 0
"""


DDP = """
import os, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def train(rank, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    if rank and torch.randn(3000, 3000, device="cuda").mean() > 2:
        optimizer.step()
    number = torch.tensor([rank + 1.0]).cuda()
    dist.all_reduce(number)
    assert number.item() == 3
    for group in (None, dist.new_group([0, 1])):
        gathered = [None, None]
        dist.all_gather_object(gathered, f"rank {rank}", group=group)
        assert gathered == ["rank 0", "rank 1"]
    told = f"rank {rank} of {dist.get_world_size()} {torch.cuda.get_device_name()}\\n"
    told += f"reserved {rank} {torch.cuda.max_memory_reserved() >> 20}\\n"
    os.write(1, told.encode())  # one write: the ranks print at the same time
    dist.destroy_process_group()

@pytest.mark.gpu_memory(card="T4", devices=2)
def test_ranks(tmp_path):
    torch.ones(8, device="cuda")
    mp.spawn(train, args=(tmp_path / "store",), nprocs=2)
"""


def test_a_marked_test_may_spawn_ranks_with_ddp(suite):
    """As users write it, with NCCL; each rank's process has the GPUs of its parent."""
    session = suite.run_warm("-s", source=DDP)
    assert session.outcomes == {"passed": 1}, session.out
    for rank in range(2):
        assert f"rank {rank} of 2 Tesla T4" in session.out
    # cuBLAS' workspaces, which each torch has others of, decide how many segments there are.
    reserved = dict(re.findall(r"reserved (\d) (\d+)\n", session.out))
    assert "22" in reserved.values()
    parts = [f"{reserved[rank]}.00 MiB of device {rank}" for rank in "01"]
    assert f"2 child processes reserved {', '.join(parts)}" in session.flat
    assert (
        "in child processes: 1 value was assumed (test_it.py:16): the figures hold" in session.flat
    )


@pytest.mark.parametrize(("source", "count"), [(LOADER, 2), (PROCESSES, 3)])
def test_a_marked_test_may_start_processes(suite, source, count):
    need_semaphores()
    session = suite.run_warm(source=source)
    session.outcomes.pop("warnings", None)  # of torch's deprecations, with some of its versions
    assert session.outcomes == {"passed": count}


def test_vllm_opens_the_virtual_gpus_nccl_unless_the_user_names_another(monkeypatch):
    monkeypatch.delenv("VLLM_NCCL_SO_PATH", raising=False)
    with virtual_card():
        library = ctypes.CDLL(os.environ["VLLM_NCCL_SO_PATH"])
        assert library._handle == ctypes.CDLL(str(native.LIBRARY))._handle
    assert "VLLM_NCCL_SO_PATH" not in os.environ
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "/users/libnccl.so.2")
    with virtual_card():
        assert os.environ["VLLM_NCCL_SO_PATH"] == "/users/libnccl.so.2"


def test_a_program_without_python_preloads_the_library():
    with virtual_card():
        assert str(native.LIBRARY) in os.environ["LD_PRELOAD"]
        done = subprocess.run(["sh", "-c", "echo ran"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("ran\n", "")


def test_a_compiler_links_with_the_driver(tmp_path, monkeypatch):
    """As Inductor's C++ wrappers are, and the launchers of Triton before 3.3."""
    source, library = tmp_path / "launcher.c", tmp_path / "launcher.so"
    source.write_text("int cuInit(unsigned); int init(void) { return cuInit(0); }\n")
    command = [*compiler(), "-shared", "-fPIC", source, "-lcuda", "-o", library]
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path / "users"))
    with virtual_card():
        subprocess.run(command, check=True)
        assert os.environ["LIBRARY_PATH"].startswith(f"{tmp_path / 'users'}:")
        assert ctypes.CDLL(str(library)).init() == 0
    assert os.environ["LIBRARY_PATH"] == str(tmp_path / "users")
