"""Tests of several processes on one GPU, several at a time where their baselines fit together."""

from __future__ import annotations

import json
from functools import partial

import pytest
from helpers.virtual_gpu import virtual_card

from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.sharing.gpu_ledger import ledger_folder

PACKED = "--gpumem-packing=baselines"

SOURCE = """
import json, os, tempfile
from pytest_gpumem.devices.sharing.gpu_ledger import ledger_folder

LARGE = 2000 if "GROWN" in os.environ else 100

def note(name):
    entries = json.loads((ledger_folder() / "ledger.json").read_text())
    (entry,) = (entry for entry in entries if entry["state"] == "running")
    with open("turns", "a") as file:
        file.write(f"{name} {'alone' if entry['alone'] else 'beside'}\\n")

@pytest.fixture
def memory():
    return mib(LARGE)

pytestmark = pytest.mark.gpu_memory

def test_same():
    mib(100)
    note("same")

def test_grown():
    note("grown")
    mib(LARGE)

def test_set_up(memory):
    note("set_up")

def test_catches():
    note("catches")
    try:
        mib(LARGE)
    except torch.OutOfMemoryError:
        pytest.skip("no room")

def test_searches(gpu_memory):
    note("searches")
    mib(1)
    try:
        largest = gpu_memory.largest(lambda n: mib(1024 * n))
    except Exception:
        largest = None
    assert largest.value == 14

def test_cublas():
    note("cublas")
    if "GROWN" in os.environ and not os.path.exists("failed"):
        open("failed", "w").close()
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    mib(100)
"""
NEW = """
def test_new():
    note("new")
    mib(1)

def test_wrong():
    note("wrong")
    assert mib(1) is None
"""


@pytest.fixture
def shared_gpu(suite, monkeypatch, tmp_path_factory):
    """A real GPU that other processes use too, as far as this session knows."""
    folder = tmp_path_factory.mktemp("shared")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    device = partial(CudaDevice, first=0)
    monkeypatch.setattr(
        "pytest_gpumem.devices.select.CudaDevice", lambda **_arguments: device(shared=True)
    )
    with virtual_card(
        "T4"
    ) as virtual:  # whose total of memory is what this process's PyTorch keeps
        monkeypatch.setattr(CudaDevice, "cap_total", lambda _gpu, index: virtual.cap_total(index))
        yield partial(suite.run, "--gpumem-device=cuda")


def test_a_test_that_others_may_have_disturbed_runs_once_more_alone(suite, shared_gpu, monkeypatch):
    """By its baseline a test may take so much; where it lacks more, its own verdict is that of a
    run alone: no neighbour's memory is told as the test's."""

    def turns():
        path = suite.path / "turns"
        lines = path.read_text().splitlines()
        path.unlink()
        return lines

    names = ("same", "grown", "set_up", "catches", "searches", "cublas")
    session = shared_gpu("--gpumem-update-baselines", PACKED, source=SOURCE)
    assert session.outcomes == {"passed": 6}, session.out
    assert [line for line in turns() if "beside" in line] == []  # without a baseline
    session = shared_gpu(source=SOURCE)
    assert session.outcomes == {"passed": 6}
    assert turns() == [f"{name} alone" for name in names]  # without the option

    monkeypatch.setenv("GROWN", "1")
    suite.write("pytest.ini", "[pytest]\ngpumem_packing = baselines")
    session = shared_gpu("-v", "--gpumem-attribution=off", source=SOURCE + NEW)
    assert session.outcomes == {"passed": 4, "failed": 4}, session.out
    assert turns() == [
        "same beside",
        *("grown beside", "grown alone"),
        "set_up alone",
        *("catches beside", "catches alone"),
        *("searches beside", "searches alone"),
        *("cublas beside", "cublas alone"),
        "new alone",
        "wrong alone",
    ]
    regressed = "2000.00 2000.00 +1900.00 (+1900.0%) regressed"
    for name in ("grown", "set_up", "catches"):
        assert f"test_{name} {regressed}" in session.flat, session.out
    assert "emptied its cache" not in session.out  # as the runs beside others had to
    assert session.flat.count("the test ran a second time, alone") == 4
    entries = json.loads((ledger_folder() / "ledger.json").read_text())
    assert {entry["state"] for entry in entries} == {"idle"}


TOGETHER = """
import os, time

def meet(name):
    open(name, "w").close()
    if "MEET" in os.environ:
        while not (os.path.exists("first") and os.path.exists("second")):
            time.sleep(0.01)

@pytest.mark.gpu_memory
def test_first():
    mib(100)
    meet("first")

@pytest.mark.gpu_memory
def test_second():
    mib(100)
    meet("second")
"""


def test_two_workers_run_their_tests_side_by_side(suite, monkeypatch):
    """Each waits for the other one, which would wait for its turn for ever without packing."""
    pytest.importorskip("xdist")
    monkeypatch.setenv("TMPDIR", str(suite.path))
    with virtual_card("T4"):
        assert (
            suite.run("--gpumem-device=cuda", "--gpumem-update-baselines", source=TOGETHER).ret == 0
        )
        for name in ("first", "second"):
            (suite.path / name).unlink()
        monkeypatch.setenv("MEET", "1")
        session = suite.run_apart("--gpumem-device=cuda", PACKED, "-n", "2")
    assert session.outcomes == {"passed": 2}, session.out
