"""Each of pytest-xdist's workers has another GPU first, and all GPUs that there are."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from unittest.mock import patch

import pytest
from helpers.virtual_gpu import opened
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.devices import xdist_order
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.gpu_ledger import ledger_folder
from pytest_gpumem.devices.select import choose
from pytest_gpumem.devices.xdist_order import names, take_turns, turn

FOUR = ["A100"] * 4
UUIDS = "GPU-8932f937, GPU-c2f7,GPU-1b"
MIXED = ["A100", "T4", "A100", "T4"]


@pytest.mark.parametrize(
    ("visible", "gpus", "by", "turned"),
    [
        (None, FOUR, 0, "0,1,2,3"),
        (None, FOUR, 1, "1,2,3,0"),
        (None, FOUR, 6, "2,3,0,1"),
        ("3,5", FOUR[:2], 1, "5,3"),
        (UUIDS, FOUR[:3], 2, "GPU-1b,GPU-8932f937,GPU-c2f7"),
        ("MIG-1/7/0,MIG-1/8/0", FOUR[:2], 1, "MIG-1/8/0,MIG-1/7/0"),
        ("2,0,-1,1", FOUR[:2], 1, "0,2"),
        ("2,0,1", FOUR[:1], 1, None),
        ("2", FOUR[:1], 1, None),
        (None, FOUR[:1], 1, None),
        (None, [], 1, None),
        ("0", FOUR, 1, None),
        (None, MIXED, 1, "2,1,0,3"),
        (None, MIXED, 2, "0,1,2,3"),
        ("7,6,5,4", MIXED, 3, "5,6,7,4"),
        (None, ["A100", "T4"], 1, None),
    ],
)
def test_the_list_of_gpus_is_turned_by_the_workers_number(visible, gpus, by, turned):
    """Where CUDA sees fewer than the list names, the rest of that is not to be seen."""
    assert turn(visible, gpus, by) == turned


@given(st.lists(st.sampled_from(["A100", "T4"]), max_size=9), st.integers(0, 99))
def test_no_gpu_is_lost_and_each_place_has_a_gpu_of_the_same_name(gpus, by):
    turned = turn(None, gpus, by)
    if turned is not None:
        order = list(map(int, turned.split(",")))
        assert sorted(order) == list(range(len(gpus)))
        assert [gpus[i] for i in order] == gpus


@given(st.integers(2, 16))
def test_as_many_workers_as_gpus_have_all_of_them_first(count):
    firsts = {turn(None, ["T4"] * count, by).partition(",")[0] for by in range(count)}
    assert len(firsts) == count


def test_cuda_itself_is_asked_in_another_process():
    with opened("T4", 3):  # processes started meanwhile find three of them
        assert [bytes.fromhex(name).decode() for name in names(os.environ)] == ["Tesla T4"] * 3
    assert names({}) == []


def test_a_driver_that_does_not_answer_changes_nothing():
    for error in (subprocess.TimeoutExpired("x", 1), OSError()):
        with patch.object(xdist_order.subprocess, "run", side_effect=error):
            assert names(os.environ) == []


@pytest.mark.parametrize(
    ("worker", "imported", "given", "left"),
    [
        ("gw1", False, {}, {"CUDA_VISIBLE_DEVICES": "1,0"}),
        ("gw1", True, {}, {}),
        ("", False, {}, {}),
        ("gw1", False, {"CUDA_VISIBLE_DEVICES": "4,7"}, {"CUDA_VISIBLE_DEVICES": "7,4"}),
        ("gw1", False, {"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "4"}),
        ("gw1", False, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_only_a_worker_turns_and_only_before_torch_is_there(worker, imported, given, left):
    environment = dict(given)
    with (
        patch.object(xdist_order, "torch_is_imported", lambda: imported),
        patch.object(xdist_order, "names", lambda environment: FOUR[:2]),
    ):
        take_turns(worker, environment)
    assert environment == left


def test_the_virtual_gpu_takes_no_turns(monkeypatch):
    monkeypatch.setattr("pytest_gpumem.devices.select.take_turns", pytest.fail)
    with opened("T4"):
        assert choose("virtual", CARDS["T4"], worker="gw1").device is not None


def test_a_test_on_several_gpus_takes_its_turn_on_all(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with opened("T4", 3):
        device = CudaDevice(shared=True)
        for number in (2, 3, 1):
            device.open(None, number)
            with device.turn(None):
                (entry,) = json.loads((ledger_folder() / "ledger.json").read_text())
                assert len(entry["nbytes"]) == number
                assert (entry["state"], entry["alone"]) == ("running", True)


STEPS = """
import json, os, pytest, time, torch

@pytest.mark.gpu_memory(baseline=False, devices=1)
@pytest.mark.parametrize("n", range(4))
def test_one(n):
    note(1)

@pytest.mark.gpu_memory(baseline=False, devices=2)
@pytest.mark.parametrize("n", range(2))
def test_two(n):
    assert torch.cuda.device_count() == 3
    torch.empty(1 << 20, device="cuda:1")
    note(2)

def note(devices):
    started = time.monotonic()
    time.sleep(0.2)
    worker, visible = os.environ["PYTEST_XDIST_WORKER"], os.environ["CUDA_VISIBLE_DEVICES"]
    with open("spans", "a") as file:
        file.write(json.dumps([started, time.monotonic(), devices, worker, visible]) + "\\n")
"""


def test_workers_on_a_machine_of_three_gpus(suite, monkeypatch):
    """Virtual ones, which the workers find as they would real ones; these know no list, so that
    each worker's first is the same GPU, and the steps run one after the other."""
    pytest.importorskip("xdist")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TMPDIR", str(suite.path))
    with opened("T4", 3):
        session = suite.run_apart("--gpumem-device=cuda", "-n", "2", source=STEPS)
    assert session.outcomes == {"passed": 6}, session.out
    lines = (suite.path / "spans").read_text().splitlines()
    spans = sorted(map(json.loads, lines))
    assert {tuple(span[3:]) for span in spans} == {("gw0", "0,1,2"), ("gw1", "1,2,0")}
    assert [b for a, b in pairwise(spans) if b[0] < a[1]] == []


def test_the_process_that_asks_needs_nothing_but_python():
    """Isolated: no package of the user's, no ``sitecustomize``, takes part."""
    with patch.object(xdist_order.subprocess, "run") as run:
        run.return_value.stdout = b"54\n"
        assert names({}) == ["54"]
    (command,) = run.call_args.args
    assert command[:2] == [sys.executable, "-I"]
