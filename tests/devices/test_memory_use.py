"""What nvidia-smi shows: how full a device is, by whomever, while a step runs."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.virtual_gpu import GIB, MIB, virtual_card

from pytest_gpumem.devices import memory_use
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.memory_use import MemInfoWatch, NvmlWatch, watch_gpus
from pytest_gpumem.devices.virtual import native
from pytest_gpumem.devices.virtual.device import VirtualDevice
from pytest_gpumem.measurement import DeviceUse
from pytest_gpumem.meter.meter import Meter

CONTEXT = CARDS["L4"].context


@pytest.fixture
def gpu():
    with virtual_card("L4") as device:
        yield device


def outside(size):
    """Take memory that PyTorch knows nothing of; return what gives it back."""
    library = ctypes.CDLL(str(native.LIBRARY))
    address = ctypes.c_void_p()
    assert library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    return lambda: library.cudaFree(address)


def measured(device, info, step):
    meter = Meter(device, info, 1)
    meter.start()
    try:
        kept = step()  # noqa: F841 - until it is measured
        return meter.result()
    finally:
        meter.stop()


def empty(mib):
    import torch

    return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")


def spike(wait=lambda: None):
    import torch

    empty(300)
    wait()
    torch.cuda.empty_cache()
    return empty(20)


def test_the_virtual_gpu_knows_its_peak_with_the_context(gpu):
    (use,) = measured(gpu, gpu.open(CARDS["L4"], 1), spike).device_use
    assert use.peak == CONTEXT + 300 * MIB
    assert (use.besides, use.outside) == (CONTEXT, 0)
    assert (use.others, use.processes, use.every_ms) == (0, 0, 0)


def test_the_peak_of_an_earlier_step_is_not_this_ones(gpu):
    info = gpu.open(CARDS["L4"], 1)
    measured(gpu, info, spike)
    (use,) = measured(gpu, info, lambda: empty(20)).device_use
    assert use.peak == CONTEXT + 20 * MIB


def test_memory_outside_of_pytorchs_allocator_is_seen(gpu):
    given_back = []
    before = outside(6 * MIB)

    def step():
        given_back.append(outside(64 * MIB))
        return empty(20)

    measurement = measured(gpu, gpu.open(CARDS["L4"], 1), step)
    (use,) = measurement.device_use
    assert use.besides == CONTEXT + 6 * MIB
    assert use.outside == 64 * MIB
    assert use.peak == CONTEXT + 90 * MIB
    assert measurement.peak_reserved == 20 * MIB
    for give_back in (before, *given_back):
        give_back()


def test_the_virtual_gpu_needs_no_thread(gpu):
    meter = Meter(gpu, gpu.open(CARDS["L4"], 1), 1)
    before = threading.active_count()
    meter.start()
    assert threading.active_count() == before
    meter.stop()


# -- a real GPU: the virtual one stands in for it --


def test_nvml_is_asked_all_the_while_by_a_thread_that_ends(gpu, monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    ask, calls = pynvml.nvmlDeviceGetMemoryInfo, []
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: calls.append(handle) or ask(handle)
    )

    def wait():
        enough = len(calls) + 2
        while len(calls) < enough:
            time.sleep(0.001)

    device = CudaDevice()
    before = threading.active_count()
    (use,) = measured(device, device.open(None, 1), lambda: spike(wait)).device_use
    assert use == DeviceUse(
        peak=CONTEXT + 300 * MIB,
        besides=CONTEXT,
        outside=0,
        source="NVML",
        every_ms=10,
    )
    assert threading.active_count() == before


@pytest.fixture
def without_nvml(monkeypatch):
    monkeypatch.setattr(memory_use, "import_nvml", lambda: None)


def test_without_nvml_cudas_figure_is_read_at_the_ends(gpu, without_nvml):
    device = CudaDevice()
    measurement = measured(device, device.open(None, 1), lambda: empty(20))
    (use,) = measurement.device_use
    assert use.peak == CONTEXT + 20 * MIB
    assert use.source.startswith("cudaMemGetInfo")
    assert use.every_ms == 0
    assert measurement.notes == ()


def test_without_nvml_much_memory_of_others_is_said_to_be_somebodys(gpu, without_nvml):
    device = CudaDevice()
    give_back = outside(2 * GIB)
    (note,) = measured(device, device.open(None, 1), lambda: empty(20)).note_texts
    give_back()
    assert "of NVIDIA L4 were in use outside PyTorch's allocator when the step began" in note
    assert "pip install 'pytest-gpumem[nvml]'" in note


class Nvml(SimpleNamespace):
    """In place of pynvml."""

    NVMLError = type("NVMLError", (Exception,), {})
    used = 3 * GIB
    open = 0

    def nvmlInit(self):  # noqa: N802 - NVML's
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802 - NVML's
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802 - NVML's
        assert uuid.startswith("GPU-")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802 - NVML's
        return SimpleNamespace(used=self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802 - NVML's
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes]


ME = os.getpid()


@pytest.mark.parametrize(
    ("processes", "note"),
    [
        ([(ME, 500 * MIB)], ""),
        ([], ""),
        ([(ME, 5 * MIB), (7, 2 * GIB)], "another process uses 2048.00 MiB of it"),
        ([(ME, 5 * MIB), (7, GIB), (8, GIB)], "other processes use 2048.00 MiB of it"),
        ([(ME, None), (7, None)], "another process uses memory of it"),
        # in a container this process has another number: the nearest in size is taken for it
        ([(4711, 30 * MIB)], ""),
        ([(4711, 30 * MIB), (7, 3 * GIB)], "another process uses 3072.00 MiB of it"),
    ],
)
def test_a_device_that_others_use_is_said_to_be_shared(gpu, monkeypatch, processes, note):
    nvml = Nvml(processes=processes)
    monkeypatch.setattr(memory_use, "import_nvml", lambda: nvml)
    device = CudaDevice()
    measurement = measured(device, device.open(None, 1), lambda: empty(20))
    assert measurement.note_texts == ((f"NVIDIA L4 is shared: {note}",) if note else ())
    assert measurement.device_use[0].peak == 3 * GIB
    assert nvml.open == 0


def test_a_neighbour_s_growth_is_not_this_process_s(gpu, monkeypatch):
    nvml = Nvml(processes=[(ME, 500 * MIB), (7, GIB)])
    monkeypatch.setattr(memory_use, "import_nvml", lambda: nvml)

    def grow(own, others):
        nvml.used = 3 * GIB + own + others
        nvml.processes = [(ME, 500 * MIB + own), (7, GIB + others)]

    device = CudaDevice()
    info = device.open(None, 1)
    assert measured(device, info, lambda: grow(0, GIB)).device_use[0].outside == 0
    grow(0, 0)
    assert measured(device, info, lambda: grow(30 * MIB, GIB)).device_use[0].outside == 30 * MIB


def fail(*_):
    raise Nvml.NVMLError


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_nvml_that_does_not_know_the_gpu_is_done_without(gpu, monkeypatch, name):
    nvml = Nvml(processes=[])
    setattr(nvml, name, fail)
    monkeypatch.setattr(memory_use, "import_nvml", lambda: nvml)
    assert isinstance(watch_gpus(range(1)), MemInfoWatch)
    assert nvml.open == 0


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"]
)
def test_nvml_that_fails_in_the_midst_costs_its_figures_alone(gpu, monkeypatch, name):
    nvml = Nvml(processes=[(7, GIB)])
    setattr(nvml, name, fail)
    watch = NvmlWatch(nvml, {0: "a"}, range(1))
    watch.start([0])
    (use,) = watch.result([0])
    watch.stop()
    assert (use.peak == 0) == (name == "nvmlDeviceGetMemoryInfo")


# -- in reports --

SOURCE = "@pytest.mark.gpu_memory\ndef test_it(): mib(20)"


def test_the_json_report_has_it(suite):
    suite.run("--gpumem-json=r.json", source=SOURCE)
    (result,) = json.loads((suite.path / "r.json").read_text())["results"]
    (use,) = result["measurement"]["device_use"]
    assert use["peak"] == CARDS["H100"].context + 20 * MIB
    assert (use["outside"], use["source"]) == (0, "the virtual GPU's account")


def test_a_note_says_of_any_run_that_the_device_is_shared(suite, monkeypatch):
    nvml = Nvml(processes=[(7, 3 * GIB), (ME, 1)])
    monkeypatch.setattr(
        VirtualDevice, "watch", lambda self, devices: NvmlWatch(nvml, {0: 1}, devices)
    )
    session = suite.run(source=SOURCE)
    assert "note: H100 is shared: another process uses 3072.00 MiB of it (1 test)" in session.flat


def test_it_is_no_part_of_a_baseline(suite):
    suite.run("--gpumem-update-baselines", source=SOURCE)
    assert "device_use" not in str(suite.baselines())


def test_memory_beside_the_allocator_that_is_freed_again_is_seen(gpu):
    """At least the device's peak less PyTorch's own, which may be of another moment."""

    def step():
        outside(64 * MIB)()
        return empty(20)

    measurement = measured(gpu, gpu.open(CARDS["L4"], 1), step)
    assert measurement.device_use[0].outside == (64 - 20) * MIB
    assert any("at least 44.00 MiB of L4's memory" in note for note in measurement.note_texts)


def test_tensors_alone_are_nothing_beside_the_allocator(gpu):
    def step():
        import torch

        empty(300)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        return empty(20)

    measurement = measured(gpu, gpu.open(CARDS["L4"], 1), step)
    assert measurement.device_use[0].outside == 0
    assert not any("beside" in note for note in measurement.note_texts)


OUTSIDE = """
import ctypes

def outside(size):
    address = ctypes.c_void_p()
    runtime = ctypes.CDLL(None)
    assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    assert runtime.cudaFree(address) == 0

@pytest.mark.gpu_memory(max_gib=1)
def test_too_much():
    outside(5 << 30)

@pytest.mark.gpu_memory(max_gib=6)
def test_fits():
    outside(5 << 30)
"""


def test_memory_beside_the_allocator_belongs_to_the_tests_limit(suite):
    session = suite.run("-v", source=OUTSIDE)
    assert session.outcomes == {"passed": 1, "failed": 1}, session.out
    assert session.verdicts()["test_too_much"] == "over budget"
    assert "5120.00 MiB in use, 5120.00 MiB of it outside PyTorch's allocator" in session.flat
    assert "at least 5120.00 MiB of H100's memory were allocated outside" in session.flat


def test_memory_of_an_earlier_test_that_this_one_frees_is_not_outside_of_pytorch(suite):
    session = suite.run(
        source="""
        kept = []
        @pytest.mark.gpu_memory(baseline=False)
        def test_keeps(): kept.append(mib(300))
        @pytest.mark.gpu_memory(baseline=False)
        def test_frees():
            kept.clear()
            torch.cuda.empty_cache()
            kept.append(mib(30))
        """
    )
    assert session.outcomes == {"passed": 2}
    assert "outside PyTorch's allocator" not in session.flat
