import json
import warnings

import torch

warnings.simplefilter("ignore")
RESETS = ("empty", "reset", "set_", "change", "caching", "list_gpu", "use_mem", "host_memory_stats")
"""names of functions that change something, or read no memory of a device"""
LEFT = []
BLOCK = 256 << 20


def without_addresses(segments):
    def rest(record):
        return {key: value for key, value in record.items() if key != "address"}

    return [
        rest(segment) | {"blocks": [rest(block) for block in segment["blocks"]]}
        for segment in segments
    ]


def figures():
    """All that torch.cuda.memory and torch.accelerator.memory tell."""
    values = {}
    for module in (torch.cuda.memory, getattr(torch.accelerator, "memory", None)):
        for name in getattr(module, "__all__", ()):
            function = getattr(module, name)
            if callable(function) and name[0].islower() and not name.startswith(RESETS):
                values[f"{module.__name__}.{name}"] = function()
    segments = "torch.cuda.memory.memory_snapshot"
    values[segments] = without_addresses(values[segments])
    snapshot = torch.cuda.memory._snapshot()
    values["_snapshot"] = without_addresses(snapshot["segments"])
    values["events"] = [(it["action"], it["size"]) for it in snapshot["device_traces"][0]]
    return json.loads(json.dumps(values, default=str))


def leave():
    """Leave memory behind, with free rooms in its segments."""
    blocks = [torch.empty(size, device="cuda") for size in (100, 500_000, 900_000, 3_000_000)]
    LEFT.extend(blocks[::2])
    LEFT.append(torch.empty(20 << 20, device="cuda"))


def steps():
    readings = []
    with torch.device("cuda"):
        net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)])
    optimizer = torch.optim.SGD(net.parameters())
    for rows in (4096, 64, 64):
        net(torch.zeros(rows, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    readings.append(figures())
    torch.cuda.reset_peak_memory_stats()
    readings.append(figures())
    torch.zeros(64 << 20, device="cuda")
    optimizer.step()
    readings.append(figures())
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.empty_cache()
    readings.append(figures())
    torch.cuda.memory._record_memory_history("all", context=None)
    torch.zeros(3 << 20, device="cuda")
    optimizer.step()
    readings.append(figures())
    torch.cuda.memory._record_memory_history(None)
    # Room for ten blocks and a half: memory that earlier tests left takes nothing from a test's
    # fraction, and from a program's it does.
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_allocated() + 10 * BLOCK + BLOCK // 2
    torch.cuda.set_per_process_memory_fraction(limit / total)
    held = []
    try:
        while True:
            held.append(torch.zeros(BLOCK, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        readings.append(len(held))
    held.clear()
    torch.cuda.empty_cache()
    readings.append(figures())
    if hasattr(torch.accelerator, "reset_peak_memory_stats"):
        torch.accelerator.reset_peak_memory_stats()
        torch.accelerator.reset_accumulated_memory_stats()
        readings.append(figures())
    torch.cuda.set_per_process_memory_fraction(1.0)
    return readings
