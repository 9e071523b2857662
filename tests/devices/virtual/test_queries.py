"""What a program asks a GPU besides computing: its state, its peers, its profiler."""

import importlib.util
import json

import pytest
from helpers.virtual_gpu import CARD_80GIB, MIB, virtual_card
from helpers.warm import HANGS

MAX_DEVICES = 16
C = "cuda"


@pytest.fixture
def device():
    with virtual_card(CARD_80GIB, count=MAX_DEVICES) as device:
        yield device
        assert device.trouble() is None


needs_pynvml = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed"
)


def test_every_devices_memory_is_its_own(device):
    import torch

    kept = [
        torch.empty((1 + i) * 2 * MIB, dtype=torch.uint8, device=f"cuda:{i}")
        for i in range(MAX_DEVICES)
    ]
    for index, tensor in enumerate(kept):
        free, total = torch.cuda.mem_get_info(index)
        assert total == CARD_80GIB.total_memory
        assert total - free == torch.cuda.memory_reserved(index) >= tensor.numel()
        assert torch.cuda.memory_allocated(index) == tensor.numel()


def test_every_device_is_the_card(device):
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(MAX_DEVICES)]
    assert {p.total_memory for p in found} == {CARD_80GIB.total_memory}
    assert {p.multi_processor_count for p in found} == {CARD_80GIB.sm_count}
    assert len({str(p.uuid) for p in found}) == MAX_DEVICES
    assert {torch.cuda.get_device_capability(i) for i in range(MAX_DEVICES)} == {(9, 0)}
    assert {torch.cuda.get_device_name(i) for i in range(MAX_DEVICES)} == {CARD_80GIB.device_name}
    assert torch.cuda.is_bf16_supported()
    assert all(arch.startswith(("sm_", "compute_")) for arch in torch.cuda.get_arch_list())
    assert "-gencode compute=" in torch.cuda.get_gencode_flags()
    assert torch.cuda.current_blas_handle() != 0
    assert not torch.cuda.is_current_stream_capturing()


def test_every_device_reaches_every_other(device):
    import torch

    pairs = [(i, j) for i in range(MAX_DEVICES) for j in range(MAX_DEVICES)]
    assert all(torch.cuda.can_device_access_peer(i, j) == (i != j) for i, j in pairs)
    tensors = [torch.zeros(100, device=f"cuda:{i}") for i in range(MAX_DEVICES)]
    for i, j in pairs:
        assert tensors[i].to(f"cuda:{j}").device.index == j
        tensors[j].copy_(tensors[i])


@needs_pynvml
@pytest.mark.parametrize("index", [0, MAX_DEVICES - 1])
def test_nvml_tells_of_a_device_that_nothing_runs_on(device, index):
    import torch

    with torch.cuda.device(index):
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device=C)
        assert torch.cuda.utilization() == torch.cuda.memory_usage() == 0
        assert torch.cuda.temperature() == torch.cuda.power_draw() == 0
        assert torch.cuda.clock_rate() == 1500  # MHz, as the device's properties have it
        assert torch.cuda.device_memory_used() == kept.numel()
        assert "no processes are running" in torch.cuda.list_gpu_processes()


@needs_pynvml
def test_nvml_and_cuda_name_devices_alike(device):
    import pynvml
    import torch

    pynvml.nvmlInit()
    for index in (0, MAX_DEVICES - 1):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        assert pynvml.nvmlDeviceGetUUID(handle) == f"GPU-{uuid}"
        assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == (9, 0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        assert memory.total == CARD_80GIB.total_memory
        assert memory.free + memory.used == memory.total


def work(torch):
    model = torch.nn.Linear(100, 100).cuda()
    model(torch.randn(10, 100, device=C)).sum().backward()
    torch.cuda.synchronize()


@pytest.mark.filterwarnings("ignore")
def test_a_profiler_of_cuda_sees_operators_and_memory_and_no_kernels(device, tmp_path):
    import torch

    kinds = torch.profiler.ProfilerActivity
    options = {"profile_memory": True, "record_shapes": True}
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], **options) as profiler:
        for _ in range(3):
            work(torch)
            profiler.step()
    events = profiler.key_averages()
    names = {event.key for event in events}
    assert {"aten::linear", "aten::sum"} <= names
    assert any(event.self_device_memory_usage > 0 for event in events)
    assert all(event.device_time_total == 0 for event in events)
    # PyTorch makes a tree of Python's calls for averages, by recursion: in a process that has run
    # many tests it was too deep. A trace needs no tree.
    options["with_stack"] = True
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], **options) as profiler:
        work(torch)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert "kernel" not in {event.get("cat") for event in trace["traceEvents"]}


@pytest.mark.filterwarnings("ignore")
def test_a_profilers_schedule_and_the_older_profiler(device):
    import torch

    seen = []
    plan = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with torch.profiler.profile(schedule=plan, on_trace_ready=seen.append) as profiler:
        for _ in range(5):
            work(torch)
            profiler.step()
    assert len(seen) == 1
    with torch.autograd.profiler.profile(use_device=C) as older:
        work(torch)
    assert len(older.function_events) > 0


def test_profilers_of_other_programs_can_be_told_things(device):
    import torch

    torch.cuda.profiler.start()
    with torch.cuda.nvtx.range("a step"), torch.autograd.profiler.emit_nvtx():
        torch.cuda.nvtx.mark("now")
        work(torch)
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("outside"))
    torch.cuda.profiler.stop()


def test_events_measure_time(device):
    import time

    import torch

    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    time.sleep(0.01)
    second.record()
    second.synchronize()
    assert 10 <= first.elapsed_time(second) < HANGS * 1000  # milliseconds


def test_the_allocators_history_names_python_lines(device):
    import torch

    torch.cuda.memory._record_memory_history()
    kept = torch.empty(3 * MIB, dtype=torch.uint8, device=C)
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    [mine] = [block for block in blocks if block["requested_size"] == kept.numel()]
    assert any(frame["filename"] == __file__ for frame in mine["frames"])


def test_a_memory_pool_of_ones_own(device):
    import torch

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(20 * MIB, dtype=torch.uint8, device=C)
    assert sum(segment["total_size"] for segment in pool.snapshot()) == kept.numel()
    del kept


def test_tuning_of_matrix_products(device, tmp_path):
    """TunableOp tries cuBLASLt's algorithms: here there is one."""
    import torch

    torch.cuda.tunable.enable(True)
    torch.cuda.tunable.set_filename(str(tmp_path / "tuned.csv"))  # not in the current folder
    try:
        one = torch.zeros(64, 64, device=C)
        assert (one @ one).shape == (64, 64)
    finally:
        torch.cuda.tunable.enable(False)
