"""Runs at the start of each Python process that a marked test or ``gpumem run`` starts.

On a virtual GPU it adapts torch.distributed; below ``gpumem run`` the process leaves its peaks.

Python imports the first ``sitecustomize`` on its path. This one imports the user's own, if there is
one, and costs little more until torch is imported. See :mod:`pytest_gpumem.devices.children`.
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
    """Watches this process just before it imports torch.

    Not sooner: pytest warns of a plugin's package that was imported before it was.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        # An interpreter without this package, or with another version, works as if not watched.
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
        # the import machinery takes the module from here at the end of its import
        sys.modules.setdefault(__name__, this)


sys.meta_path.insert(0, _TorchGuard())
if __name__ == "sitecustomize":
    _import_next()
