"""A build of torch for AMD's ROCm, as far as its attributes show without such a GPU."""

from __future__ import annotations

import pytest

from pytest_gpumem.devices import select, torch_build
from pytest_gpumem.devices.driver import VisibleGpus
from pytest_gpumem.devices.torch_build import TorchBuild, installed_torch
from pytest_gpumem.devices.virtual import device as virtual
from pytest_gpumem.measurement import DeviceInfo
from pytest_gpumem.meter.allocator import provenance

HIP = TorchBuild("2.15.0+rocm7.2", None, "7.2.26015")


@pytest.fixture
def amd_machine(monkeypatch, tmp_path):
    """The driver's file of a machine with AMD's driver alone, and a build of torch for it."""
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(select, "visible_gpus", VisibleGpus)
    for module in (select, virtual):
        monkeypatch.setattr(module, "installed_torch", lambda: HIP)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "kfd"


def test_the_file_of_such_a_build_is_read(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.15.0+rocm7.2'\n"
        "cuda: Optional[str] = None\nhip: Optional[str] = '7.2.26015'\n"
    )
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(torch_build.importlib.util, "find_spec", lambda _name: spec)
    assert installed_torch() == HIP


def test_a_real_gpu_is_taken_where_amd_s_driver_is(amd_machine, monkeypatch):
    assert select.real_gpu_expected(amd_machine)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert not select.real_gpu_expected(amd_machine)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setattr(select, "installed_torch", lambda: TorchBuild("2.15.0", "13.2"))
    assert not select.real_gpu_expected(amd_machine)  # a CUDA build sees no AMD GPU


def test_a_process_with_an_inherited_virtual_gpu_expects_no_other_one(amd_machine, monkeypatch):
    """The session's HIP_VISIBLE_DEVICES may have hidden the others, and the process lacks it."""
    monkeypatch.setenv("GPUMEM_VIRTUAL", "2:13020:92000:00")
    assert not select.real_gpu_expected(amd_machine)


def test_the_virtual_gpu_says_that_it_is_one_of_nvidia_s(amd_machine):
    problem, remedy = virtual.obstacle()
    assert "is built for AMD's ROCm, and the virtual GPU is an NVIDIA GPU" in problem
    assert "run the tests on an AMD GPU" in remedy


def test_a_baseline_s_provenance_names_hip(torch, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2.26015")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = provenance(DeviceInfo("cuda", "MI300X", 0, (9, 4), 304))
    assert found.cuda == "HIP 7.2.26015"
    assert found.driver == "unknown"  # of amdgpu, which this machine has not
