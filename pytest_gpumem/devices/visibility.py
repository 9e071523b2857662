"""Hiding the virtual GPU from everybody, from the moment that torch is imported.

PyTorch counts its devices once in a process and keeps the answer, so the native runtime always
tells it the truth. Hiding happens above PyTorch: in the bindings behind ``torch.cuda.is_available``
and ``torch.cuda.device_count``, so that even a name imported earlier (``from torch.cuda import
is_available``) sees the machine as it is. (Below PyTorch, the native library hides it from
whoever asks the driver or NVML.)
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class TorchImportHook(MetaPathFinder):
    """Calls back once, right after torch has been imported by whoever comes first."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self._imported = imported

    def install(self) -> None:
        """Wait for the import."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch as the other finders do, with a loader that calls back."""
        del path, target
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._done)
        return spec

    def _done(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        self._imported(module)


class _CallingLoader(Loader):
    """Loads as another loader does, then puts that one back in its place and calls."""

    def __init__(self, loader: Loader, loaded: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._loaded = loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._put_back(module)
        self._loader.exec_module(module)
        self._loaded(module)

    def _put_back(self, module: ModuleType) -> None:
        """Make the other loader the module's own, also where a hook like this lies around."""
        if module.__loader__ is self:
            module.__loader__ = self._loader
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__.loader = self._loader

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - stands for any loader
        return getattr(self._loader, name)


class Curtain:
    """Between PyTorch's users and the virtual devices: says how many of them there are."""

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
