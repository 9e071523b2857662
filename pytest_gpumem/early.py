"""The last moment before torch is imported: the virtual GPU has to be loaded by then.

Waiting for it costs nothing, so that a suite that never imports torch pays nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class TorchGuard(MetaPathFinder):
    """Calls once, when somebody looks for torch for the first time; finds it as the others do."""

    def __init__(self) -> None:
        self._call: Callable[[], object] | None = None

    def install(self, call: Callable[[], object]) -> None:
        """Wait for the import, or change what is called then; nothing if torch is there already."""
        if "torch" in sys.modules:
            return
        if self._call is None:
            sys.meta_path.insert(0, self)
        self._call = call

    def remove(self) -> None:
        """Wait no longer."""
        self._call = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Call, then let all others find torch, those that the call has put in front as well."""
        del path, target
        if fullname != "torch" or self._call is None:
            return None
        call = self._call
        self.remove()
        call()
        return importlib.util.find_spec(fullname)
