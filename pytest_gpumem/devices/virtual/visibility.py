"""Hiding the virtual GPU outside of marked tests, from the import of torch on.

PyTorch counts its devices once in a process and keeps the answer, so the native runtime always
tells it the truth. Hiding happens above PyTorch: in the bindings behind ``torch.cuda.is_available``
and ``torch.cuda.device_count``, so that even a name imported earlier (``from torch.cuda import
is_available``) sees the machine as it is. (Below PyTorch, the native library hides it from code
that asks the driver or NVML.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


class Curtain:
    """Stands in for PyTorch's device counts: tells its users the number of visible devices."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._shown = 0
        # of torch.cuda, and of torch.accelerator where that asks for itself (before torch 2.8)
        for name in ("_cuda_getDeviceCount", "_accelerator_deviceCount"):
            if hasattr(torch._C, name):
                setattr(torch._C, name, self._count)
        torch.cuda._device_count_nvml = self._count

    def _count(self) -> int:
        return self._shown

    def show(self, count: int) -> None:
        """Let PyTorch's users see so many devices; 0 hides them."""
        self._shown = count
        # torch.cuda.device_count() keeps its first answer once CUDA is initialised
        self._torch.cuda._cached_device_count = None
