"""PyTorch's functions for one type of device: CUDA's here, those for other types in subclasses.

Measuring code calls these functions through ``VIEW.backend`` of ``recording/allocator_view.py``,
whatever the device's type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Bindings(NamedTuple):
    """The names of functions of ``torch._C``; "" for one that the backend lacks."""

    stats: str
    reset_peaks: str
    empty_cache: str
    pinned_stats: str = ""
    reset_pinned_peaks: str = ""


class Backend:
    """CUDA's functions, on NVIDIA's GPUs or on AMD's."""

    title = "CUDA"
    device_type = "cuda"
    """``torch.device.type`` of its tensors"""
    bindings = Bindings(
        "_cuda_memoryStats",
        "_cuda_resetPeakMemoryStats",
        "_cuda_emptyCache",
        "_cuda_hostMemoryStats",
        "_cuda_resetPeakHostMemoryStats",
    )
    lists_blocks = True
    """whether the allocator can list its segments and blocks at any time, and can allocate a block
    that belongs to no tensor"""
    caps = True
    """whether the allocator can be limited to fewer bytes than the device has"""

    def complete(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Return statistics of ``bindings.stats``; fill in figures that are not counted."""
        return stats

    def allocator(self) -> str:
        """Return the name of the allocator that serves tensors; only "native" has statistics."""
        import torch

        return str(torch.cuda.get_allocator_backend())

    def is_initialized(self) -> bool:
        """Return whether this process has initialized devices, and they are still visible to it."""
        import torch

        # A virtual GPU that was used but is hidden now does not count.
        return torch.cuda.is_initialized() and bool(torch.cuda.device_count())

    def current_device(self) -> int:
        """Return the index of PyTorch's current device."""
        import torch

        return torch.cuda.current_device()

    def used_devices(self) -> list[int]:
        """Return the devices on which this process has a context, or may have one."""
        import torch

        bindings: Any = torch._C  # torch 2.14's type stubs lack some functions
        devices = range(torch.cuda.device_count())
        return [device for device in devices if bindings._cuda_hasPrimaryContext(device)]

    def synchronize(self, device: int | None = None) -> None:
        """Wait for the kernels of a device, or of the current one if it is None.

        Raises:
            RuntimeError: PyTorch's report of a kernel's error.
        """
        import torch

        torch.cuda.synchronize(device)

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a graph: then it must not be synchronized."""
        import torch

        return torch.cuda.is_current_stream_capturing()

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return the free and the total bytes of a device.

        Raises:
            RuntimeError: the backend cannot report them.
        """
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return free, total

    def clear_workspaces(self) -> None:
        """Free cuBLAS's workspaces, which PyTorch keeps for later calls."""
        import torch

        torch._C._cuda_clearCublasWorkspaces()

    @property
    def records(self) -> bool:
        """Whether the allocator records its history: when and where each block was allocated."""
        return True

    def record_history(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - as PyTorch's
        """Call ``torch.cuda.memory._record_memory_history``."""
        import torch

        torch.cuda.memory._record_memory_history(*arguments, **options)

    def snapshot(self) -> dict[str, Any]:
        """Return ``torch.cuda.memory._snapshot()``: the history, and the current segments."""
        import torch

        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        return snapshot

    def capability(self) -> tuple[int, int]:
        """Return the first device's compute capability."""
        import torch

        return torch.cuda.get_device_capability(0)

    def observe_refusals(self, observe: Callable[[int, int, int, int], None]) -> bool:
        """Call ``observe`` whenever the allocator refuses a request, until the process ends.

        Its arguments are the device, the bytes requested, the allocator's limit and the free bytes.

        Returns:
            whether this version of PyTorch can do so.
        """
        import torch

        if not hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
            return False
        torch._C._cuda_attach_out_of_memory_observer(observe)
        return True

    def is_out_of_memory(self, error: BaseException | None) -> bool:
        """Return whether the allocator raised this error for lack of memory."""
        import torch

        return isinstance(error, torch.OutOfMemoryError)


CUDA: Final = Backend()
