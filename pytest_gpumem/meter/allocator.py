"""PyTorch's caching allocator: settings, versions, and a clean state before each step.

All functions expect torch to be imported and CUDA initialized.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices import driver
from pytest_gpumem.devices.memory_cap import device_range
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.measurement import Provenance
from pytest_gpumem.meter.host_memory import empty_pinned_cache
from pytest_gpumem.meter.plugs import WORKSPACES
from pytest_gpumem.meter.reading import current
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.recording.collector import begin_count, begin_count_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.measurement import DeviceInfo

NO_CACHING: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""environment variable: if it is set, whatever its value, PyTorch bypasses its cache"""
MAX_COLLECTIONS: Final = 50
"""maximum number of consecutive collections: each one may turn more objects into garbage"""
SWITCHED_OFF: Final = Note(
    NoteKind.OUTSIDE,
    "the step switched PyTorch's caching allocator off (caching_allocator_enable(False)) "
    "and not on again: memory allocated without this allocator is in no peak; later tests "
    "use the allocator again",
)


def require_native_allocator() -> None:
    """Refuse allocators other than PyTorch's native one, and the native one without its cache.

    Other allocators have no snapshots, and no record of refused requests.

    Raises:
        DeviceError: the backend is cudaMallocAsync or a pluggable allocator, or an environment
            variable or the program has switched the cache off.
    """
    backend = VIEW.backend.allocator()
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
    """Return whether the caching allocator is disabled; torch 2.11 and older cannot report it."""
    import torch

    is_enabled = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    return is_enabled is not None and not is_enabled()


def switch_on() -> None:
    """Re-enable the caching allocator if a step left it disabled."""
    import torch

    if is_switched_off():
        torch.cuda.memory.caching_allocator_enable(value=True)


def reset_peaks(devices: int | range) -> None:
    """Reset the peaks of devices and pinned memory without the test's code seeing it."""
    for device in device_range(devices):
        VIEW.reset_peaks(device)
    VIEW.reset_pinned_peaks()


def settle(devices: int | range, *, needs_collection: Callable[[], bool] | None = None) -> None:
    """Release unused memory: garbage, cuBLAS workspaces, cached segments, cached pinned memory.

    cuBLAS workspaces count as allocated, and the first test that calls cuBLAS creates them. They
    are cleared so that every test creates its own.

    If memory is still allocated then, ``needs_collection`` decides whether to collect garbage; by
    default it is collected.
    """
    measured = device_range(devices)
    for device in measured:
        VIEW.backend.synchronize(device)
    if any(current(device).reserved for device in measured):
        WORKSPACES.clear(measured)
    # With many modules loaded a collection takes a tenth of a second: skip it if it cannot help.
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

    One collection is not always enough. Objects that C++ refers to (an autograd node's hooks)
    become garbage only after a collection has freed the node. While another thread is collecting,
    ``gc.collect()`` returns at once without collecting.
    """
    for _ in range(MAX_COLLECTIONS):
        number = gc.get_stats()[-1]["collections"]
        unreachable = gc.collect()
        if gc.get_stats()[-1]["collections"] == number:
            time.sleep(0.01)  # let the other thread finish
        elif not unreachable:
            return


@contextmanager
def own_garbage_only() -> Iterator[None]:
    """Freeze existing objects, so that Python's cyclic collector runs at the same points each time.

    The collector is triggered by the number of live and of new objects. If it frees garbage earlier
    or later, a step's peak changes.
    """
    gc.freeze()
    begin_count()  # its collection is fast: everything is frozen
    try:
        yield
    finally:
        gc.unfreeze()


def collect_all() -> None:
    """Collect all garbage inside :func:`own_garbage_only`, including objects made before it.

    pytest creates a test's instance during test collection, which is before the block. Tensors that
    a run of the test stored in the instance are freed only with the instance.
    """
    gc.unfreeze()
    collect_garbage()
    gc.freeze()
    begin_count()


@contextmanager
def expandable_segments() -> Iterator[bool]:
    """Enable expandable segments; yield False if they were already enabled.

    Restore the allocator's settings at the end.
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
        with warnings.catch_warnings():  # PyTorch warns if the GPU has no fabric
            warnings.filterwarnings("ignore", message="nvmlDeviceGetGpuFabricInfo")
            yield True
    finally:
        torch.cuda.empty_cache()
        _set_allocator("expandable_segments:False")  # leaving it out does not disable it
        _set_allocator(settings)


def _set_allocator(settings: str) -> None:
    """Apply a value of ``PYTORCH_CUDA_ALLOC_CONF`` to the running allocator."""
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
        cuda=f"HIP {torch.version.hip}" if torch.version.hip else str(torch.version.cuda or "none"),
        cudnn=cudnn_version(),
        driver=driver.version(info.kind),
        allocator=os.environ.get(
            "PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        ),
    )


@cache
def cudnn_version() -> str:
    """Return cuDNN's version, or "none" if PyTorch cannot use it; cached, as the call is slow."""
    from torch.backends import cudnn

    try:
        return str((cudnn.version() if cudnn.is_available() else None) or "none")
    except RuntimeError:  # the GPU is older than this cuDNN supports, or the libraries differ
        return "none"
