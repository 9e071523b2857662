"""PyTorch's caching allocator: figures, settings and versions, the same state before every step.

All functions expect torch to be imported and CUDA initialised.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices import driver
from pytest_gpumem.devices.memory_cap import device_range
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.measurement import Peak, Provenance
from pytest_gpumem.meter.host_memory import empty_pinned_cache
from pytest_gpumem.meter.plugs import WORKSPACES
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.collector import begin_count, begin_count_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.measurement import DeviceInfo

NO_CACHING: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""an environment variable; its presence counts, whatever its value"""
PINNED: Final = "pinned"
"""the key of the statistics of pinned host memory, beside those of a test's first device"""
MAX_COLLECTIONS: Final = 50
"""collections, each of which may find objects that the last one has let go of"""
SWITCHED_OFF: Final = Note(
    NoteKind.OUTSIDE,
    "the step switched PyTorch's caching allocator off (caching_allocator_enable(False)) "
    "and not on again: memory allocated without this allocator is in no peak; later tests "
    "use the allocator again",
)
Stats = dict[str, Any]
"""the allocator's statistics of one device, nested as ``memory_stats_as_nested_dict`` has them"""


def current(device: int) -> Peak:
    """Return the bytes that a device's allocator holds now."""
    return current_in(VIEW.stats(device))


def current_in(stats: Stats) -> Peak:
    """Return the bytes held now, by these statistics."""
    return _bytes(stats, "current")


def peak_in(stats: Stats) -> Peak:
    """Return the peaks, by these statistics."""
    return _bytes(stats, "peak")


def unrequested_in(stats: Stats) -> int:
    """Return the bytes of live blocks beyond the requests, by these statistics.

    Requests are rounded up, and a rest of a free block that is too small is not split off. How much
    that is depends on the free blocks, and so on all that ran before.
    """
    if "segment" not in stats:
        return 0
    allocated, requested = stats["allocated_bytes"]["all"], stats["requested_bytes"]["all"]
    return int(allocated["current"] - requested["current"])


def peak_active(stats: Stats) -> int:
    """Return the peak bytes of blocks in use, those included that streams still wait for."""
    return int(stats["active_bytes"]["all"]["peak"]) if "segment" in stats else 0


def _bytes(stats: Stats, figure: str) -> Peak:
    pinned = stats[PINNED][figure] if PINNED in stats else 0
    if "segment" not in stats:  # nothing was allocated on this device yet
        return Peak(0, 0, pinned)
    allocated, reserved = stats["allocated_bytes"], stats["reserved_bytes"]
    return Peak(allocated["all"][figure], reserved["all"][figure], pinned)


def alloc_retries(all_stats: Sequence[Stats]) -> int:
    """Return how often the allocators of some devices emptied their caches to go on."""
    return sum(stats.get("num_alloc_retries", 0) for stats in all_stats)


def segments_held(all_stats: Sequence[Stats]) -> int:
    """Return the number of segments that the allocators of some devices hold."""
    return sum(stats["segment"]["all"]["current"] for stats in all_stats if "segment" in stats)


def require_native_allocator() -> None:
    """Refuse PyTorch's allocators besides the native one: no snapshots, another kind of cap.

    Raises:
        DeviceError: the backend is cudaMallocAsync or a pluggable allocator.
    """
    import torch

    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise DeviceError(
            f"PyTorch's allocator {backend}",
            (
                "a measurement needs snapshots and the record of refused requests, and this "
                "allocator has neither"
            ),
            "leave backend: out of PYTORCH_ALLOC_CONF for these tests",
        )
    if NO_CACHING in os.environ or is_switched_off():
        raise DeviceError(
            f"{NO_CACHING} or caching_allocator_enable(False)",
            "PyTorch then bypasses its caching allocator, which counts memory and keeps the limits",
            f"leave {NO_CACHING} out of the environment of these tests, and call "
            "caching_allocator_enable(True) if earlier code switched the allocator off",
        )


def is_switched_off() -> bool:
    """Return whether ``caching_allocator_enable(False)`` holds; torch 2.11 and older do not say."""
    import torch

    is_enabled = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    return is_enabled is not None and not is_enabled()


def switch_on() -> None:
    """Switch the caching allocator on again where a step has left it off."""
    import torch

    if is_switched_off():
        torch.cuda.memory.caching_allocator_enable(value=True)


def reset_peaks(devices: int | range) -> None:
    """Reset the peaks of some devices and of pinned memory; the test's code does not see it."""
    for device in device_range(devices):
        VIEW.reset_peaks(device)
    VIEW.reset_pinned_peaks()


def settle(devices: int | range, *, needs_collection: Callable[[], bool] | None = None) -> None:
    """Release unused memory: garbage, cuBLAS workspaces, cached segments, cached pinned memory.

    The cuBLAS workspaces count as allocated and are made by whichever test calls cuBLAS first; they
    are cleared so that every test makes its own.

    ``needs_collection`` is asked where memory is left; without it, garbage is collected.
    """
    import torch

    measured = device_range(devices)
    for device in measured:
        torch.cuda.synchronize(device)
    if any(current(device).reserved for device in measured):
        WORKSPACES.clear(measured)
    # a collection takes a tenth of a second where many modules are loaded: only if it can help
    left = any(current(device).allocated for device in measured)
    if left and (needs_collection is None or needs_collection()):
        collect_garbage()
        begin_count_again()
    if any(current(device).reserved for device in measured):
        with VIEW.hidden_counters(measured):
            VIEW.empty_cache()
    empty_pinned_cache()


def collect_garbage() -> None:
    """Collect garbage until none is left.

    One collection is not always enough. Objects that C++ refers to (an autograd node's hooks) are
    garbage only once the last collection has freed the node. And while another thread collects,
    ``gc.collect()`` returns at once and has done nothing.
    """
    for _ in range(MAX_COLLECTIONS):
        number = gc.get_stats()[-1]["collections"]
        unreachable = gc.collect()
        if gc.get_stats()[-1]["collections"] == number:
            time.sleep(0.01)  # the other thread goes on meanwhile
        elif not unreachable:
            return


@contextmanager
def own_garbage_only() -> Iterator[None]:
    """Let Python's cyclic collector see objects made inside only, so that it runs alike each time.

    The collector runs by the number of objects that are alive and were made; garbage that it frees
    earlier or later moves a step's peak.
    """
    gc.freeze()
    begin_count()  # nothing to look at
    try:
        yield
    finally:
        gc.unfreeze()


def collect_all() -> None:
    """Collect all garbage inside of :func:`own_garbage_only`, objects made before it included.

    A test's instance is made when the test is collected: tensors that a try of the test stored in
    the instance die with it.
    """
    gc.unfreeze()
    collect_garbage()
    gc.freeze()
    begin_count()


@contextmanager
def expandable_segments() -> Iterator[bool]:
    """Switch expandable segments on; yield False where they were on already.

    The allocator's settings are put back at the end.
    """
    import torch

    snapshot_settings = torch.cuda.memory._snapshot()["allocator_settings"]
    if snapshot_settings.get("expandable_segments"):
        yield False
        return
    settings = snapshot_settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    unchanged = [
        setting
        for setting in settings.split(",")
        if setting and not setting.strip().startswith("expandable_segments")
    ]
    _set_allocator(",".join([*unchanged, "expandable_segments:True"]))
    try:
        with warnings.catch_warnings():  # PyTorch asks for a fabric, which few GPUs have
            warnings.filterwarnings("ignore", message="nvmlDeviceGetGpuFabricInfo")
            yield True
    finally:
        torch.cuda.empty_cache()
        _set_allocator("expandable_segments:False")  # settings that omit it do not switch it off
        _set_allocator(settings)


def _set_allocator(settings: str) -> None:
    """Set the allocator's settings while it runs: ``PYTORCH_CUDA_ALLOC_CONF``'s value."""
    import torch

    binding = "_accelerator_setAllocatorSettings"
    if not hasattr(torch._C, binding):  # older than torch 2.9
        binding = "_cuda_cudaCachingAllocator_set_allocator_settings"
    getattr(torch._C, binding)(settings)


def provenance(info: DeviceInfo) -> Provenance:
    """Return the versions and the allocator settings of this process."""
    import torch

    return Provenance(
        torch=str(torch.__version__),
        cuda=f"HIP {torch.version.hip}" if torch.version.hip else str(torch.version.cuda),
        cudnn=cudnn_version(),
        driver=driver.version(info.kind),
        allocator=os.environ.get(
            "PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        ),
    )


@cache
def cudnn_version() -> str:
    """Return cuDNN's version, "none" where PyTorch can use none; a slow question, asked once."""
    from torch.backends import cudnn

    try:
        return str((cudnn.version() if cudnn.is_available() else None) or "none")
    except RuntimeError:  # the GPU is older than this cuDNN supports, or the libraries differ
        return "none"
