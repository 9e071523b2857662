"""A bare script: each step from an empty allocator, and torch.cuda's own peaks of it, as JSON."""

# ruff: noqa: B023, T201 - a loop's function is called within its turn, and a script prints

import gc
import json
import os
import sys

if os.environ.get("GPUMEM_FAKE_GPU"):
    import fake_gpu  # noqa: F401
import check_steps
import torch

names = sys.argv[1].split(",") if len(sys.argv) > 1 and sys.argv[1] else list(check_steps.STEPS)
for name in names:
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    held, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    error, result = "", None
    highest = [0, 0]
    reset = torch._C._cuda_resetPeakMemoryStats  # a step that resets the peaks does not lose them

    def folding(device):
        stats = torch.cuda.memory_stats()
        highest[0] = max(highest[0], stats["allocated_bytes.all.peak"])
        highest[1] = max(highest[1], stats["reserved_bytes.all.peak"])
        return reset(device)

    torch._C._cuda_resetPeakMemoryStats = folding
    try:
        result = check_steps.STEPS[name]()
        torch.cuda.synchronize()
    except Exception as problem:  # noqa: BLE001
        error = f"{type(problem).__name__}: {problem}"[:300]
    torch._C._cuda_resetPeakMemoryStats = reset
    peaks = [
        max(highest[0], torch.cuda.max_memory_allocated()) - held,
        max(highest[1], torch.cuda.max_memory_reserved()) - kept,
        torch.cuda.host_memory_stats()["allocated_bytes.peak"] - pinned,
    ]
    record = {"name": name, "peaks": peaks, "held": held, "error": error}
    print("GM " + json.dumps(record), flush=True)
    del result
