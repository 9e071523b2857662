"""The device of real GPUs: the code that measures takes the virtual one for it, to the byte."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.virtual_gpu import GIB, MIB, virtual_card, virtual_device

from pytest_gpumem.devices import driver
from pytest_gpumem.devices.base import Alternatives
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.memory_cap import CAPS, SET_FRACTION, set_memory
from pytest_gpumem.devices.select import choose
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.meter.meter import Meter


@pytest.fixture
def gpu():
    """A machine that shows one GPU, as far as torch can tell."""
    with virtual_card("A100-40GB") as device:
        yield device


def measured(device, info, limit=None):
    """Run two training steps; return the measurement."""
    import torch

    meter = Meter(device, info, 1)
    meter.start()
    meter.room.cap(limit)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(700, 300), torch.nn.Linear(300, 10)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(50, 700, device="cuda")).square().mean().backward()
            optimizer.step()
        return meter.result()
    finally:
        meter.stop()


def test_it_finds_what_torch_says_of_the_gpu(gpu):
    info = CudaDevice().open(None, 1)
    card = CARDS["A100-40GB"]
    assert (info.kind, info.name) == ("cuda", card.device_name)
    assert (info.total_memory, info.capability) == (card.total_memory, card.capability)
    assert info.sm_count == card.sm_count
    assert info.key == "cuda-NVIDIA-A100-SXM4-40GB"
    assert replace(info, kind="../x").key == "x-NVIDIA-A100-SXM4-40GB"  # a folder's name


def test_it_measures_the_same_bytes_as_the_virtual_device_does(gpu):
    one = measured(gpu, gpu.open(CARDS["A100-40GB"], 1))
    device = CudaDevice()
    other = measured(device, device.open(None, 1))
    assert one.peaks == other.peaks
    assert one.peaks[0].allocated > 0
    assert (one.held, one.retained, one.segments) == (other.held, other.retained, other.segments)
    assert (one.device.kind, other.device.kind) == ("virtual", "cuda")


def test_its_cap_is_a_fraction_of_the_total_that_it_asks_for(gpu):
    """On a real GPU both are one; on this virtual one PyTorch may have kept its first total."""
    CudaDevice().open(None, 1)
    assert CAPS.cap(0).total == CARDS["A100-40GB"].total_memory


def test_a_named_card_must_have_no_more_than_the_gpu(gpu):
    device = CudaDevice()
    assert device.open(CARDS["T4"], 1).name == CARDS["A100-40GB"].device_name
    with pytest.raises(DeviceError, match="card 'H100'.*larger GPU"):
        device.open(CARDS["H100"], 1)


def test_a_fraction_that_a_test_sets_is_of_the_named_card_s_memory(gpu, monkeypatch):
    import torch

    device, fractions = CudaDevice(), []
    device.open(CARDS["T4"], 1)
    monkeypatch.setitem(CAPS._real, SET_FRACTION, lambda value, _: fractions.append(value))
    total, card = CARDS["A100-40GB"].total_memory, CARDS["T4"].total_memory
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert int(fractions[-1] * total) == card // 2
    device.open(None, 1)
    assert int(fractions[-1] * total) == total // 2
    monkeypatch.undo()
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_more_gpus_than_there_are_cannot_be_had(gpu):
    with pytest.raises(DeviceError, match="devices=2: this machine shows 1 GPU;"):
        CudaDevice().open(None, 2)


def test_a_ranks_gpu_is_the_one_of_its_number():
    import torch

    with virtual_card("A100-40GB", count=2):
        device = CudaDevice(first=1)
        info = device.open(None, 1)
        assert torch.cuda.current_device() == 1
        alone = measured(CudaDevice(), CudaDevice().open(None, 1))
        device.open(None, 1)
        elsewhere = torch.empty(5 << 20, device="cuda:0")
        assert measured(device, info).peaks == alone.peaks
        del elsewhere
        with pytest.raises(DeviceError, match="LOCAL_RANK=2: this machine shows 2 GPUs"):
            CudaDevice(first=2).open(None, 1)
        torch.cuda.set_device(0)


def test_all_that_it_chooses_is_in_its_figures():
    assert CudaDevice().alternatives() == Alternatives()
    assert not any(Alternatives())


def test_without_a_gpu_it_says_what_to_do():
    virtual_device()
    with pytest.raises(DeviceError, match="sees no GPU here; .*--gpumem-device=virtual"):
        CudaDevice().open(None, 1)


def test_it_stays_visible_and_cannot_grow(gpu):
    import torch

    device = CudaDevice()
    device.open(None, 1)
    device.make_room([GIB])
    device.close()
    assert torch.cuda.is_available()
    assert torch.cuda.mem_get_info()[1] == CARDS["A100-40GB"].total_memory
    assert device.trouble() is None
    assert device.notes(Path()) == []


def test_the_drivers_version_is_told_by_its_library_and_amd_s_by_the_kernel(
    torch, monkeypatch, tmp_path
):
    monkeypatch.setattr(driver, "nvidia_version", lambda: "580.159.03")
    assert driver.version("cuda") == "580.159.03"
    monkeypatch.setattr(torch.version, "hip", "7.2.26015")
    version = tmp_path / "version"
    monkeypatch.setattr(driver, "Path", lambda name: version)
    assert driver.version("cuda") == "unknown"
    version.write_text("6.12.12\n")
    assert driver.version("cuda") == "6.12.12"


def test_before_its_first_use_it_is_asked_for_by_nvml_and_opened_once(gpu, monkeypatch):
    """A question to CUDA's driver would keep forked processes from using it."""
    import torch

    device, begun = CudaDevice(), []

    def begin():
        device.open(None, 1)
        begun.append(torch.cuda.is_initialized())

    with pytest.raises(DeviceError, match="devices=3: this machine shows 1 GPU; request fewer"):
        device.await_use(3, begin)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(DeviceError, match="sees no GPU here"):
            device.await_use(1, begin)
        patched.setattr(torch.cuda, "device_count", lambda: 1)
        patched.setattr(torch.cuda, "is_available", None)
        device.await_use(1, begin)
    assert begun == []
    assert device.open(None, 1).name == CARDS["A100-40GB"].device_name
    assert begun == [True]
    device.open(None, 1)
    assert begun == [True]


def test_alone_it_takes_no_turns(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for shared, folders in ((False, []), (True, [f"pytest-gpumem-{os.getuid()}"])):
        device = CudaDevice(shared=shared)
        device.open(None, 1)
        assert [path.name for path in tmp_path.iterdir()] == folders
        device.close()


def test_the_allocators_cache_is_free_for_other_processes_after_a_turn(gpu, monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    device = CudaDevice(shared=True)
    device.open(None, 1)
    torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 60 * MIB
    device.close()
    assert torch.cuda.memory_reserved() == 0


def test_a_card_smaller_than_the_gpu_is_kept_to_by_the_cap(gpu):
    import torch

    card = replace(CARDS["T4"], context=0)
    device, kept_total = CudaDevice(), CAPS.cap(0).total  # which this process's PyTorch kept
    info = device.open(card, 1)
    set_memory(0, card.total_memory, kept_total)
    meter = Meter(device, info, 1)
    meter.start()
    meter.room.cap(card.usable_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(card.usable_memory + 1, dtype=torch.uint8, device="cuda")
    finally:
        meter.stop()


def test_it_is_taken_where_it_is_named_or_a_driver_lies(monkeypatch):
    card = CARDS["T4"]
    named = choose("cuda", card)
    assert isinstance(named.device, CudaDevice)
    assert (named.demanded, named.card) == (True, None)
    monkeypatch.setattr("pytest_gpumem.devices.select.real_gpu_expected", lambda: True)
    assert isinstance(choose("auto", card).device, CudaDevice)
    assert choose("none", card).device is None
    assert "none" in choose("none", card).reason
