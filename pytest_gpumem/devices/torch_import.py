"""Import hooks on ``sys.meta_path``: just before torch is imported, and just after any module.

The virtual GPU has to be loaded before torch is imported, and has to patch torch right after that.
Until then a hook costs nothing, so a suite that never imports torch pays nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class TorchGuard(MetaPathFinder):
    """Calls a function once, just before torch is first imported."""

    def __init__(self) -> None:
        self._call: Callable[[], object] | None = None

    def install(self, call: Callable[[], object]) -> None:
        """Install the hook, or replace its function; do nothing if torch is imported already."""
        if "torch" in sys.modules:
            return
        if self._call is None:
            sys.meta_path.insert(0, self)
        self._call = call

    def remove(self) -> None:
        """Remove the hook."""
        self._call = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Call the function, which may install finders; return torch's spec from other finders."""
        del path, target
        if fullname != "torch" or self._call is None:
            return None
        call = self._call
        self.remove()
        call()
        return importlib.util.find_spec(fullname)


class ImportHooks(MetaPathFinder):
    """Calls functions right after the first import of a module: one finder for all modules."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Callable[[ModuleType], object]]] = {}

    def call_after(self, module: str, call: Callable[[ModuleType], object]) -> None:
        """Call a function with a module once the module is imported, or now if it already is."""
        if module in sys.modules:
            call(sys.modules[module])
            return
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._calls.setdefault(module, []).append(call)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec, with a loader that calls the functions after loading."""
        calls = self._calls.pop(fullname, None)
        if calls is None:
            return None
        del path, target
        try:
            spec = importlib.util.find_spec(fullname)  # no recursion: _calls lacks the module now
        finally:
            self._calls[fullname] = calls

        def loaded(module: ModuleType) -> None:
            for call in self._calls.pop(fullname, ()):
                call(module)

        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, loaded)
        return spec


IMPORTS: Final = ImportHooks()


class _CallingLoader(Loader):
    """Makes the wrapped loader a module's loader again, loads the module, and calls a function."""

    def __init__(self, loader: Loader, loaded: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._loaded = loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # If another hook wrapped this loader, the module's loader is that wrapper: keep it.
        if module.__loader__ is self:
            module.__loader__ = self._loader
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._loaded(module)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - stands for any loader
        return getattr(self._loader, name)


# -- torch.compile --


_hidden: set[str] = set()


def hide_from_compiler() -> None:
    """Hide this package's frames and the functions it wraps from ``torch.compile``.

    This takes effect now, or when PyTorch's compiler is imported, once per process.
    """
    from pytest_gpumem.recording.wrapped_functions import (
        RULES,
        TRACER,
        hide_while_tracing,
        skip_own_frames,
    )

    for name, hide in ((RULES, skip_own_frames), (TRACER.module, hide_while_tracing)):
        if name not in _hidden:
            _hidden.add(name)
            IMPORTS.call_after(name, hide)
