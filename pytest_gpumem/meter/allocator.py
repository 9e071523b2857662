"""Bringing a device to the same state before every step, whatever ran before.

All functions expect torch to be imported and CUDA initialised.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.memory_cap import numbers
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.measurement import Peak

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def stats(device: int) -> dict[str, Any]:
    """Return the caching allocator's statistics of a device (``torch.cuda.memory_stats``)."""
    import torch

    found: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    return found


def current(device: int) -> Peak:
    """Return what a device's allocator holds now, in bytes."""
    return held_now(stats(device))


def highest(device: int) -> Peak:
    """Return the peaks since they were last reset, in bytes."""
    return most_held(stats(device))


def held_now(found: dict[str, Any]) -> Peak:
    """Return the bytes that these statistics say are held."""
    return _bytes(found, "current")


def most_held(found: dict[str, Any]) -> Peak:
    """Return the peaks that these statistics say there were."""
    return _bytes(found, "peak")


def alloc_retries(found: Sequence[dict[str, Any]]) -> int:
    """Return how often the allocators of some devices emptied their caches to go on."""
    return sum(it.get("num_alloc_retries", 0) for it in found)


def segments_held(found: Sequence[dict[str, Any]]) -> int:
    """Return the number of segments that they hold."""
    return sum(it["segment"]["all"]["current"] for it in found if it)


def _bytes(found: dict[str, Any], which: str) -> Peak:
    if not found:  # nothing was allocated on this device yet
        return Peak(0, 0)
    return Peak(found["allocated_bytes"]["all"][which], found["reserved_bytes"]["all"][which])


def live_blocks(devices: int | range) -> dict[tuple[int, int], int]:
    """Return device, address and bytes of each block that is allocated on some devices."""
    import torch

    found = {}
    wanted = numbers(devices)
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"] == "active_allocated" and segment["device"] in wanted:
                found[segment["device"], address] = block["size"]
            address += block["size"]
    return found


def require_native_allocator() -> None:
    """Refuse to measure PyTorch's other allocators, which give no snapshots and cap otherwise.

    Raises:
        DeviceError: the backend is cudaMallocAsync or a pluggable allocator.
    """
    import torch

    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise DeviceError(
            f"PyTorch's allocator {backend}",
            "it does not tell what a measurement needs (snapshots, refused requests)",
            "leave backend: out of PYTORCH_ALLOC_CONF for these tests",
        )


def reset_peaks(devices: int | range) -> None:
    """Reset the peak statistics of some devices."""
    import torch

    reset = torch._C._cuda_resetPeakMemoryStats
    for device in numbers(devices):
        getattr(reset, "unwatched", reset)(device)


_RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
"""bindings behind ``torch.cuda.reset_peak_memory_stats`` and ``torch.accelerator``'s"""


@contextmanager
def watched_resets(before: Callable[[], object]) -> Iterator[None]:
    """Call ``before`` whenever somebody else is about to reset the peaks, which are global."""
    import torch

    found = {name: getattr(torch._C, name) for name in _RESETS if hasattr(torch._C, name)}
    for name, reset in found.items():
        setattr(torch._C, name, _watched(reset, before))
    try:
        yield
    finally:
        for name, reset in found.items():
            setattr(torch._C, name, reset)


def _watched(reset: Callable[..., object], before: Callable[[], object]) -> Callable[..., object]:
    def watched(*args: object) -> object:
        before()
        return reset(*args)

    watched.unwatched = reset  # type: ignore[attr-defined]
    return watched


def settle(devices: int | range) -> None:
    """Release all that nobody uses: garbage, cuBLAS workspaces, cached segments.

    The cuBLAS workspaces count as allocated and are made by whichever test calls cuBLAS first; they
    are cleared so that every test makes its own.
    """
    import torch

    if any(current(device).allocated for device in numbers(devices)):
        gc.collect()
    for device in numbers(devices):
        torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def own_garbage_only() -> Iterator[None]:
    """Let Python's cyclic collector see objects made inside only, so that it runs alike each time.

    When it runs depends on how many objects there are and were; garbage that it frees early or late
    moves a step's peak.
    """
    gc.freeze()
    gc.collect()  # nothing to look at: this sets the collector's counters to zero
    try:
        yield
    finally:
        gc.unfreeze()


def collect_all() -> None:
    """Collect garbage inside of :func:`own_garbage_only`, that of objects made before it as well.

    A test's instance is made when the test is collected; what a try kept in it goes with it.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def expandable_segments() -> Iterator[bool]:
    """Have the allocator take expandable segments inside; give whether it does that anew.

    What it was told is put back. It does not where it does already.
    """
    import torch

    known = torch.cuda.memory._snapshot()["allocator_settings"]
    if known.get("expandable_segments"):
        yield False
        return
    before = known.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    kept = [it for it in before.split(",") if not it.strip().startswith("expandable_segments")]
    _set_allocator(",".join([*filter(None, kept), "expandable_segments:True"]))
    try:
        with warnings.catch_warnings():  # a GPU may lack what PyTorch asks for, and can do without
            warnings.filterwarnings("ignore", message="nvmlDeviceGetGpuFabricInfo")
            yield True
    finally:
        torch.cuda.empty_cache()
        _set_allocator("expandable_segments:False")
        _set_allocator(before)


def _set_allocator(settings: str) -> None:
    """Set the allocator's settings while it runs: ``PYTORCH_CUDA_ALLOC_CONF``'s value."""
    import torch

    own = torch._C  # which has one of the two, by version
    name = "_accelerator_setAllocatorSettings"
    if not hasattr(own, name):
        name = "_cuda_cudaCachingAllocator_set_allocator_settings"
    getattr(own, name)(settings)
