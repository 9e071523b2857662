"""``gpumem verify``: a battery of steps on a GPU and on the virtual one of its kind."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from helpers.verifying import FEW, NOTED, verify
from helpers.warm import warm_python

from pytest_gpumem.cli.verify import verify as command
from pytest_gpumem.cli.verify.battery import NEEDS_TRITON, STEPS
from pytest_gpumem.devices.cards import CARDS

GPU = {
    "device_name": "NVIDIA L4",
    "total_memory": 23_000_000_000,
    "capability": [8, 9],
    "sm_count": 58,
    "l2_cache_size": 0,
    "memory_bus_width": 0,
}


def test_steps_are_measured_and_predicted_for_the_card_that_is_there(tmp_path):
    done = verify(tmp_path, "--json", str(tmp_path / "verified.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NVIDIA L4 (torch ")
    assert "and its prediction as L4\n" in done.stdout
    assert "allocated: equal to the byte in 4 of 4 steps\n" in done.stdout
    assert "reserved: equal to the byte in 4 of 4 steps\n" in done.stdout
    document = json.loads((tmp_path / "verified.json").read_text(encoding="utf-8"))
    assert (document["format"], document["card"]) == (1, "L4")
    for side in ("measured", "predicted"):
        assert list(document[side]["steps"]) == [*FEW, NOTED]
        # Two factors and their product, of 64 MiB each, and the workspace of cuBLAS.
        allocated = document[side]["steps"]["matrix product, float32"]["allocated"]
        assert 192 <= allocated / 2**20 < 192 + 33
    assert "cuFFT are estimates" in str(document["predicted"]["steps"][NOTED]["notes"])


def answers(monkeypatch, measured, predicted, device=GPU):
    """Let the two children answer with figures: of each step (allocated, reserved), or an error."""
    documents = [
        {
            "device": device,
            "provenance": {"torch": "2.15.0", "cuda": "13.2", "cudnn": ""},
            "steps": {
                name: {"error": figures}
                if isinstance(figures, str)
                else dict(zip(("allocated", "reserved"), figures, strict=True))
                for name, figures in steps.items()
            },
        }
        for steps in (measured, predicted)
    ]
    asked = []

    def child(_out, arguments):
        asked.append(list(arguments))
        return documents[len(asked) - 1]

    monkeypatch.setattr(command, "measure_in_child", child)
    return asked


def test_more_than_a_hundredth_of_allocated_is_a_failure(gpumem, monkeypatch):
    asked = answers(
        monkeypatch, {"a": (1000, 2000), "b": (1000, 2000)}, {"a": (1000, 3000), "b": (1010, 2000)}
    )
    status, output, _ = gpumem("verify")
    assert (status, asked) == (0, [[], ["L4"]])  # 1 % of allocated, and reserved is only told
    assert "allocated: equal to the byte in 1 of 2 steps; worst +1.00 % (b)" in output
    assert "reserved: equal to the byte in 1 of 2 steps; worst +50.00 % (a)" in output
    answers(monkeypatch, {"a": (1000, 2000)}, {"a": (989, 2000)})
    assert gpumem("verify")[0] == 1


@pytest.mark.parametrize("side", ["measured", "predicted"])
def test_a_step_that_fails_on_one_side_is_named(gpumem, monkeypatch, side):
    steps = {"measured": {"a": (1000, 2000)}, "predicted": {"a": (1000, 2000)}}
    steps[side] = {"a": "OutOfMemoryError: \x1b[31mfull"}
    answers(monkeypatch, **steps)
    status, output, _ = gpumem("verify")
    assert status == 1
    where = "GPU" if side == "measured" else "virtual GPU"
    assert f"failed: a: on the {where}: OutOfMemoryError: " in output
    assert "\x1b" not in output


def test_a_gpu_that_the_table_lacks_is_described_to_the_virtual_one(gpumem, monkeypatch):
    device = {**GPU, "device_name": "NVIDIA Mine", "sm_count": 60}
    asked = answers(monkeypatch, {"a": (1, 1)}, {"a": (1, 1)}, device)
    status, output, _ = gpumem("verify")
    assert status == 0
    assert asked[1][0].endswith("this-gpu.toml")
    assert "its prediction as NVIDIA Mine, which the table of cards lacks" in output
    old = {**device, "capability": [6, 1]}
    answers(monkeypatch, {"a": (1, 1)}, {"a": (1, 1)}, old)
    status, _, errors = gpumem("verify")
    assert (status, "does not support compute capability 6.1" in errors) == (2, True)


def test_without_a_gpu_the_command_says_what_it_needs(tmp_path):
    words = [warm_python(), "-m", "pytest_gpumem", "verify"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "this command needs a GPU that torch sees" in done.stderr


def test_a_file_that_cannot_be_written_is_named(gpumem, monkeypatch, tmp_path):
    answers(monkeypatch, {"a": (1, 1)}, {"a": (1, 1)})
    status, _, errors = gpumem("verify", "--json", str(tmp_path))
    assert status == 2
    assert "cannot be written" in errors


def test_the_battery_has_twenty_steps_and_every_card_is_known_by_its_own_name(tmp_path):
    assert len(STEPS) == 20
    assert NEEDS_TRITON in STEPS
    for card in CARDS.values():
        device = {**GPU, "device_name": card.device_name, "sm_count": card.sm_count}
        assert command.card_of(device, tmp_path) == (card.name, card.name)
