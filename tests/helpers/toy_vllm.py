"""A toy package named vllm, with the functions that the hooks of devices/servers wrap.

Its engine allocates device memory in vLLM's order: weights, a profiling run, a KV cache of the
remaining memory, CUDA graphs. Tests use it where vLLM is not installed; figures of real vLLM are in
benchmarks/results.
"""

from __future__ import annotations

FILES = {
    "vllm/__init__.py": '''
import multiprocessing, os, sys

import torch  # first, as in vLLM

__version__ = "0.33.0"

class LLM:
    """Weights of ``mib`` MiB; the profiling run's activations are half as large."""

    def __init__(
        self, model="", mib=64, ranks=1, max_model_len=1024, gpu_memory_utilization=0.9, block=16,
        load_format="dummy", skip_tokenizer_init=True,
    ):
        from vllm.engine.arg_utils import EngineArgs
        args = EngineArgs(mib, ranks, max_model_len, gpu_memory_utilization, block)
        config = args.create_engine_config()
        self.process = None
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            from vllm.v1.engine.core import EngineCore
            self.core = EngineCore(config)
            return
        spawn = multiprocessing.get_context("spawn")
        self.end, queue = spawn.Event(), spawn.Queue()
        from vllm.v1.engine.core import serve
        self.process = spawn.Process(target=serve, args=(config, queue, self.end))
        self.process.start()
        if queue.get() != "ready":
            self.process.join()
            raise RuntimeError("Engine core initialization failed. See root cause above.")

    def __del__(self):
        if self.process is not None and self.process.is_alive():
            self.end.set()
            self.process.join()
''',
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
from dataclasses import dataclass
from types import SimpleNamespace

@dataclass
class EngineArgs:
    mib: int
    ranks: int
    max_model_len: int
    gpu_memory_utilization: float
    block: int

    def create_engine_config(self):
        return SimpleNamespace(
            mib=self.mib,
            block=self.block,
            cache_config=SimpleNamespace(
                gpu_memory_utilization=self.gpu_memory_utilization, num_gpu_blocks=None
            ),
            model_config=SimpleNamespace(max_model_len=self.max_model_len),
            parallel_config=SimpleNamespace(
                world_size=self.ranks,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
        )
""",
    "vllm/v1/__init__.py": "",
    "vllm/v1/core/__init__.py": "",
    "vllm/v1/core/kv_cache_utils.py": '''
from types import SimpleNamespace

KIB = 1 << 10

class Spec:
    """A cache of 64 KiB per token."""

    def __init__(self, block):
        self.block_size = block
        self.page_size_bytes = block * 64 * KIB

    def max_memory_usage_bytes(self, config):
        return -(-config.model_config.max_model_len // self.block_size) * self.page_size_bytes

def get_max_concurrency_for_kv_cache_config(config, cache):
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    return cache.num_blocks * spec.page_size_bytes / spec.max_memory_usage_bytes(config)

def get_kv_cache_configs(config, specs, available):
    configs = []
    for layers, memory in zip(specs, available, strict=True):
        (spec,) = layers.values()
        needed = spec.max_memory_usage_bytes(config)
        if needed > memory:
            raise ValueError(f"{needed} bytes of memory are needed, {memory} are available")
        group = SimpleNamespace(kv_cache_spec=spec)
        blocks = int(memory // spec.page_size_bytes)
        configs.append(SimpleNamespace(kv_cache_groups=[group], num_blocks=blocks))
    return configs
''',
    "vllm/v1/engine/__init__.py": "",
    "vllm/v1/engine/core.py": """
from vllm.v1.core.kv_cache_utils import Spec, get_kv_cache_configs
from vllm.v1.worker.gpu_worker import Worker

class EngineCore:
    def __init__(self, config):
        self.workers = [Worker(config, n) for n in range(config.parallel_config.world_size)]
        for worker in self.workers:
            worker.init_device()
            worker.load_model()
        available = [worker.determine_available_memory() for worker in self.workers]
        specs = [{"layer": Spec(config.block)} for _ in self.workers]
        for worker, cache in zip(self.workers, get_kv_cache_configs(config, specs, available)):
            worker.initialize_from_config(cache)
            worker.compile_or_warm_up_model()

def serve(config, queue, end):
    try:
        core = EngineCore(config)
    except BaseException:
        queue.put("failed")
        raise
    queue.put("ready")
    end.wait()
""",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/gpu_worker.py": """
import contextlib
from types import SimpleNamespace

import torch

MIB = 1 << 20

def empty(mib, device):
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)

@contextlib.contextmanager
def memory_profiling(before, weights_memory):
    device = before.device
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    result = SimpleNamespace(weights_memory=weights_memory)
    yield result
    result.torch_peak_increase = torch.cuda.max_memory_allocated(device) - held
    free, _ = torch.cuda.mem_get_info(device)
    result.non_kv_cache_memory = result.torch_peak_increase + weights_memory + 8 * MIB

class Runner:
    def __init__(self, mib, device):
        self.weights = empty(mib, device)
        self.model_memory_usage = mib * MIB
        self.device = device

    def profile_run(self):
        hidden = empty(self.model_memory_usage // MIB // 2, self.device)

    def capture_model(self):
        self.graphs = empty(4, self.device)
        return 4 * MIB

class Worker:
    def __init__(self, config, rank):
        self.vllm_config, self.device = config, torch.device("cuda", rank)

    def init_device(self):
        free, total = torch.cuda.mem_get_info(self.device)
        share = self.vllm_config.cache_config.gpu_memory_utilization
        self.init_snapshot = SimpleNamespace(total_memory=total, device=self.device)
        self.requested_memory = int(total * share)
        if self.requested_memory > free:
            raise ValueError(f"Free memory on device ({free}) is less than desired")

    def load_model(self):
        self.model_runner = Runner(self.vllm_config.mib, self.device)

    def determine_available_memory(self):
        weights = self.model_runner.model_memory_usage
        with memory_profiling(self.init_snapshot, weights) as profile:
            self.model_runner.profile_run()
        torch.cuda.empty_cache()
        return self.requested_memory - profile.non_kv_cache_memory - 16 * MIB  # for CUDA graphs

    def initialize_from_config(self, cache):
        (group,) = cache.kv_cache_groups
        size = cache.num_blocks * group.kv_cache_spec.page_size_bytes
        self.cache = torch.empty(size, dtype=torch.int8, device=self.device)

    def compile_or_warm_up_model(self):
        self.model_runner.capture_model()
""",
}


def write(folder):
    """Write the package into a folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"), encoding="utf-8")
