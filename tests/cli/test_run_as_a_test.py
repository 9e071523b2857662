"""``gpumem run`` with a baseline, limits and reports: a program is judged as a marked test is."""

from __future__ import annotations

import json
import re
import sys

import pytest
from helpers.program_runs import gpumem_run

from pytest_gpumem.cli.program_trials import read_range, read_rank_list

PROGRAM = """
import os, subprocess, sys, torch

if "idle" in sys.argv:
    sys.exit()
mib = int(os.environ.get("MIB", "8"))
kept = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
if "killed" in sys.argv:
    kill = "import os, torch; torch.ones(9).cuda(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", kill])
if "child" in sys.argv:
    subprocess.run([sys.executable, __file__], env={**os.environ, "MIB": os.environ["BELOW"]})
if "fail" in sys.argv:
    sys.exit(3)
if "guess" in sys.argv:
    assert torch.randn(5000, 5000, device="cuda").mean() > 2
if "more" in sys.argv:
    try:
        torch.empty(40 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("caught")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run program.py with options and its own arguments; return the status and the text."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.delenv("CI", raising=False)

    def run(*options, own=(), new=False, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return gpumem_run(tmp_path, "--card=T4", *options, "program.py", *own, new=new)

    return run


def entries(tmp_path, name="program"):
    text = (tmp_path / "kept" / "virtual-T4" / f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)["tests"]


def test_a_programs_growth_fails_with_its_line_and_the_command_that_records_it(run, tmp_path):
    status, text = run("--baseline=kept", "--update", own=["a b"])
    assert status == 0
    assert "gpumem: baselines: 1 created" in text
    assert list(entries(tmp_path)) == ["'a b'"]
    status, text = run("--baseline=kept", own=["a b"])
    assert (status, "gpumem: ok: 8.00 MiB allocated" in text) == (0, True)

    before = entries(tmp_path)
    status, text = run("--baseline=kept", own=["a b"], MIB="20")
    assert status == 1
    assert "regressed: other +12.00 MiB at program.py:7 (<module>)" in text
    command = "gpumem run --update --card=T4 --baseline=kept program.py 'a b'"
    assert f"next: if this is intended, run {command}" in text
    assert "second time" not in text  # a program runs once
    assert entries(tmp_path) == before

    assert run("--baseline=kept", "--update", own=["a b"])[0] == 0
    assert entries(tmp_path) != before


def test_a_name_takes_the_place_of_the_arguments(run, tmp_path):
    assert run("--baseline=kept", "--update", "--name=small", own=["--out", "/tmp/1"])[0] == 0
    assert list(entries(tmp_path)) == ["small"]
    status, text = run("--baseline=kept", "--name=small", own=["--out", "/tmp/2"], MIB="30")
    assert (status, "regressed" in text) == (1, True)


def test_a_program_without_a_baseline_fails_in_ci_alone(run):
    status, text = run("--baseline=kept")
    assert (status, "no baseline: 8.00 MiB allocated" in text) == (0, True)
    status, text = run("--baseline=kept", CI="1")
    assert (status, "gpumem run --update --card=T4" in text) == (1, True)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--max-allocated-gib=0.005", "peak allocated of 8.00 MiB is 2.88 MiB over max_allocated"),
        ("--max-reserved-gib=0.005", "peak reserved of 20.00 MiB is 14.88 MiB over max_reserved"),
        ("--max-gib=0.005", "out of memory: the step does not fit in max_gib=0.005"),
        ("--max-host-gib=0.000001", "over max_host_gib=1e-06"),
    ],
)
def test_the_markers_limits_are_options(run, option, said):
    status, text = run(option)
    assert status == 1
    assert said in text
    assert "program.py:7" in text or "host" in option


def test_reports_are_a_sessions(run, tmp_path):
    options = ("--json=out.json", "--markdown=out.md", "--html=out.html")
    status, text = run("--baseline=kept", *options)
    assert status == 0
    assert "JSON report written to" in text
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    [result] = report["results"]
    assert (result["nodeid"], result["outcome"]) == ("program.py", "passed")
    assert "program.py" in (tmp_path / "out.md").read_text(encoding="utf-8")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert '<span class="test">program.py</span>' in page  # where a module's name is hidden
    status, text = run("--json=absent/out.json", "--max-allocated-gib=1")
    assert (status, (tmp_path / "absent/out.json").exists()) == (0, True)


def test_child_processes_have_a_baseline_of_their_own(run, tmp_path):
    assert run("--baseline=kept", "--update", own=["child"], BELOW="30")[0] == 0
    assert sorted(entries(tmp_path)["child"]["parts"]) == ["child processes"]
    status, text = run("--baseline=kept", own=["child"], BELOW="30")
    assert status == 0
    assert "gpumem (child processes): ok: 30.00 MiB allocated" in text
    status, text = run("--baseline=kept", own=["child"], BELOW="50")
    assert status == 1
    assert "peak allocated grew by 20.00 MiB (+66.7%): 30.00 -> 50.00 MiB" in text
    assert "regressed: other +20.00 MiB at program.py:7 (<module>)" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python shows notes from 3.11 on")
def test_an_error_that_unknown_values_may_cause_says_so_and_what_to_do(run):
    status, text = run(own=["guess"])
    assert status == 1
    assert "AssertionError the virtual GPU did not compute some values: if this" in text
    assert "for a program --values=full); the peak before the failure was" in text
    assert "did not compute" not in run(own=["fail"])[1]


def test_a_program_that_ends_badly_keeps_the_baseline_and_its_status(run, tmp_path):
    assert run("--baseline=kept", "--update", own=["fail"])[0] == 3
    assert not (tmp_path / "kept").exists()
    assert run("--baseline=kept", "--update")[0] == 0
    before = entries(tmp_path)
    status, text = run("--baseline=kept", "--update", "--name=", own=["fail"], MIB="40")
    assert (status, "regressed" in text) == (3, False)
    assert entries(tmp_path) == before


def test_a_program_that_replaces_its_process_is_not_passed_over(run, tmp_path):
    text = (
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(30000 + 4567)'])\n"
    )
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    status, text = run("--baseline=kept", "--update")
    assert (status, "34567" in text) == (1, False)
    assert "os.exec: the program replaces its own process: the new one would not be judged" in text
    assert run("--max-gib=1")[0] == 1
    assert run() == (0, "34567")


def test_a_process_that_tells_no_peak_fails_a_gate(run, tmp_path):
    status, text = run("--baseline=kept", own=["killed"])
    assert status == 1
    assert "used the GPU and ended, or runs on, without reporting its peaks; let all" in text
    assert not (tmp_path / "kept").exists()


def test_a_program_that_catches_its_out_of_memory_error_is_judged_by_its_peak(run):
    status, text = run("--baseline=kept", own=["more"])
    assert (status, "caught" in text) == (0, True)
    assert "the step caught 1 out-of-memory error(s) itself" in text


def test_a_program_that_takes_no_memory_is_held_to_nothing(run, tmp_path):
    assert run(own=["idle"])[0] == 0
    for option in ("--baseline=kept", "--max-gib=2"):
        status, text = run(option, own=["idle"])
        assert status == 1
        assert "program.py::idle: the program took no memory of T4: it has no peak to judge" in text
    assert not (tmp_path / "kept").exists()


RANK = """
import atexit, os, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

assert not dist.is_initialized()
print("pytest is imported:", "pytest" in sys.modules)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=torch.device("cuda", 0), init_method="env://")
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
atexit.register(lambda: print("at exit", torch.cuda.memory_allocated() > 0))
layer = torch.nn.Linear(2048, 2048, bias=False, device="cuda")
net = fully_shard(layer, mesh=mesh)
net(torch.ones(8, 2048, device="cuda")).sum().backward()
dist.barrier()
print(f"rank {dist.get_rank()} of {os.environ['WORLD_SIZE']}")
if "again" not in sys.argv:
    dist.destroy_process_group()
"""


def test_one_rank_of_a_program_that_begins_its_process_group_itself(run, tmp_path):
    """FSDP2: a whole layer of 16 MiB, a 64th of the parameters and of the gradients."""
    (tmp_path / "program.py").write_text(RANK, encoding="utf-8")
    ranks = ("--world-size=64", "--rank=63", "--baseline=kept")
    status, text = run(*ranks, "--update", new=True)
    assert (status, "rank 63 of 64" in text) == (0, True), text
    assert "at exit True" in text
    assert "pytest is imported: False" in text
    assert "Exception ignored" not in text
    [(name, entry)] = entries(tmp_path).items()
    assert (name, entry["world_size"], entry["rank"]) == ("[rank 63 of 64]", 64, 63)
    assert 16 <= entry["peak_allocated"][0] / 2**20 < 50
    status, text = run("--world-size=8", "--rank=7", *ranks[2:], "--name=", own=["again"])
    assert (status, "no baseline" in text) == (0, True)
    status, text = run("--world-size=64", "--ranks=0,63", "--baseline=kept")
    assert status == 0
    assert re.search(
        r"verdict [- ]+ 0 [\d.]+ MiB [\d.]+ MiB no baseline 63 [\d.]+ MiB \S+ MiB ok", text
    )


def test_a_rank_that_is_listed_twice_runs_once():
    assert read_rank_list("3,0,3", 4) == [3, 0]


def test_a_searched_argument_and_its_value_are_two_words_or_one():
    assert read_range("--lr:1..9").words(3) == ["--lr", "3"]
    assert read_range("--lr=:1..9").words(3) == ["--lr=3"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world-size=4", "--rank=4"], "--world-size=4 --rank=4: there is no such rank"),
        (["--world-size=0"], "--world-size=0 --rank=0: there is no such rank"),
        (["--largest=--lr:1..2", "--json=a"], "a program that runs several times has no report"),
        (["--cards=T4", "--baseline=kept"], "--cards: a program that runs several times has no"),
        (["--world-size=2", "--ranks=0,1", "--json=a"], "--ranks: a program that runs several"),
        (["--world-size=2", "--ranks=0,2"], "--world-size=2 --ranks=0,2: these are not ranks"),
        (["--ranks=0,1"], "--world-size=0 --ranks=0,1: these are not ranks"),
        (["--largest=--lr"], "--largest=--lr: this is no argument with a first and a last value"),
        (["--largest=--lr:3..2"], "--largest=--lr:3..2: this is no argument"),
        (["--update"], "--update: no folder is named; write --baseline=baselines --update"),
        (["--max-reserved-gib=nan"], "--max-reserved-gib=nan: this is not a size"),
        (["--max-pinned-gib=-1"], "--max-pinned-gib=-1.0: this is not a size"),
        (["--tolerance=x"], "--tolerance=x: "),
        (["--baseline="], "--baseline=: this is not a folder; write --baseline=baselines"),
        (["--json=program.py"], "--json=program.py: "),
        (["--json=a", "--html=a"], "names the same file"),
    ],
)
def test_bad_input_is_told_before_the_program_runs(run, options, said):
    status, text = run(*options, own=["child"])
    assert status == 2
    assert said in text
    assert "Traceback" not in text


PHASES = """
import torch

def batch(rows):
    return torch.ones(rows << 10, 256, device="cuda")

net = torch.nn.Linear(256, 256, device="cuda")
net = torch.compile(net, backend="eager")
optimizer = torch.optim.AdamW(net.parameters())
for index in range(3):
    images = batch(1)
    loss = net(images).sum()
    kept = batch(4 * (index > 0))
    loss.backward()
    optimizer.step()
    del kept
    optimizer.zero_grad()
    if index == 1:
        with torch.no_grad():
            net(images)
            more = batch(SIZE)
            del more
torch.save(net.state_dict(), "checkpoint.pt")
"""


def test_phases_are_judged_apart(run, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PHASES.replace("SIZE", "8"), encoding="utf-8")
    assert run("--baseline=kept", "--update", "--phases", new=True)[0] == 0
    parts = entries(tmp_path)[""]["parts"]
    assert list(parts) == ["checkpoint", "evaluation", "first step", "later steps", "load"]
    mib = {name: round(part["peak_allocated"][0] / 2**20) for name, part in parts.items()}
    # A training step has workspaces of cuBLAS too: how many depends on torch.
    assert mib["load"] == 1
    assert mib["later steps"] == pytest.approx(mib["first step"] + 4, abs=1)
    assert mib["first step"] % 8 == 3
    assert mib["evaluation"] >= 10
    assert mib["checkpoint"] % 8 <= 2

    program.write_text(PHASES.replace("SIZE", "20"), encoding="utf-8")
    status, text = run("--baseline=kept", "--phases", new=True)
    assert status == 1
    assert "gpumem run --update --phases --card=T4 --baseline=kept program.py" in text
    grown = re.findall(r"peak allocated grew by ([0-9.]+) MiB", text)
    assert len(grown) == 2  # of the evaluation, and of the whole
    assert grown[0] == "12.00"


def test_processes_of_the_program_have_no_phases(run, tmp_path):
    below = "import torch; torch.ones(9, device='cuda')"
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {below!r}])\n"
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    status, text = run("--baseline=kept", "--update", "--phases")
    assert status == 1
    assert "--phases: only processes that the program starts use a GPU" in text
    assert not (tmp_path / "kept").exists()


LARGEST = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
size = parser.parse_args().batch_size
if size > 90:
    raise SystemExit(f"{size} is too large for the data")
kept = torch.empty(size << 28, dtype=torch.uint8, device="cuda")
"""


def test_the_largest_value_of_an_argument_is_searched(run, tmp_path):
    """A T4 has 14.44 GiB beside the context: 57 quarters of a GiB."""
    (tmp_path / "program.py").write_text(LARGEST, encoding="utf-8")
    status, text = run("--largest=--batch-size:50..65", new=True)
    assert status == 0, text
    assert "--batch-size 57 fits in 14.44 GiB with 14.25 GiB reserved; 58 does not" in text
    status, text = run("--largest=--batch-size=:1..3", "--max-gib=0.6", new=True)
    assert "--batch-size= 2 fits in 614.40 MiB with 512.00 MiB reserved; 3 does not" in text
    status, text = run("--largest=--batch-size:1..3", "--max-allocated-gib=0.6", new=True)
    assert "--batch-size 2 fits in 14.44 GiB with 512.00 MiB reserved; 3 does not" in text
    status, text = run("--largest=--batch-size:91..99", new=True)
    assert status == 2
    assert "the program ended with status 1: 91 is too large for the data; correct" in text


def test_a_program_is_run_on_each_of_several_cards(run, tmp_path):
    (tmp_path / "program.py").write_text(LARGEST, encoding="utf-8")
    status, text = run("--cards=T4,L4", own=["--batch-size", "60"], new=True)
    assert status == 1
    assert "T4 14.44 GiB no L4 21.77 GiB yes 15.00 GiB" in text
    status, text = run("--cards=T4,L4", "--largest=--batch-size:55..70", new=True)
    assert status == 0
    assert "card for a step --batch-size reserved" in text
    assert "T4 14.44 GiB 57 14.25 GiB L4 21.77 GiB 70 17.50 GiB" in text
    status, text = run("--cards=T4,Voodoo", own=["--batch-size", "60"])
    assert (status, "Voodoo" in text) == (2, True)


COMPILED = """
import torch
net = torch.compile(torch.nn.Linear(1000, 1001, device="cuda"))
net(torch.ones(777, 1000, device="cuda")).sum().backward()
"""


def test_a_range_is_told_and_what_its_replay_takes_is_not(run, tmp_path):
    """The replay's memory was told as memory outside of PyTorch's allocator."""
    (tmp_path / "program.py").write_text(COMPILED, encoding="utf-8")
    status, text = run(new=True)
    assert status == 0
    assert re.search(r"note: allocated [\d.]+ MiB to [\d.]+ MiB, reserved [\d.]+ MiB to", text)
    assert "outside PyTorch's allocator" not in text
