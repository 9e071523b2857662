"""Snapshots as PyTorch's allocator dumps them, made of a few events."""

from __future__ import annotations

import pickle


def frame(name, line, function):
    return {"filename": name, "line": line, "name": function}


LINEAR = frame("/opt/conda/lib/python3.12/site-packages/torch/nn/modules/linear.py", 134, "forward")
CXX = frame("/pytorch/c10/cuda/CUDACachingAllocator.cpp", 10, "c10::cuda::malloc()")
MAKE_GRADS = frame(
    "/opt/conda/lib/python3.12/site-packages/torch/autograd/__init__.py", 200, "_make_grads"
)


def alloc(address, size, *frames):
    return {"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": list(frames)}


def free(address, size):
    actions = ("free_requested", "free_completed")
    return [{"action": name, "addr": address, "size": size, "frames": [CXX]} for name in actions]


def block(address, size, *frames, state="active_allocated"):
    return {"address": address, "size": size, "state": state, "frames": list(frames)}


def snapshot(events=(), blocks=(), *, device=0, settings=None):
    """A snapshot of one segment, with the history of one device."""
    total = sum(each["size"] for each in blocks)
    address = blocks[0]["address"] if blocks else 0
    segment = {"device": device, "address": address, "total_size": total, "blocks": list(blocks)}
    traces = [[] for _ in range(device)] + [list(events)]
    return {
        "segments": [segment] if blocks else [],
        "device_traces": traces,
        "allocator_settings": settings or {},
    }


def dump(path, data):
    path.write_bytes(pickle.dumps(data))
    return str(path)
