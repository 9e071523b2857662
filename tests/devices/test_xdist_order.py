"""Each of pytest-xdist's workers has another GPU first, and all GPUs that there are."""

# ruff: noqa: N802, N818 - the names of NVML's functions

import json
from contextlib import nullcontext
from itertools import pairwise
from unittest.mock import patch

import pytest
from helpers.virtual_gpu import virtual_card
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.devices import cuda, memory_use, xdist_order
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.driver import VisibleGpus
from pytest_gpumem.devices.memory_use import watch_gpus
from pytest_gpumem.devices.select import choose
from pytest_gpumem.devices.xdist_order import mig_instances, take_turns, turn

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


@pytest.mark.parametrize(
    ("workers", "firsts"),
    [(2, "04"), (3, "025"), (4, "0246"), (7, "0123456"), (8, "01234567"), (9, "012345670")],
)
def test_fewer_workers_than_gpus_are_spread(workers, firsts):
    """So that their tests of several GPUs run side by side."""
    orders = [turn(None, ["T4"] * 8, number, workers).split(",") for number in range(workers)]
    assert "".join(order[0] for order in orders) == firsts
    assert all(sorted(order) == list("01234567") for order in orders)
    environment = {"PYTEST_XDIST_WORKER_COUNT": "2"}
    with (
        patch.object(xdist_order, "torch_is_imported", lambda: False),
        patch.object(xdist_order, "visible_gpus", lambda _: VisibleGpus(True, ("T4",) * 8)),
        patch.object(xdist_order, "import_nvml", lambda: None),
    ):
        take_turns("gw1", environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7,0,1,2,3"


class Nvml:
    """The functions of nvidia-ml-py that list MIG instances: of each GPU a list of (name, UUID)."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):  # noqa: N801 - as there
        pass

    def __init__(self, *gpus):
        self.gpus = gpus
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        found = [it for gpu in self.gpus for it in gpu or () if it and it[1] == uuid]
        if not found:
            raise self.NVMLError_NotFound
        return found[0]

    def nvmlDeviceGetMigMode(self, gpu):
        if gpu is None:
            raise self.NVMLError  # a GPU that knows no MIG
        return int(bool(gpu)), 0

    def nvmlDeviceGetMaxMigDeviceCount(self, _gpu):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, place):
        if place >= len(gpu) or gpu[place] is None:
            raise self.NVMLError_NotFound
        return gpu[place]

    def nvmlDeviceGetName(self, instance):
        return instance[0]

    def nvmlDeviceGetUUID(self, instance):
        return instance[1]


SMALL, LARGE = "NVIDIA A100 MIG 1g.5gb", "NVIDIA A100 MIG 3g.20gb"
DIVIDED = ((SMALL, "MIG-a"), None, (LARGE, "MIG-b"), (SMALL, "MIG-c"))


@pytest.mark.parametrize(
    ("gpus", "visible", "instances"),
    [
        ([DIVIDED, ((SMALL, "MIG-d"),)], None, ["MIG-a", "MIG-c", "MIG-d"]),
        ([DIVIDED], "MIG-c, MIG-b,MIG-a", ["MIG-c", "MIG-a"]),
        ([DIVIDED], "MIG-c,MIG-gone", []),
        ([DIVIDED], "0,1", []),
        ([DIVIDED, ()], None, []),  # one of the GPUs is whole
        ([None], None, []),
        ([], None, []),
    ],
)
def test_each_worker_gets_a_mig_instance_of_its_own(monkeypatch, gpus, visible, instances):
    """CUDA shows a process the first of its list alone; baselines are of an instance's name."""
    nvml = Nvml(*gpus)
    monkeypatch.setattr(xdist_order, "import_nvml", lambda: nvml)
    monkeypatch.setattr(xdist_order, "torch_is_imported", lambda: False)
    monkeypatch.setattr(xdist_order, "visible_gpus", lambda _: VisibleGpus(True, ("A100",)))
    assert mig_instances(visible) == instances
    given_ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    for number in range(5):
        environment = dict(given_)
        take_turns(f"gw{number}", environment)
        own = instances[number % len(instances)] if instances else visible
        assert environment.get("CUDA_VISIBLE_DEVICES") == own
    assert nvml.open == 0


def test_without_nvml_a_list_of_mig_instances_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(xdist_order, "import_nvml", lambda: None)
    assert mig_instances("MIG-a,MIG-b") == []


def test_mig_instances_of_one_gpu_are_devices_of_their_own(monkeypatch):
    """For the locks, and for NVML, whichever UUID CUDA tells of them."""
    locks = []
    monkeypatch.setattr(cuda, "locked", lambda gpus: locks.append(gpus) or nullcontext())
    asked = []
    nvml = Nvml(DIVIDED)
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByUUID", asked.append)
    monkeypatch.setattr(memory_use, "import_nvml", lambda: nvml)
    with virtual_card("T4"):
        device = CudaDevice(shared=True)
        for name in ("MIG-a", "MIG-c"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
            device.open(None, 1)
            assert locks.pop() == [name]
            watch_gpus(range(1))
    assert asked == ["MIG-a", "MIG-c"]


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
        patch.object(xdist_order, "visible_gpus", lambda environment: VisibleGpus(True, FOUR[:2])),
    ):
        take_turns(worker, environment)
    assert environment == left


def test_the_virtual_gpu_takes_no_turns(monkeypatch):
    monkeypatch.setattr("pytest_gpumem.devices.select.take_turns", pytest.fail)
    with virtual_card("T4") as device:
        monkeypatch.setattr(device, "card", device.card)  # choose() sets it, for the whole process
        choice = choose("virtual", CARDS["T4"], worker="gw1")
        assert (choice.device, choice.card) == (device, CARDS["T4"])


def test_a_test_on_several_gpus_takes_its_turn_on_all(monkeypatch):
    locks = []
    monkeypatch.setattr(cuda, "locked", lambda gpus: locks.append(set(gpus)) or nullcontext())
    with virtual_card("T4", 3):
        device = CudaDevice(shared=True)
        for number in (2, 3, 1):
            device.open(None, number)
            assert len(locks.pop()) == number


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
    with virtual_card("T4", 3):
        session = suite.run_apart("--gpumem-device=cuda", "-n", "2", source=STEPS)
    assert session.outcomes == {"passed": 6}, session.out
    lines = (suite.path / "spans").read_text().splitlines()
    spans = sorted(map(json.loads, lines))
    assert {tuple(span[3:]) for span in spans} == {("gw0", "0,1,2"), ("gw1", "1,2,0")}
    assert [b for a, b in pairwise(spans) if b[0] < a[1]] == []
