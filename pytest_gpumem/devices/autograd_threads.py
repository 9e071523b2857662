"""Waiting for autograd's threads, one a device, to let go of a backward pass."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def await_autograd() -> list[object]:
    """Return once autograd's threads have let go of the backward passes that have ended.

    A device's thread wakes the caller first, and then drops its reference to the pass
    (``thread_main`` of torch/csrc/autograd/engine.cpp): with the gradients of operations that did
    not run, where an error ended it, and with the callbacks that were queued for its end. FSDP's
    holds the sharded module. The thread takes the next operation after that.

    Returns:
        all objects of that next operation: the threads may hold those.
    """
    import torch

    objects: list[object] = []
    with torch.inference_mode(mode=False), torch.enable_grad():
        for device in range(torch.cuda.device_count()):
            leaf = torch.empty(0, device=f"cuda:{device}", requires_grad=True)  # takes no memory
            product, gradient = leaf * 1, torch.empty_like(leaf)
            objects += [leaf, product, product.grad_fn, gradient]
            objects += torch.autograd.grad(product, leaf, gradient)
    return objects


def has_autograd_threads() -> bool:
    """Return whether autograd has started threads of devices in this process (on Linux)."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            if name.read_text(encoding="ascii", errors="replace").startswith("pt_autograd"):
                return True
    return False
