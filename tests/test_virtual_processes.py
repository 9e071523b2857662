"""What needs a process of its own: allocator settings and child processes."""

import subprocess
import sys

import pytest
from virtual_gpu import child

from pytest_gpumem.devices.cards import CARDS

SHOW = """
import torch

def tensor(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

def show():
    print(torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20)
"""


def test_expandable_segments_grow_and_shrink_in_units_of_their_own():
    """20 MiB for large requests; cuMemCreate is charged as cudaMalloc is."""
    text = child(
        SHOW
        + """
from pytest_gpumem.devices.virtual import VirtualDevice

account = VirtualDevice.loaded().library.account
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
""",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    lines = text.splitlines()
    assert lines[0] == "30 40"
    assert lines[1] == "80 80"
    assert lines[2] == "50 80"
    assert lines[3] == "75 80"
    assert lines[4] == "80"
    assert lines[5:7] == ["0 0", "0"]
    assert lines[7:] == ["out of memory", "70"]


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
        PYTORCH_CUDA_ALLOC_CONF="roundup_power2_divisions:8,max_split_size_mb:100",
    )
    assert text.splitlines() == ["36 36", "30 446"]


@pytest.mark.xfail(strict=True, reason="cudaDeviceGetDefaultMemPool is not supported yet")
def test_cuda_malloc_async_has_an_allocator_of_cudas_own():
    text = child(
        SHOW + "one = tensor(33); show(); del one\nprint(torch.cuda.get_allocator_backend())",
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )
    assert "cudaMallocAsync" in text
    assert text.startswith("33")


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
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    taken = CARDS["L4"].context + (2 << 20)
    assert done.stdout == f"rank 0 NVIDIA L4 {taken}\n"


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
    )
    assert text.startswith("4.0\n")
    assert "Cannot re-initialize CUDA in forked subprocess" in text
