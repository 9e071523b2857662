"""Runs at the start of each Python process that a marked test or ``gpumem run`` starts.

The process gets its parent's virtual GPU, if there is one, and writes its peaks if the parent
collects them.

Python imports the first ``sitecustomize`` on its path. This one imports the user's own, if there is
one, and does little else until torch is imported. See :mod:`pytest_gpumem.devices.children`.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

FOLDER = str(Path(__file__).parent)


class _TorchGuard(MetaPathFinder):
    """Starts to watch this process just before it imports torch.

    If it started earlier, pytest would warn that a plugin's package was imported before the plugin
    was registered.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        # Errors are ignored: the interpreter may lack this package, or have another version.
        with suppress(Exception):
            from pytest_gpumem.devices.children import watch_this_process

            watch_this_process()
        return importlib.util.find_spec(fullname)


def _import_next() -> None:
    """Import the ``sitecustomize`` that Python would have found without this one."""
    this = sys.modules.pop(__name__)
    path = list(sys.path)
    sys.path[:] = [folder for folder in path if folder != FOLDER]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # When the import of this module ends, the import system looks it up in sys.modules.
        sys.modules.setdefault(__name__, this)


sys.meta_path.insert(0, _TorchGuard())
if __name__ == "sitecustomize":
    _import_next()
