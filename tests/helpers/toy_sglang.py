"""A toy package named sglang, with the functions that the hooks of devices/servers wrap.

Its scheduler allocates device memory in SGLang's order: weights, a KV cache of a share of the
memory, CUDA graphs. Tests use it where SGLang is not installed; figures of real SGLang are in
benchmarks/results.
"""

from __future__ import annotations

FILES = {
    "sglang/__init__.py": """
import torch  # first, as in SGLang

__version__ = "0.5.23"
""",
    "sglang/srt/utils/__init__.py": "from sglang.srt.utils.common import kill_process_tree\n",
    "sglang/srt/utils/common.py": """
import multiprocessing, os, signal, sys

def kill_process_tree(parent_pid, include_parent=True, wait_timeout=60):
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    if include_parent:
        os.kill(parent_pid, signal.SIGKILL)
""",
    "sglang/srt/mem_cache/kv_cache_configurator.py": """
import torch

class KVCacheConfigurator:
    def __init__(self, gpu_id, share):
        self.gpu_id, self.share = gpu_id, share

    def _profile_available_bytes(self, pre_model_load_memory):
        free, _ = torch.cuda.mem_get_info(self.gpu_id)
        rest = free / 2**30 - pre_model_load_memory * (1 - self.share)
        if rest <= 0:
            raise ValueError("Loaded weights leave no GPU memory for the KV cache.")
        return int(rest * 2**30)
""",
    "sglang/srt/model_executor/model_runner.py": """
import sys
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

KIB, MIB = 1 << 10, 1 << 20

def empty(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

class ModelRunner:
    is_draft_worker = False

    def __init__(self, mib, share):
        self.gpu_id, self.mib, self.share = 0, mib, share
        self.model_config = SimpleNamespace(context_len=1000)
        self.pre_model_load_memory = torch.cuda.mem_get_info()[0] / 2**30

    def load_model(self):
        self.weights = empty(self.mib * MIB)
        self.weight_load_mem_usage = self.mib / 1024

    def alloc_memory_pool(self):
        configurator = KVCacheConfigurator(self.gpu_id, self.share)
        available = configurator._profile_available_bytes(self.pre_model_load_memory)
        self.max_total_num_tokens = available // (64 * KIB)
        self.cache = empty(self.max_total_num_tokens * 64 * KIB)

    def init_cuda_graphs(self):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            self.output = empty(4 * MIB)
        self.graph_memory_usage = {"prefill": 0.0, "decode": 4 / 1024}

    def post_capture_resize_kv_pool(self):
        self.max_total_num_tokens -= 100
""",
    "sglang/srt/entrypoints/http_server.py": """
import multiprocessing, os, signal, sys

from sglang.srt.utils import kill_process_tree

def scheduler(mib, share, queue, end):
    from sglang.srt.model_executor.model_runner import ModelRunner
    try:
        runner = ModelRunner(mib, share)
        runner.load_model()
        runner.alloc_memory_pool()
        runner.init_cuda_graphs()
        runner.post_capture_resize_kv_pool()
    except BaseException:
        queue.put("failed")
        raise
    queue.put("ready")
    end.wait()

class Sockets:
    def __del__(self):
        print("sockets deleted", file=sys.stderr, flush=True)

def _wait_and_warmup():
    raise SystemExit("the server does not answer")

def launch_server(mib=64, share=0.9):
    spawn, sockets = multiprocessing.get_context("spawn"), Sockets()
    end, queue = spawn.Event(), spawn.Queue()
    signal.signal(signal.SIGQUIT, lambda *_: kill_process_tree(os.getpid()))
    process = spawn.Process(target=scheduler, args=(mib, share, queue, end), daemon=True)
    process.start()
    if queue.get() != "ready":
        process.join()
        kill_process_tree(os.getpid())
    if "--warm-up" in sys.argv:
        _wait_and_warmup()
    end.set()
    process.join()
    kill_process_tree(os.getpid(), include_parent=False)
    signal.raise_signal(signal.SIGQUIT)  # SGLang's watch of its processes is too late
""",
}


def write(folder):
    """Write the package into a folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"), encoding="utf-8")
