"""``gpumem run`` and ``gpumem cards``, as a user types them; each run is a process of its own."""

from __future__ import annotations

import subprocess

import pytest
from helpers.warm import HANGS, warm_python

from pytest_gpumem.cli import main
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
    assert "memory is predicted, kernels did not run" in text


def test_run_of_a_module_that_runs_out_of_memory_says_where_and_shows_its_own_frames(gpumem):
    ended = gpumem("run", "--card", "T4", "--max-gib", "4.5", "-m", "program", "more")
    assert ended.returncode == 1
    text = " ".join(ended.stderr.split())
    assert "torch.OutOfMemoryError: CUDA out of memory" in text
    assert (
        "gpumem: out of memory on cuda:0: 1024.00 MiB more asked for with 4196.00 MiB allocated, "
        "4196.00 MiB reserved, at program.py:8 in" in text
    )
    assert "of 4608.00 MiB" in text
    assert "runpy" not in ended.stderr
    assert "pytest_gpumem" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "absent.py"], "absent.py: there is no such file"),
        (["run", "--card", "T44", "program.py"], "T44"),
        (["run", "--max-gib", "nan", "program.py"], "--max-gib=nan: that is not a size"),
        (["run", "--devices", "17", "program.py"], "write a number from 1 to 16"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(gpumem, arguments, said):
    ended = gpumem(*arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_cards_lists_every_card(capsys):
    assert main.main(["cards"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in card_names())
    assert "Tesla T4" in listed
