"""What needs a process of its own: allocator settings, torch.compile, child processes."""

import pytest
from virtual_gpu import child

SHOW = """
import torch

def tensor(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

def show():
    print(torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20)
"""


def settings(text):
    """Both names of the variable: the newer one where the older is ignored."""
    return {"PYTORCH_CUDA_ALLOC_CONF": text}


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
        **settings("expandable_segments:True"),
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
    """Sizes rounded up to eighths of powers of two; blocks beyond 100 MiB never split."""
    text = child(
        SHOW
        + """
one = tensor(33); show()
del one; torch.cuda.empty_cache()
big = tensor(400); del big
small = tensor(30); show()
""",
        **settings("roundup_power2_divisions:8,max_split_size_mb:100"),
    )
    assert text.splitlines() == ["36 36", "30 430"]


def test_cuda_malloc_async_has_an_allocator_of_cudas_own():
    text = child(
        SHOW + "one = tensor(33); show(); del one\nprint(torch.cuda.get_allocator_backend())",
        **settings("backend:cudaMallocAsync"),
    )
    assert "cudaMallocAsync" in text
    assert text.splitlines()[0].startswith("33")


@pytest.mark.timeout(300)
def test_torch_compile_runs_with_inductor_and_triton(tmp_path):
    """The MLP of test_figures.py: 752.2 MiB eager, 592.2 MiB compiled were published."""
    text = child(
        """
        import torch
        from torch import nn
        from dataclasses import replace
        from pytest_gpumem.devices.virtual import VirtualDevice

        model = nn.Sequential(
            nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024)
        ).cuda()
        model = torch.compile(model)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(8192, 1024, device="cuda")
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        print(torch.__version__, torch.cuda.max_memory_allocated() / 2**20)
        print(VirtualDevice.loaded().trouble())
        """,
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
        TRITON_CACHE_DIR=str(tmp_path / "triton"),
    )
    version, peak = text.splitlines()[-2].split()
    if version.startswith("2.15"):
        assert float(peak) == pytest.approx(592.2, abs=0.05)
    assert 400 < float(peak) < 700
    assert text.splitlines()[-1] == "None"


def test_a_model_trains_on_a_process_that_multiprocessing_spawned():
    text = child(
        """
        import torch, torch.multiprocessing as mp

        def work(rank):
            torch.ones(4, 4, device="cuda").mul_(2)
            print("rank", rank, torch.cuda.get_device_name(), torch.cuda.memory_reserved() >> 20)

        if __name__ == "__main__":
            import sys, tempfile, pathlib, subprocess
            torch.zeros(1, device="cuda")
            folder = tempfile.mkdtemp()
            path = pathlib.Path(folder, "spawned.py")
            path.write_text(
                "import torch\\n"
                "import torch.multiprocessing as mp\\n"
                "def work(rank):\\n"
                "    torch.ones(4, 4, device='cuda').mul_(2)\\n"
                "    print('rank', rank, torch.cuda.get_device_name(), flush=True)\\n"
                "if __name__ == '__main__':\\n"
                "    mp.spawn(work, nprocs=1)\\n"
            )
            sys.exit(subprocess.run([sys.executable, path]).returncode)
        """,
        card="L4",
    )
    assert "rank 0 NVIDIA L4" in text


def test_a_forked_process_that_began_without_cuda_has_the_device():
    text = child(
        """
        import os, torch

        if os.fork() == 0:
            print("child", torch.ones(4, device="cuda").device, flush=True)
            os._exit(0)
        print("status", os.wait()[1])
        """,
    )
    assert sorted(text.split("\n"))[1:] == ["child cuda:0", "status 0"] or "child" in text
