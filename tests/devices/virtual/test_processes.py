"""What needs a process of its own: allocator settings and child processes."""

import subprocess
import uuid

import pytest
from helpers.semaphores import need_semaphores
from helpers.virtual_gpu import child, run_python
from helpers.warm import HANGS, warm_python

from pytest_gpumem.devices.cards import CARDS

SHOW = """
import torch

def tensor(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

def show():
    print(torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20)
"""


def parts(program, **more):
    """Run a program whose parts print their names behind dashes; return each one's lines."""
    sections = child(SHOW + program, **more).split("-- ")[1:]
    return {section.partition("\n")[0]: section.splitlines()[1:] for section in sections}


@pytest.fixture(scope="module")
def expandable():
    """The lines of each part of a program with expandable segments."""
    return parts(
        """
from pytest_gpumem.devices.virtual.device import VirtualDevice
from pytest_gpumem.meter.meter import Meter

print("-- segments")
device = VirtualDevice.loaded()
account = device.library.account
one = tensor(30); show()
two = tensor(50); show()
del one; show()
three = tensor(25); show()
print(account(0).charged >> 20)
del two, three; torch.cuda.empty_cache(); show()
print(account(0).charged >> 20)
segments = torch.cuda.memory_snapshot()
try:
    tensor(200 << 10)
except torch.OutOfMemoryError:
    print("out of memory")
four = tensor(70 << 10); print(torch.cuda.memory_reserved() >> 30)
del four; torch.cuda.empty_cache()

print("-- rooms")
MIB = 1 << 20

def bytes_of(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

def figures():
    meter = Meter(device, device.open(device.card, 1), 1)
    meter.start()
    sizes = (700, 12 * MIB, 5 * MIB, 600_000, 88 * MIB, 30 * MIB)
    held = [bytes_of(size) for size in sizes]
    peak = meter.result().peaks[0]
    meter.stop()
    return peak

print(figures())
left = [bytes_of(8 * MIB), bytes_of(300)]
print(figures())

print("-- sharing")
try:
    torch.zeros(5, device="cuda").untyped_storage()._share_cuda_()
except RuntimeError:
    print(device.trouble())
""",
        warm=True,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )


def test_expandable_segments_grow_and_shrink_in_units_of_their_own(expandable):
    """20 MiB for large requests; cuMemCreate is charged as cudaMalloc is."""
    lines = expandable["segments"]
    assert lines[0] == "30 40"
    assert lines[1] == "80 80"
    assert lines[2] == "50 80"
    assert lines[3] == "75 80"
    assert lines[4] == "80"
    assert lines[5:7] == ["0 0", "0"]
    assert lines[7:] == ["out of memory", "70"]


def test_rooms_in_expandable_segments_are_filled_as_well(expandable):
    alone, beside = expandable["rooms"]
    assert alone == beside
    assert "Peak(" in alone


def test_sharing_an_expandable_segment_is_refused_by_name(expandable):
    (trouble,) = expandable["sharing"]
    assert "does not support cuMemExportToShareableHandle" in trouble


def test_other_settings_of_the_allocator_are_pytorchs_own():
    """Sizes rounded to eighths of powers of two (400 to 416); over 100 MiB blocks never split."""
    text = child(
        SHOW
        + """
one = tensor(33); show()
del one; torch.cuda.empty_cache()
big = tensor(400); del big
small = tensor(30); show()
""",
        warm=True,
        PYTORCH_CUDA_ALLOC_CONF="roundup_power2_divisions:8,max_split_size_mb:100",
    )
    assert text.splitlines() == ["36 36", "30 446"]


ASYNC = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


@pytest.fixture(scope="module")
def malloc_async():
    """The lines of each part of a program over cudaMallocAsync."""
    return parts(
        """
from pytest_gpumem.devices.virtual.device import VirtualDevice

print("-- allocator")
print(torch.cuda.get_allocator_backend())
one, small = tensor(33), torch.empty(1, device="cuda"); show()
print(torch.cuda.memory_allocated() & 0xFFFFF)
del one; show()
print(torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20)
torch.cuda.reset_peak_memory_stats()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved() >> 20)
torch.cuda.empty_cache(); show()
stats = torch.cuda.memory_stats()
print(stats["active_bytes.all.current"], stats["num_alloc_retries"])
print(VirtualDevice.loaded().library.account(0).charged >> 20)
print(VirtualDevice.loaded().library.unsupported())
del small; torch.cuda.empty_cache()

print("-- fraction")
for fraction in (1.0, 0.5):
    torch.cuda.set_per_process_memory_fraction(fraction)
    kept = []
    try:
        while True:
            kept.append(tensor(1 << 10))
    except torch.OutOfMemoryError:
        print(len(kept))
del kept; torch.cuda.empty_cache(); torch.cuda.set_per_process_memory_fraction(1.0)

print("-- training")
model = torch.nn.Linear(1000, 1000).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    model(torch.randn(100, 1000, device="cuda")).sum().backward()
    optimizer.step()
held = sum(p.numel() for p in model.parameters()) * 4 * 4  # weights, gradients, 2 states
workspaces = torch._C._cuda_clearCublasWorkspaces()
torch.cuda.synchronize()
print(0 <= torch.cuda.memory_allocated() - held < 1 << 20)

print("-- measurement")
try:
    with pytest_gpumem.measure():
        pass
except pytest_gpumem.DeviceError as error:
    print(error)
""",
        card="T4",
        **ASYNC,
    )


def test_cuda_malloc_async_has_an_allocator_of_cudas_own(malloc_async):
    """It keeps what was freed, in units of 32 MiB; sizes are rounded up to 512 bytes."""
    assert malloc_async["allocator"] == [
        "cudaMallocAsync", "33 64", "512", "0 64", "33 64", "512 64", "0 2", "512 0", "2", "{}",
    ]  # fmt: skip


def test_cuda_malloc_async_runs_out_of_memory_and_keeps_to_its_fraction(malloc_async):
    assert malloc_async["fraction"] == ["14", "7"]


def test_a_step_trains_with_cuda_malloc_async(malloc_async):
    assert malloc_async["training"] == ["True"]


def test_a_measurement_of_another_allocator_is_refused_by_name(malloc_async):
    message = " ".join(malloc_async["measurement"])
    assert message.startswith("PyTorch's allocator cudaMallocAsync: a measurement needs")


def test_a_measurement_without_the_caching_allocator_is_refused_by_name():
    done = run_python(
        """
        import pytest_gpumem

        pytest_gpumem.use_virtual_gpu("T4")
        with pytest_gpumem.measure():
            pass
        """,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    assert done.returncode != 0
    assert "DeviceError: PYTORCH_NO_CUDA_MEMORY_CACHING" in done.stderr


def test_a_marked_test_of_another_allocator_is_refused_by_name(pytester, monkeypatch):
    monkeypatch.setenv(*next(iter(ASYNC.items())))
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu_memory(card="T4")
        def test_it():
            pass
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*PyTorch's allocator cudaMallocAsync: a measurement needs*"])


SHARING = """
import torch


def work(tensors, answers, done):
    first, second = tensors.get(), tensors.get()
    first.add_(1)
    free, total = torch.cuda.mem_get_info()
    answers.put([
        str(first.device), first.numel(), str(second.device), torch.cuda.memory_allocated(0),
        torch.cuda.memory_reserved(0), total - free,
    ])
    answers.put(first.clone())
    done.wait()
"""


def test_a_tensor_shared_with_a_spawned_process_counts_in_its_owner_alone(tmp_path):
    """As with torch.multiprocessing on a real GPU: the other process maps it, and takes nothing."""
    need_semaphores()
    (tmp_path / "sharing.py").write_text(SHARING)
    program = tmp_path / "program.py"
    program.write_text(
        """
if __name__ == "__main__":
    import pytest_gpumem

    pytest_gpumem.use_virtual_gpu("L4", devices=2)
    import sharing, torch, torch.multiprocessing as mp
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    context = mp.get_context("spawn")
    tensors, answers, done = context.Queue(), context.Queue(), context.Event()
    args = tensors, answers, done
    process = context.Process(target=sharing.work, args=args, daemon=True)
    process.start()
    first = torch.ones(10 << 20, dtype=torch.uint8, device="cuda")
    second = torch.zeros(5, device="cuda:1")
    tensors.put(first), tensors.put(second)
    print(answers.get())
    clone = answers.get()
    print(clone.shape, torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20)
    del clone
    done.set()
    process.join()
    print(process.exitcode, VirtualDevice.loaded().trouble())
    del first, second
    torch.cuda.ipc_collect()
    print(torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1))
"""
    )
    command = [warm_python(), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(["cuda:0", 10 << 20, "cuda:1", 0, 0, CARDS["L4"].context]),
        f"torch.Size([{10 << 20}]) 10 10",
        "0 None",
        "0 0",
    ]


def test_a_marked_test_shares_its_tensors_with_a_process_that_it_starts(pytester):
    need_semaphores()
    pytester.makepyfile(sharing_work=SHARING)
    pytester.makepyfile(
        test_sharing="""
        import pytest
        import torch
        import torch.multiprocessing as mp
        from sharing_work import work

        from pytest_gpumem.devices.cards import CARDS

        @pytest.mark.gpu_memory(card="T4", baseline=False)
        def test_it(gpu_memory):
            context = mp.get_context("spawn")
            tensors, answers, done = context.Queue(), context.Queue(), context.Event()
            args = tensors, answers, done
            process = context.Process(target=work, args=args, daemon=True)
            process.start()
            mine = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
            tensors.put(mine), tensors.put(mine[:5])
            assert answers.get()[1:] == [100 << 20, "cuda:0", 0, 0, CARDS["T4"].context]
            answers.get()
            done.set()
            process.join()
            assert process.exitcode == 0
            assert gpu_memory.peak.allocated == 100 << 20
        """
    )
    command = (warm_python(), "-m", "pytest", "--gpumem-device=virtual")
    pytester.run(*command, timeout=HANGS).assert_outcomes(passed=1)


def test_a_spawned_process_has_the_device_that_its_parent_has(tmp_path):
    """As torch.multiprocessing, a data loader's workers and torchrun start them."""
    program = tmp_path / "spawning.py"
    program.write_text(
        "if __name__ == '__main__':\n"
        "    import pytest_gpumem\n"
        "    pytest_gpumem.use_virtual_gpu('L4')\n"
        "import torch, torch.multiprocessing as mp\n"
        "def work(rank):\n"
        "    torch.ones(4, 4, device='cuda').mul_(2)\n"
        "    free, total = torch.cuda.mem_get_info()\n"
        "    print('rank', rank, torch.cuda.get_device_name(), total - free, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, nprocs=1)\n"
    )
    command = [warm_python(), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    taken = CARDS["L4"].context + (2 << 20)
    assert done.stdout == f"rank 0 NVIDIA L4 {taken}\n"


NAMING = """
import os, subprocess, sys

CUDA = '''
import ctypes, os

cuda, nvml = ctypes.CDLL(None), ctypes.CDLL("libnvidia-ml.so.1")

def number(index):
    properties = (ctypes.c_ubyte * 4096)()
    cuda.cudaGetDeviceProperties_v2(properties, index)
    return properties[256 + 15]  # the last byte of the UUID, behind the name

def used(index):
    device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    nvml.nvmlDeviceGetMemoryInfo(device, memory)
    return memory[2]

count, devices, here = ctypes.c_int(), ctypes.c_uint(), 0
cuda.cudaGetDeviceCount(ctypes.byref(count))
nvml.nvmlDeviceGetCount_v2(ctypes.byref(devices))
if count.value:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4 << 20))
    cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    here = total.value - free.value
using = [index for index in range(devices.value) if used(index) == here]
numbers = [number(index) for index in range(count.value)]
print(os.environ.get("CUDA_VISIBLE_DEVICES"), numbers, using)
'''
TORCH = '''
import os, sys, torch
from torch import cuda

counts = [cuda.device_count()]
if counts[0]:
    torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
uuids = [str(cuda.get_device_properties(index).uuid) for index in range(cuda.device_count())]
for value in sys.argv[1:]:
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    counts.append(cuda._device_count_nvml())
print([int(uuid[-2:], 16) for uuid in uuids], counts)
'''

@pytest.fixture
def start(monkeypatch):
    def start(code, value, *arguments):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if value is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        print("shown", end=" ", flush=True)
        subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    return start

"""


def shown_to_children(suite, code):
    """What the processes of a marked test of two devices see, and all output."""
    step = f"@pytest.mark.gpu_memory(devices=2)\ndef test_it(start):\n    {code}\n"
    session = suite.run_warm("-s", "--gpumem-device=virtual", source=NAMING + step)
    assert session.outcomes["passed"] == 1, session.out
    lines = session.out.splitlines()
    return [line.partition("shown ")[2] for line in lines if "shown " in line], session.flat


UUID_1 = f"GPU-{uuid.UUID(bytes=b'virtual-gpu-000' + bytes([1]))}"


def test_a_process_sees_the_devices_that_the_test_names_for_it(suite, monkeypatch):
    """CUDA Programming Guide, "CUDA Environment Variables"; NVML tells of all devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    named = (None, "0", "1,0", "1,5,0", "0,0", "5", "", "-1", UUID_1)
    seen, _ = shown_to_children(suite, f"[start(CUDA, value) for value in {named}]")
    assert seen == [
        *("None [0, 1] [0]", "0 [0] [0]", "1,0 [1, 0] [1]", "1,5,0 [1] [1]"),
        *("0,0 [] [0, 1]", "5 [] [0, 1]", " [] [0, 1]", "-1 [] [0, 1]"),
        f"{UUID_1} [1] [1]",
    ]


def test_pytorch_counts_as_many_devices_of_a_process_by_nvml_as_cuda_shows(suite, monkeypatch):
    """By its own reading of the variable: a program that has a number counts others by it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    named = ("0", "1,0", "1,5,0", "0,0", "5", "", "-1", UUID_1)
    seen, _ = shown_to_children(suite, f"start(TORCH, '1,0', *{named})")
    assert seen == ["[1, 0] [2, 1, 2, 1, 0, 0, 0, 0, 1]"]


def test_an_inherited_variable_names_the_machines_own_gpus(suite, monkeypatch):
    """No process sees fewer devices by it; a test may name others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    seen, _ = shown_to_children(suite, "[start(CUDA, value) for value in ('7', '1')]")
    assert seen == ["None [0, 1] [0]", "1 [1] [1]"]


def test_pytorch_does_not_read_what_the_session_has_inherited(suite, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen, text = shown_to_children(suite, "[start(TORCH, value) for value in ('', '1')]")
    assert seen == ["[0, 1] [2]", "[1] [1]"]
    # Under the numbers that the devices have for the test.
    assert "reserved 20.00 MiB of device 0, 20.00 MiB of device 1" in text


def test_a_forked_process_works_without_cuda_and_is_told_so_with_it():
    """As on a real GPU, whose context no forked process can use."""
    text = child(
        """
        import os, torch

        if os.fork() == 0:
            print(torch.ones(4).sum().item(), flush=True)
            try:
                torch.ones(4, device="cuda")
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
        """,
        warm=True,
    )
    assert text.startswith("4.0\n")
    assert "Cannot re-initialize CUDA in forked subprocess" in text


def test_a_program_ends_well_whose_last_act_is_a_backward_pass():
    """PyTorch's threads may still want Python then: three of four such programs aborted."""
    text = child(
        """
        import os, sys
        import pytest_gpumem
        from pytest_gpumem.devices.cards import CARDS
        from pytest_gpumem.devices.virtual.device import VirtualDevice

        VirtualDevice.load(CARDS["H100"])
        import torch

        second = os.fork()  # before CUDA is used: each is a program of its own, and ends as one
        pytest_gpumem.use_virtual_gpu("H100")
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).cuda()
        if second:
            assert os.waitpid(second, 0)[1] == 0
        os.write(1, b"done ")
        sys.setswitchinterval(10)  # they get it no sooner than this program's end
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        """,
        card=None,
    )
    assert text == "done done "
