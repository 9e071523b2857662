"""``gpumem run`` and ``gpumem cards``, as a user types them; each run is a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from helpers.virtual_gpu import child
from helpers.warm import HANGS, warm_python

from pytest_gpumem.cli import main
from pytest_gpumem.cli.program_trials import printed_error
from pytest_gpumem.devices.cards import card_names

PROGRAM = """
import sys
import torch

print("arguments", sys.argv[1:], torch.cuda.get_device_name(), torch.cuda.device_count())
kept = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
if "more" in sys.argv:
    blocks = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(20)]
sys.exit(3)
"""


@pytest.fixture
def gpumem(tmp_path):
    """Run the command in a folder that has program.py."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")

    def run(*arguments):
        command = [warm_python(), "-m", "pytest_gpumem.cli.main", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANGS
        )

    return run


def test_run_gives_the_script_its_arguments_and_exits_with_its_status(gpumem):
    ended = gpumem("run", "--card", "T4", "--devices", "2", "program.py", "--lr", "1e-3")
    assert ended.returncode == 3
    assert ended.stdout == "arguments ['--lr', '1e-3'] Tesla T4 2\n"
    text = " ".join(ended.stderr.split())
    assert "gpumem: virtual GPU T4" in text
    assert "cuda:0 100.00 MiB 100.00 MiB 1% cuda:1 0 B 0 B 0%" in text
    assert "memory is predicted; kernels did not run" in text


@pytest.mark.parametrize("values", ["off", "auto"])
def test_run_of_a_module_that_runs_out_of_memory_says_where_and_shows_its_own_frames(
    gpumem, values
):
    options = ("--card", "T4", "--max-gib", "4.5", f"--values={values}")
    ended = gpumem("run", *options, "-m", "program", "more")
    assert ended.returncode == 1
    text = " ".join(ended.stderr.split())
    assert "torch.OutOfMemoryError: CUDA out of memory" in text
    assert (
        "out of memory: the step does not fit in max_gib=4.5 (4608.00 MiB): it asked for 1024.00 "
        "MiB more when 4196.00 MiB were allocated, 4196.00 MiB reserved requested at program.py:8"
        in text
    )
    assert "of 4608.00 MiB" in text
    assert "runpy" not in ended.stderr
    assert "pytest_gpumem" not in ended.stderr


WITH_BLOCKS = """
import torch
import pytest_gpumem

with pytest_gpumem.measure() as outer:
    large = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
    del large
    with pytest_gpumem.measure() as inner:
        model = torch.nn.Linear(1024, 1024, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.ones(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
print(outer.peak_allocated >> 20, inner.peak_allocated >> 20)
"""


def test_blocks_that_a_program_measures_are_parts_of_its_measurement(gpumem, tmp_path):
    """Also one that begins before the first use of CUDA. What its variables hold is no garbage."""
    (tmp_path / "blocks.py").write_text(WITH_BLOCKS, encoding="utf-8")
    ended = gpumem("run", "--card=T4", "blocks.py")
    assert ended.stdout.split()[0] == "200"
    assert int(ended.stdout.split()[1]) < 40
    assert "cuda:0 200.00 MiB" in " ".join(ended.stderr.split())
    assert "garbage" not in ended.stderr


BELOW = """
import pytest, torch

@pytest.mark.gpu_memory
def test_it():
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    weight.sum().backward()
    torch.optim.SGD([weight]).step()
"""


HOLDING = """
import pytest, torch

kept = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")  # and 18 MiB of free room beside
pytest.main(["-p", "no:cacheprovider", "test_it.py"])
"""


def test_a_program_and_the_tests_that_it_runs_both_have_their_peaks(gpumem, tmp_path):
    (tmp_path / "test_it.py").write_text(BELOW, encoding="utf-8")
    (tmp_path / "holding.py").write_text(HOLDING, encoding="utf-8")
    ended = gpumem("run", "--card=T4", "holding.py")
    assert re.search(r"^test_it +300\.00 +302\.00 ", ended.stdout, re.MULTILINE)
    assert "cuda:0 302.00 MiB 322.00 MiB" in " ".join(ended.stderr.split())
    assert "outside PyTorch's allocator" not in ended.stderr


CHILD = """
import os, sys, torch
rank = int(os.environ.get("RANK", 0))
block = torch.empty((rank + 1) * 40 << 20, dtype=torch.uint8, device="cuda:0")
del block
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
kept = torch.empty(10 << 20, dtype=torch.uint8, device="cuda:0")
if "kill" in sys.argv:
    os._exit(0)
if "own" in sys.argv:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    torch.distributed.all_reduce(torch.ones(4, device="cuda"))
    torch.distributed.destroy_process_group()
"""
PARENT = """
import subprocess, sys

def work(index):
    import torch
    kept = torch.empty(26 << 20, dtype=torch.uint8, device="cuda")
    if kept.max() > 3:
        del kept

if __name__ == "__main__":
    if "spawn" in sys.argv:
        import torch.multiprocessing as multiprocessing
        multiprocessing.spawn(work, nprocs=1)
    else:
        subprocess.run([sys.executable, "child.py", *sys.argv[1:]], check=True)
"""


@pytest.fixture
def run_apart(gpumem, tmp_path):
    """Run ``gpumem run`` in a process of its own, whose children are new interpreters."""
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    (tmp_path / "parent.py").write_text(PARENT, encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text('print("here as well")', encoding="utf-8")

    def run(*arguments, new=False, **variables):
        python = sys.executable if new else warm_python()
        command = [python, "-m", "pytest_gpumem.cli.main", "run", "--card=T4", *arguments]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=HANGS,
        )
        assert ended.returncode == 0, ended.stderr
        return re.sub(r"pid \d+", "pid N", " ".join(ended.stderr.split())), ended.stdout

    return run


def test_run_of_a_launcher_tells_the_peaks_of_each_rank(run_apart):
    """Also those before a reset of the statistics; the launcher itself used no GPU.

    Each rank has a GPU of its own without ``--devices``.
    """
    launcher = ("torchrun", "--standalone", "--nproc-per-node=2")  # found beside this Python
    text, _ = run_apart(*launcher, "child.py", "own", new=True)
    assert re.search(r"process device peak allocated peak reserved of [\d.]+ GiB", text)
    assert "rank 0 (pid N) cuda:0 40.00 MiB 40.00 MiB 0%" in text
    assert "rank 1 (pid N) cuda:0 80.00 MiB 80.00 MiB 1%" in text
    assert re.search(r"rank 1 \(pid N\) cuda:1 \S+ \w+ 2.00 MiB 0%", text)
    assert "program" not in text


def test_run_tells_the_peaks_of_child_processes(run_apart, tmp_path):
    text, out = run_apart("parent.py", new=True, PYTHONPATH=str(tmp_path))
    assert "child.py (pid N) cuda:0 40.00 MiB 40.00 MiB 0%" in text
    assert out.count("here as well") == 2
    text, _ = run_apart("--values=off", "parent.py", "spawn")
    assert "(pid N) cuda:0 26.00 MiB 28.00 MiB 0%" in text
    assert "note: in child processes: 1 value was read back from the virtual GPU (parent.py:7)" in (
        text
    )


def test_run_tells_of_a_child_that_was_ended(run_apart):
    text, _ = run_apart("parent.py", "kill")
    assert "note: child.py (pid N) used the GPU and was killed before it reported its peaks" in text
    assert "peak allocated" not in text  # no table without a row


@pytest.mark.parametrize(("options", "card"), [([], "T4"), (["--gpumem-card=L4"], "L4")])
def test_marked_tests_below_run_take_its_card(run_apart, tmp_path, options, card):
    (tmp_path / "test_it.py").write_text(
        "import pytest, torch\n@pytest.mark.gpu_memory\ndef test_it(): torch.empty(9).cuda()\n",
        encoding="utf-8",
    )
    _, out = run_apart("-m", "pytest", "-v", "-p", "no:cacheprovider", *options, "test_it.py")
    assert f"virtual-{card}" in out or f"virtual GPU {card}" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "absent.py"], "absent.py: there is no such file"),
        (["run", "ls"], "ls: there is no such file"),  # a command, but not of Python
        (["run", "--card", "T44", "program.py"], "T44"),
        (["run", "--max-gib", "nan", "program.py"], "--max-gib=nan: this is not a size"),
        (["run", "--devices", "17", "program.py"], "write a number from 1 to 16"),
        (["rn"], "'rn': there is no such command; did you mean run?"),
        (["frobnicate"], "there is no such command; gpumem --help lists all commands"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(gpumem, arguments, said):
    ended = gpumem(*arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_the_command_alone_prints_its_help(gpumem):
    ended = gpumem()
    assert ended.returncode == 2
    assert [name for name in main.COMMANDS if f"\n    {name} " not in ended.stderr] == []
    assert "gpumem COMMAND --help explains a command" in ended.stderr


def test_run_without_a_program_asks_for_nothing_else(gpumem):
    ended = gpumem("run")
    assert ended.returncode == 2
    assert ended.stderr.endswith("the following arguments are required: SCRIPT\n")


def test_cards_lists_every_card(capsys):
    assert main.main(["cards"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in card_names())
    assert "T4                  14.57 GiB   14.44 GiB         7.5   40  Tesla T4" in listed
    assert "MiB" not in listed


VALUES = """
import torch
mask = torch.ones(4, 2048, dtype=torch.long, device="cuda")
if not mask.bool().all():
    torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
"""


@pytest.mark.parametrize("computed", [True, False])
def test_a_program_decides_by_values_that_are_computed(tmp_path, gpumem, computed):
    program = tmp_path / "program.py"
    program.write_text(VALUES)
    ended = gpumem("run", "--card", "T4", *["--values=off"] * (not computed), str(program))
    assert ended.returncode == 0
    assert (" 300.06 MiB" in ended.stderr) != computed
    assert ("read back" in ended.stderr) != computed


VALUES_OF_CHILD = (
    """
import subprocess, sys
CHILD = """
    + repr(VALUES)
    + """
CHILD += "print(mask.sum().item(), mask.bool().all().item())"
subprocess.run([sys.executable, "-c", CHILD], check=True)
"""
)


@pytest.mark.parametrize("computed", [True, False])
def test_a_child_process_decides_by_values_that_are_computed(tmp_path, gpumem, computed):
    program = tmp_path / "program.py"
    program.write_text(VALUES_OF_CHILD)
    ended = gpumem("run", "--card", "T4", *["--values=off"] * (not computed), str(program))
    assert ended.stdout == ("8192 True\n" if computed else "0 False\n"), ended.stderr
    assert (" 300.06 MiB" in ended.stderr) != computed


def test_a_programs_own_virtual_gpu_computes_values():
    code = "import pytest_gpumem\npytest_gpumem.use_virtual_gpu('T4')\n"
    code += "import torch\nprint(torch.arange(4, device='cuda').sum().item())"
    assert child(code, card=None, warm=True).strip() == "6"


# -- programs that fork before they use CUDA --

FORKS = """
import multiprocessing, os, torch

def work(number):
    block = torch.empty((number + 1) * 40 << 20, dtype=torch.uint8, device="cuda")
    mask = torch.arange(6, device="cuda") > 3
    print("child", torch.arange(6, device="cuda")[mask].tolist())

assert torch.cuda.device_count() == 1 and not torch.cuda.is_initialized()
assert not torch._C._cuda_hasPrimaryContext(0)
context = multiprocessing.get_context("fork")
workers = [context.Process(target=work, args=(number,)) for number in range(2)]
for worker in workers:
    worker.start()
    worker.join()
print([worker.exitcode for worker in workers], flush=True)
pid = os.fork()
kept = torch.empty((10 if pid else 30) << 20, dtype=torch.uint8, device="cuda")
if pid:
    os.waitpid(pid, 0)
"""


def test_a_program_may_fork_before_it_uses_cuda_and_each_process_has_its_peaks(gpumem, tmp_path):
    (tmp_path / "forks.py").write_text(FORKS, encoding="utf-8")
    ended = gpumem("run", "--card", "T4", "--max-gib", "1", "forks.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [*["child [4, 5]"] * 2, "[0, 0]"]
    text = " ".join(ended.stderr.split())
    assert text.count("gpumem: virtual GPU") == 1
    assert "program cuda:0 10.00 MiB" in text
    sizes = re.findall(r"forks.py \(pid \d+\) cuda:0 (\d+)\.\d\d MiB", text)
    assert sorted(sizes) == ["30", "40", "80"]


ASKS_FIRST = """
import os, sys, torch
print(torch.cuda.is_available(), flush=True)
if os.fork() == 0:
    try:
        torch.ones(1, device="cuda")
        print("used")
    except RuntimeError as error:
        print(str(error).partition(".")[0], flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    ("by_nvml", "said"),
    [("0", "Cannot re-initialize CUDA in forked subprocess"), ("1", "used")],
)
def test_asking_the_driver_for_a_gpu_lets_no_fork_use_it_as_on_a_gpu(
    gpumem, tmp_path, monkeypatch, by_nvml, said
):
    """torch.cuda.is_available() asks CUDA's driver, unless the variable says NVML."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", by_nvml)
    (tmp_path / "program.py").write_text(ASKS_FIRST.replace('"used")', '"used", flush=True)'))
    ended = gpumem("run", "--card", "T4", "program.py")
    assert ended.stdout.splitlines() == ["True", said], ended.stderr


ONE_DEVICE = """
import torch
kept = torch.empty(1 << 20, device="cuda:1")
print([torch._C._cuda_hasPrimaryContext(device) for device in range(3)])
"""


def test_a_program_has_contexts_on_the_devices_that_it_uses(gpumem, tmp_path):
    (tmp_path / "program.py").write_text(ONE_DEVICE, encoding="utf-8")
    ended = gpumem("run", "--card", "T4", "--devices", "3", "program.py")
    assert (ended.returncode, ended.stdout) == (0, "[False, True, False]\n"), ended.stderr


PINS_FIRST = """
import torch
pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
assert not torch.cuda.is_initialized()
assert torch.cuda.get_device_properties(0).total_memory == 15_642_329_088
half = torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
more = torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
"""


def test_limits_hold_where_pinned_memory_initialises_cuda(gpumem, tmp_path):
    (tmp_path / "program.py").write_text(PINS_FIRST, encoding="utf-8")
    ended = gpumem("run", "--card", "T4", "--max-gib", "1", "program.py")
    assert ended.returncode == 1
    assert "1024.00 MiB allowed" in ended.stderr
    assert "at program.py:7 in <module>" in ended.stderr


FIRST_USES = """
import threading, torch
from torch._subclasses.fake_tensor import FakeTensorMode

def use():
    with FakeTensorMode():
        torch.empty(1 << 30, device="cuda")

thread = threading.Thread(target=use)
thread.start()
thread.join()
kept = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
print(torch.arange(6, device="cuda")[torch.arange(6, device="cuda") > 3].tolist())
"""


def test_the_first_use_may_be_a_threads_and_under_a_mode(gpumem, tmp_path):
    (tmp_path / "program.py").write_text(FIRST_USES, encoding="utf-8")
    ended = gpumem("run", "--card", "T4", "program.py")
    assert (ended.returncode, ended.stdout) == (0, "[4, 5]\n"), ended.stderr
    assert "cuda:0 5.00 MiB" in " ".join(ended.stderr.split())


def test_a_command_takes_every_device_of_the_plugin_but_none():
    from pytest_gpumem.cli.outcome import DEVICES
    from pytest_gpumem.session.settings import DEVICES as PLUGIN_DEVICES

    assert (*DEVICES, "none") == PLUGIN_DEVICES


def test_an_error_of_several_lines_is_shown_whole():
    printed = (
        "Traceback (most recent call last):\n  File ...\na.ValidationError: 1 error\n  no such\nyou"
    )
    assert printed_error(f"{printed}\n") == "a.ValidationError: 1 error no such you"
    assert printed_error("loaded\n91 is too large\n") == "91 is too large"
    assert printed_error("") == ""
